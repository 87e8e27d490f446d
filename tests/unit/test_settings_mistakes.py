"""All mistakes of the settings at once, and the two forms of a list in a text."""

from pathlib import Path

import pytest

from pdproxy.settings.errors import SettingsError
from pdproxy.settings.load import POOL, EngineFlag, Flag, load
from pdproxy.transfer import registry

DECODE = (EngineFlag("decode", "127.0.0.1:8300"),)
NODE = "pools: [{nodes: [{url: 'http://a:1', role: %s}]}]"


def write(folder: Path, text: str) -> Path:
    path = folder / "x.yaml"
    path.write_text(text)
    return path


def mistakes(
    config: Path | None,
    env: dict[str, str],
    flags: tuple[Flag, ...] = (),
    engines: tuple[EngineFlag, ...] = DECODE,
) -> list[str]:
    """The lines of the error that loading gives."""
    with pytest.raises(SettingsError) as caught:
        load(config, env, flags, engines)
    assert all(line.isprintable() for line in caught.value.mistakes)
    return list(caught.value.mistakes)


def test_all_mistakes_of_all_sources_at_once(tmp_path: Path) -> None:
    """Each names its key and its source, in the order file, variables, flags, engines, and what
    excludes what.
    """
    path = write(
        tmp_path,
        "listen: {port: x, hots: y}\nlisten: {port: y}\nobserve: {log_level: loud}\n"
        "auth: {engine_api_key: k, engine_api_key_file: f}\nlimits: {max_answer_bytes: 9, "
        "max_buffered_answer_bytes: 8}\n"
        "pools: [{tokenize: on, nodes: [{url: 'http://a:1'}, {url: 'b:2', role: decode}]}]",
    )
    env = {
        "PDPROXY_LIMIT__ATTEMPTS": "1",
        "PDPROXY_DEADLINES__QUEUE": "-1",
        "PDPROXY_DEADLINES__TOTAL": "",
    }
    engines = (EngineFlag("prefill", "http://c:1"), EngineFlag("decode", "http://d/v1"))
    flags = (
        Flag("--max-inflight", "limits.max_inflight", "0"),
        Flag("--connector", f"{POOL}connector", "nixel"),
    )
    file = f"(file {path})"
    assert mistakes(path, env, flags, engines) == [
        f"listen: given twice, in line 1 and 2 {file}",
        f'listen.port: expected a whole number >= 1 and <= 65535, got "y" {file}',
        f'observe.log_level: expected debug or info or warning or error, got "loud" {file}',
        f"pools[0].tokenize: expected off or auto or always, got true {file}",
        (
            "pools[0].nodes[0].role: missing: expected prefill or decode or aggregated or any or "
            f"encode or by_label {file}"
        ),
        (
            'deadlines.queue: expected a number > 0 and <= 604800, got "-1" (environment '
            "PDPROXY_DEADLINES__QUEUE)"
        ),
        "PDPROXY_DEADLINES__TOTAL: is empty: unset the environment variable or give it a value",
        (
            "PDPROXY_LIMIT__ATTEMPTS: unknown environment variable (did you mean "
            "PDPROXY_LIMITS__ATTEMPTS?)"
        ),
        (
            'limits.max_inflight: expected a whole number >= 1 and <= 2147483647, got "0" '
            "(--max-inflight)"
        ),
        (
            f"pools[0].connector: expected {' or '.join(registry.choices())}, "
            'got "nixel" (did you mean nixl?) (--connector)'
        ),
        f'pools[0].nodes[1].url: "b:2": expected http://host:port or https://host:port {file}',
        (
            'pools[0].nodes[3].url: "http://d/v1": an engine is a host and a port, and perhaps a '
            "path before its routes: "
            "nothing may follow, not even /v1 (--decode)"
        ),
        f"auth: engine_api_key and engine_api_key_file exclude each other: give one {file}",
    ]


def test_what_excludes_what_is_found_in_all_sections_at_once(tmp_path: Path) -> None:
    """No section hides the contradictions in another, and each names where its values were read."""
    path = write(
        tmp_path,
        "listen: {trusted_proxies: [x, 10.0.0.1, y], tls: {key: k}}\nlimits: {max_answer_bytes: "
        "9}\n"
        "pools: [{lmcache: {pd_buffer_size: 1}, nodes: [{url: 'http://a:1', role: decode, "
        "api_key: k, api_key_file: f},"
        " {url: 'http://b:1', role: decode, sources: ['http://c:1']}]}]",
    )
    file = f"(file {path})"
    env = {"PDPROXY_LIMITS__MAX_BUFFERED_ANSWER_BYTES": "8"}
    assert mistakes(path, env, (), (EngineFlag("aggregated", "a:1"),)) == [
        f"listen.tls.key: has no effect without listen.tls.certificate {file}",
        (
            f'listen.trusted_proxies[0]: "x": expected an address or a network, such as '
            f"10.0.0.0/8, "
            f"or unix: {file}"
        ),
        (
            f'listen.trusted_proxies[2]: "y": expected an address or a network, such as '
            f"10.0.0.0/8, "
            f"or unix: {file}"
        ),
        (
            "limits.max_buffered_answer_bytes = 8 has no space for an answer of "
            "limits.max_answer_bytes = 9 "
            "(environment PDPROXY_LIMITS__MAX_BUFFERED_ANSWER_BYTES)"
        ),
        f"pools[0].nodes[0]: api_key and api_key_file exclude each other: give one {file}",
        f"pools[0].lmcache: pd_buffer_size and kv_bytes_per_token must be given together {file}",
        (
            "pools[0].nodes[0] and pools[0].nodes[2]: http://a:1 is given twice: an engine has "
            "one role "
            "(flags add to the file's nodes) (--aggregated)"
        ),
        f"pools[0].nodes[1].sources[0]: http://c:1 is no prefill engine of this pool {file}",
    ]


def test_a_mistake_causes_no_others(tmp_path: Path) -> None:
    """A file that can't be read, a misspelt section and a wrong node don't look like missing
    engines.
    """
    assert mistakes(tmp_path / "none.yaml", {}, (), ()) == [
        f"{tmp_path / 'none.yaml'}: can't be read: No such file or directory"
    ]
    path = write(tmp_path, "pool: [{nodes: [{url: 'http://a:1', role: decode}]}]")
    assert mistakes(path, {}, (), ()) == [f"pool: unknown key (did you mean pools?) (file {path})"]
    path.write_text("nodes: []")
    assert mistakes(path, {}, (), ())[0] == (
        f"nodes: unknown key (did you mean pools[0].nodes?) (file {path})"
    )
    path = write(tmp_path, NODE % "decod")
    assert mistakes(path, {}, (), (EngineFlag("prefill", "b:1"),)) == [
        (
            "pools[0].nodes[0].role: expected prefill or decode or aggregated or any or "
            f'encode or by_label, got "decod" (did you mean decode?) (file {path})'
        )
    ]


def test_the_number_of_lines_is_bounded(tmp_path: Path) -> None:
    """Beyond twenty mistakes only their number is stated."""
    path = write(tmp_path, "\n".join(f"x{number}: 1" for number in range(500)))
    found = mistakes(path, {"PDPROXY_X": "1"})
    assert len(found) == 21
    assert found[:2] == [f"x0: unknown key (file {path})", f"x1: unknown key (file {path})"]
    assert found[-1] == "and 481 more"


ORIGINS = "listen.cors.allowed_origins"


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ('["https://a"]', ("https://a",)),
        (' [ "https://a", "https://b" ] ', ("https://a", "https://b")),
        ("[]", ()),
        ("https://a, https://b", ("https://a", "https://b")),
        ("*", ("*",)),
    ],
)
def test_a_list_is_comma_separated_or_json(text: str, origins: tuple[str, ...]) -> None:
    """Both forms, in flags and variables: vLLM's own flags take JSON."""
    assert (
        load(None, {}, (Flag("--x", ORIGINS, text),), DECODE).listen.cors.allowed_origins == origins
    )
    env = {"PDPROXY_LISTEN__CORS__ALLOWED_ORIGINS": text}
    assert load(None, env, (), DECODE).listen.cors.allowed_origins == origins


@pytest.mark.parametrize(
    "text", ['["https://a"', "[https://a]", "['https://a']", '["https://a"] x', "[" * 100_000]
)
def test_broken_json_is_no_origin(text: str) -> None:
    """What begins as a JSON list and is none is refused, not taken as one literal item."""
    (line,) = mistakes(None, {}, (Flag("--allowed-origins", ORIGINS, text),))
    assert line.startswith(f"{ORIGINS}: expected a list, got ")
    assert line.endswith(" (--allowed-origins)")


def test_an_item_of_a_json_list_is_checked() -> None:
    """An item that is no text is refused; one that is empty, too."""
    lines = mistakes(None, {}, (Flag("--x", ORIGINS, '["https://a", 1, {"b": 2}, ""]'),))
    assert lines == [
        f"{ORIGINS}[1]: expected text that isn't empty, got 1 (--x)",
        f"{ORIGINS}[2]: expected text that isn't empty, got a mapping (--x)",
        f'{ORIGINS}[3]: expected text that isn\'t empty, got "" (--x)',
    ]


def test_bytes_that_are_no_text_are_a_mistake(tmp_path: Path) -> None:
    """Python reads such a byte of a variable or a flag as half of a surrogate pair; YAML can escape
    one.
    """
    path = write(tmp_path, 'limits: {max_inflight: "\\udcff"}')
    found = mistakes(
        path,
        {"PDPROXY_LISTEN__PORT": "\udcff"},
        (Flag("--kv-ready-port", "kv_ready.port", "\udcff"),),
    )
    assert [line.partition(",")[0] for line in found] == [
        "limits.max_inflight: expected a whole number >= 1 and <= 2147483647",
        "listen.port: expected a whole number >= 1 and <= 65535",
        "kv_ready.port: expected a whole number >= 1 and <= 65535",
    ]
    assert all(r'got "\udcff" (' in line for line in found)
