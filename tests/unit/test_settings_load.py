"""Where settings come from, which source wins, and how a mistake in each is told."""

from pathlib import Path

import pytest

from pdproxy.settings.errors import SettingsError
from pdproxy.settings.files import MAX_BYTES
from pdproxy.settings.load import POOL, EngineFlag, Flag, load
from pdproxy.settings.schema import Settings
from pdproxy.transfer import registry

DECODE = (EngineFlag("decode", "127.0.0.1:8300"),)


def write(folder: Path, text: str) -> Path:
    path = folder / "x.yaml"
    path.write_text(text)
    return path


def error(
    config: Path | None = None, env: dict[str, str] | None = None, flags: tuple[Flag, ...] = ()
) -> str:
    """The text of the error that loading gives."""
    with pytest.raises(SettingsError) as caught:
        load(config, env or {}, flags, DECODE)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value)


def test_defaults() -> None:
    """Without any source, the settings are the schema's defaults, with one pool."""
    settings = load(None, {}, need_engines=False)
    assert settings.listen.port == 8000
    assert settings.pool.name == "default"
    assert settings.deadlines == Settings().deadlines


def test_flags_over_environment_over_file(tmp_path: Path) -> None:
    """Each source hides the weaker ones, key by key."""
    config = write(
        tmp_path, "listen: {host: file, port: 1}\nlimits: {attempts: 7}\ndeadlines: {queue: 9}"
    )
    env = {
        "PDPROXY_LISTEN__PORT": "2",
        "PDPROXY_LISTEN__HOST": "env",
        "PDPROXY_LIMITS__ATTEMPTS": "8",
    }
    settings = load(config, env, [Flag("--port", "listen.port", "3")], DECODE)
    assert (settings.listen.port, settings.listen.host) == (3, "env")
    assert (settings.limits.attempts, settings.deadlines.queue) == (8, 9.0)
    assert settings.deadlines.connect == 2.0


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    """PDPROXY_CONFIG names the file, unless the caller names one."""
    (tmp_path / "a").mkdir()
    named, given = write(tmp_path / "a", "listen: {port: 1}"), write(tmp_path, "listen: {port: 2}")
    env = {"PDPROXY_CONFIG": str(named)}
    assert load(None, env, (), DECODE).listen.port == 1
    assert load(given, env, (), DECODE).listen.port == 2


def test_engines_of_flags_come_after_those_of_the_file(tmp_path: Path) -> None:
    """Flags add to the first pool; a bare host:port gets a scheme."""
    config = write(
        tmp_path,
        "pools: [{name: gpu, nodes: [{url: 'http://a:1', role: prefill, labels: {zone: b}}]}]",
    )
    pool = load(
        config, {}, (), [EngineFlag("decode", "b:2"), EngineFlag("aggregated", "http://c:3")]
    ).pool
    assert [(n.url, n.role) for n in pool.nodes] == [
        ("http://a:1", "prefill"),
        ("http://b:2", "decode"),
        ("http://c:3", "aggregated"),
    ]
    assert (pool.name, pool.nodes[0].labels) == ("gpu", {"zone": "b"})


def test_connector_flag() -> None:
    """--connector sets the first pool's, and is refused by name where it isn't known."""
    assert (
        load(None, {}, [Flag("--connector", f"{POOL}connector", "nixl")], DECODE).pool.connector
        == "nixl"
    )
    flag = Flag("--connector", f"{POOL}connector", "lmcache")
    assert (
        error(flags=(flag,)) == f"pools[0].connector: expected {' or '.join(registry.choices())}, "
        'got "lmcache" (did you mean lmcache-pd?) (--connector)'
    )


def test_tokenize_flags() -> None:
    """--tokenize and --tokenizer set the first pool's, over the file's."""
    flags = [
        Flag("--tokenize", f"{POOL}tokenize", "always"),
        Flag("--tokenizer", f"{POOL}tokenizer", "/m"),
    ]
    pool = load(None, {}, flags, DECODE).pool
    assert (pool.tokenize, pool.tokenizer) == ("always", "/m")
    assert (
        load(None, {}, (), DECODE).pool.tokenize,
        load(None, {}, (), DECODE).pool.tokenizer,
    ) == ("auto", None)
    wrong = Flag("--tokenize", f"{POOL}tokenize", "never")
    assert (
        error(flags=(wrong,))
        == 'pools[0].tokenize: expected off or auto or always, got "never" (--tokenize)'
    )


def test_off_as_yaml_reads_it(tmp_path: Path) -> None:
    """`tokenize: off` is false to YAML; `true` and `on` are still no value of it."""
    file = tmp_path / "file.yaml"
    for text in ("off", "'off'", "no"):
        file.write_text(f"pools: [{{tokenize: {text}}}]\n")
        assert load(file, {}, (), DECODE).pool.tokenize == "off"
    file.write_text("pools: [{tokenize: on}]\n")
    assert (
        error(file) == f"pools[0].tokenize: expected off or auto or always, got true (file {file})"
    )


def test_loading_changes_no_argument() -> None:
    """The environment that was passed in stays as it was."""
    env = {"PDPROXY_LISTEN__PORT": "2"}
    load(None, env, (), DECODE)
    assert env == {"PDPROXY_LISTEN__PORT": "2"}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("PDPROXY_LISTEN__PORT", "9000", lambda s: s.listen.port == 9000),
        ("PDPROXY_LISTEN__PORT", " 9000\n", lambda s: s.listen.port == 9000),
        ("PDPROXY_DEADLINES__FIRST_TOKEN", "5", lambda s: s.deadlines.first_token == 5.0),
        ("PDPROXY_DEADLINES__FIRST_TOKEN", "0.25", lambda s: s.deadlines.first_token == 0.25),
        ("PDPROXY_AUTH__API_KEYS", "one", lambda s: s.auth.api_keys == ("one",)),
        ("PDPROXY_AUTH__API_KEYS", "one, two,3", lambda s: s.auth.api_keys == ("one", "two", "3")),
        ("PDPROXY_AUTH__ENGINE_API_KEY", "null", lambda s: s.auth.engine_api_key == "null"),
        ("PDPROXY_AUTH__ENGINE_API_KEY", "12", lambda s: s.auth.engine_api_key == "12"),
        ("PDPROXY_LIMITS__MAX_QUEUE", "0", lambda s: s.limits.max_queue == 0),
        ("PDPROXY_OVERLOAD__WEIGHTS", '{"a": 3}', lambda s: s.overload.weights == {"a": 3}),
        ("PDPROXY_OBSERVE__LOG_FORMAT", "json", lambda s: s.observe.log_format == "json"),
    ],
)
def test_environment_values(name: str, text: str, value: object) -> None:
    """A variable's text becomes what its setting is."""
    assert callable(value)
    assert value(load(None, {name: text}, (), DECODE))


@pytest.mark.parametrize(
    "name",
    [
        "PDPROXY_ENGINES_DIR",
        "PDPROXY_ENGINES_KEEP",
        "PDPROXY_REQUIRE_ENGINES",
        "PDPROXY_TORCH_INDEX",
        "PDPROXY_TEST_ANYTHING",
        "PDPROXY_SERVICE_HOST",
        "PDPROXY_SERVICE_PORT",
        "PDPROXY_SERVICE_PORT_HTTP",
        "PDPROXY_PORT_8000_TCP",
        "PDPROXY_PORT_8000_TCP_ADDR",
        "PDPROXY_CANARY_SERVICE_HOST",
        "PDPROXY_CANARY_PORT_8000_TCP_PROTO",
        "pdproxy_listen__port",
        "PDPROXYX",
        "PATH",
    ],
)
def test_variables_that_are_no_settings(name: str) -> None:
    """Tests' own variables, Kubernetes' service links and other programs' variables are left
    alone.
    """
    assert load(None, {name: "1"}, (), DECODE).listen.port == 8000


@pytest.mark.parametrize("name", ["PDPROXY_PORT", "PDPROXY_CANARY_PORT"])
def test_kubernetes_port_link_is_told_by_its_value(name: str) -> None:
    """PDPROXY_PORT=tcp://... is Kubernetes speaking, PDPROXY_PORT=9000 somebody who means
    listen.port.
    """
    load(None, {name: "tcp://10.0.0.1:8000"}, (), DECODE)
    assert error(env={name: "9000"}).startswith(f"{name}: unknown environment variable")


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (
            {"PDPROXY_DEADLINES__FIRST_TOKEN": "soon"},
            (
                'deadlines.first_token: expected a number > 0 and <= 604800, got "soon" '
                "(environment PDPROXY_DEADLINES__FIRST_TOKEN)"
            ),
        ),
        (
            {"PDPROXY_DEADLINES__FRIST_TOKEN": "5"},
            (
                "PDPROXY_DEADLINES__FRIST_TOKEN: unknown environment variable "
                "(did you mean PDPROXY_DEADLINES__FIRST_TOKEN?)"
            ),
        ),
        (
            {"PDPROXY_LISTEN_PORT": "5"},
            (
                "PDPROXY_LISTEN_PORT: unknown environment variable (did you mean "
                "PDPROXY_LISTEN__PORT?)"
            ),
        ),
        (
            {"PDPROXY_POOLS__0__NAME": "x"},
            (
                "PDPROXY_POOLS__0__NAME: unknown environment variable: "
                "engines are given by flags (--prefill, --decode, --aggregated) or in the YAML file"
            ),
        ),
        ({"PDPROXY_XYZZY\n": "x"}, '"PDPROXY_XYZZY\\n": unknown environment variable'),
        (
            {"PDPROXY_AUTH__API_KEYS": ""},
            "PDPROXY_AUTH__API_KEYS: is empty: unset the environment variable or give it a value",
        ),
        (
            {"PDPROXY_CONFIG": ""},
            "PDPROXY_CONFIG: is empty: unset the environment variable or give it a value",
        ),
        (
            {"PDPROXY_AUTH__API_KEYS": "secret1,sec ret"},
            (
                "auth.api_keys[1]: expected a key of visible ASCII characters without blanks, "
                "got something else (not shown) (environment PDPROXY_AUTH__API_KEYS)"
            ),
        ),
        (
            {"PDPROXY_OBSERVE__LOG_LEVEL": "loud"},
            (
                'observe.log_level: expected debug or info or warning or error, got "loud" '
                "(environment PDPROXY_OBSERVE__LOG_LEVEL)"
            ),
        ),
    ],
)
def test_environment_errors(env: dict[str, str], text: str) -> None:
    """What is wrong with a variable is told with its name, and never with a key in it."""
    assert error(env=env) == text


@pytest.mark.parametrize(
    "text", ["", "\n", "# nothing\n", "---\n", "listen:\n", "{}", "listen: {}\nauth:\n"]
)
def test_empty_files_and_sections_mean_defaults(tmp_path: Path, text: str) -> None:
    """A heading whose keys are all commented out is no mistake."""
    assert load(write(tmp_path, text), {}, (), DECODE).listen.port == 8000


def test_aliases_and_merges(tmp_path: Path) -> None:
    """YAML's means against repetition work, and a key that overrides a merged one is no
    duplicate.
    """
    text = (
        "pools: [{nodes: [&n {url: 'http://a:1', role: decode, labels: {zone: a}}, "
        "{<<: *n, url: 'http://b:1'}, {<<: *n, url: 'http://c:1'}]}]"
    )
    nodes = load(write(tmp_path, text), {}).pool.nodes
    assert [(n.url, n.labels["zone"]) for n in nodes] == [
        ("http://a:1", "a"),
        ("http://b:1", "a"),
        ("http://c:1", "a"),
    ]


NODE = "pools: [{nodes: [{url: 'http://a:1', role: %s}]}]"


def bomb(value: str) -> str:
    """Return a few lines that stand for 9 ** 12 values."""
    lines = [
        f"a{at}: &a{at} " + value.format(", ".join([f"*a{at - 1}"] * 9)) for at in range(1, 13)
    ]
    return "\n".join(["a0: &a0 {url: x}", *lines])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "deadlines: {first_token: soon}",
            'deadlines.first_token: expected a number > 0 and <= 604800, got "soon" (file F)',
        ),
        (
            "deadlines: {total: 0}",
            "deadlines.total: expected a number > 0 and <= 604800, got 0 (file F)",
        ),
        (
            "deadlines: {total: .inf}",
            "deadlines.total: expected a number > 0 and <= 604800, got inf (file F)",
        ),
        (
            "deadlines: {total: .nan}",
            "deadlines.total: expected a number > 0 and <= 604800, got nan (file F)",
        ),
        (
            "deadlines: {total: true}",
            "deadlines.total: expected a number > 0 and <= 604800, got true (file F)",
        ),
        (
            "deadlines: {total: null}",
            "deadlines.total: expected a number > 0 and <= 604800, got null (file F)",
        ),
        (
            "deadlines: {total: '60'}",
            'deadlines.total: expected a number > 0 and <= 604800, got "60" (file F)',
        ),
        (
            "deadlines: {total: [1]}",
            "deadlines.total: expected a number > 0 and <= 604800, got a list (file F)",
        ),
        (
            f"deadlines: {{total: {10**300}}}",
            "deadlines.total: expected a number > 0 and <= 604800, got a huge number (file F)",
        ),
        (
            "listen: {port: 65536}",
            "listen.port: expected a whole number >= 1 and <= 65535, got 65536 (file F)",
        ),
        (
            "listen: {port: 80.5}",
            "listen.port: expected a whole number >= 1 and <= 65535, got 80.5 (file F)",
        ),
        (
            "listen: {host: ''}",
            'listen.host: expected a host name or a bare address, got "" (file F)',
        ),
        (
            "listen: {host: '[::1]'}",
            'listen.host: expected a host name or a bare address, got "[::1]" (file F)',
        ),
        ("listen: 8000", "listen: expected a mapping, got 8000 (file F)"),
        ("lisen: {port: 1}", "lisen: unknown key (did you mean listen?) (file F)"),
        ("xyzzy: 1", "xyzzy: unknown key (file F)"),
        ('"a\\nb": 1', '"a\\nb": unknown key (file F)'),
        ("limits: {1: 2}", "limits: expected text as key, got 1 (file F)"),
        (
            "limits: {breaker_failure: 2}",
            "limits.breaker_failure: unknown key (did you mean breaker_failures?) (file F)",
        ),
        ("[1]", "the top level: expected a mapping, got a list (file F)"),
        ("port", 'the top level: expected a mapping, got "port" (file F)'),
        ("auth: sk-secret", "auth: expected a mapping, got something else (not shown) (file F)"),
        (
            "auth: {api_keys: sk-secret}",
            "auth.api_keys: expected a list, got something else (not shown) (file F)",
        ),
        (
            "auth: {api_keys: [12345]}",
            (
                "auth.api_keys[0]: expected a key of visible ASCII characters without blanks, "
                "got something else (not shown) (file F)"
            ),
        ),
        (
            "auth: {engine_api_key: 'sk-secret\n\n  x'}",
            (
                "auth.engine_api_key: expected a key of visible ASCII characters without blanks "
                "or null, "
                "got something else (not shown) (file F)"
            ),
        ),
        ("auth: {api_keys: null}", "auth.api_keys: expected a list, got null (file F)"),
        (
            NODE % "both",
            (
                "pools[0].nodes[0].role: expected prefill or decode or aggregated or any or "
                'encode or by_label, got "both" '
                "(file F)"
            ),
        ),
        ("pools: {name: x}", "pools: expected a list, got a mapping (file F)"),
        (
            "pools: [{nodes: [{role: decode}]}]",
            "pools[0].nodes[0].url: missing: expected text (file F)",
        ),
        (
            "pools: [{nodes: [{url: 'http://a:1', role: decode, labels: {zone: 1}}]}]",
            "pools[0].nodes[0].labels.zone: expected text, got 1 (file F)",
        ),
        (
            "pools: [{nodes: [{url: 'http://a:1', role: decode, facts: {block_size: 0}}]}]",
            (
                "pools[0].nodes[0].facts.block_size: expected a whole number >= 1 and <= "
                "2147483647 "
                "or null, got 0 (file F)"
            ),
        ),
        ("pools: &a [*a]", "F: an alias stands for what it is a part of"),
        (bomb("[{}]"), "F: its aliases stand for more than 1000000 values"),
        (bomb("{{<<: [{}]}}"), "F: its aliases stand for more than 1000000 values"),
        (
            "listen: {port: 1}\nauth: {}\nlisten: {port: 2}",
            "listen: given twice, in line 1 and 3 (file F)",
        ),
        (
            "pools:\n- nodes: []\n- name: x\n  'name': y",
            "pools[1].name: given twice, in line 3 and 4 (file F)",
        ),
        (
            "listen: {port: 1",
            "F: not YAML: expected ',' or '}', but got '<stream end>' in line 1, column 17",
        ),
        ("a: *b", "F: not YAML: found undefined alias 'b' in line 1, column 4"),
        ("a: 1\n---\nb: 2", "F: not YAML: but found another document in line 2, column 1"),
        ("a: !python/object:os.system 1", None),
        ("a: 2024-13-45", "F: holds a date, a number or a tagged value that can't be read"),
        ("a: " + "1" * 5000, "F: holds a date, a number or a tagged value that can't be read"),
        ("a: \x07", "F: not YAML: holds characters that text can't have"),
        ("[" * 5000, "F: nested too deeply"),
    ],
)
def test_file_errors(tmp_path: Path, text: str, message: str | None) -> None:
    """What is wrong in a file is told with key, expectation, value and file, on one line and
    without secrets.
    """
    path = write(tmp_path, text)
    found = error(path)
    assert "\n" not in found
    assert "secret" not in found
    if message is not None:
        assert found == message.replace("file F", f"file {path}").replace("F:", f"{path}:", 1)


def test_a_stronger_source_does_not_hide_a_mistake(tmp_path: Path) -> None:
    """A wrong value is told even where a flag would have overridden it: the next start may lack the
    flag.
    """
    path = write(tmp_path, "listen: {port: x}")
    assert error(path, {"PDPROXY_LISTEN__PORT": "1"}).startswith(
        "listen.port: expected a whole number"
    )


def test_a_file_of_any_size(tmp_path: Path) -> None:
    """No more of it is read than a file of settings may have, and nothing of a device that never
    ends.
    """
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    assert error(path) == f"{path}: is larger than {MAX_BYTES} bytes"
    assert error(Path("/dev/zero")) == "/dev/zero: is a device, not a regular file"


def test_unreadable_files(tmp_path: Path) -> None:
    """A missing file, a folder and bytes that are no text are told by the file's name."""
    assert (
        error(tmp_path / "none.yaml")
        == f"{tmp_path / 'none.yaml'}: can't be read: No such file or directory"
    )
    assert error(tmp_path) == f"{tmp_path}: is a directory, not a regular file"
    (tmp_path / "x.yaml").write_bytes(b"a: \xff\xfe")
    assert (
        error(tmp_path / "x.yaml")
        == f"{tmp_path / 'x.yaml'}: not YAML: holds characters that text can't have"
    )
    assert "\n" not in error(tmp_path / "a\nb")
    assert "\n" not in error(Path("a\0b"))
