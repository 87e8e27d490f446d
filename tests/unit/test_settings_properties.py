"""Properties of loading: whatever a file, a variable or a flag holds, there are settings or one
line that says why not.
"""

import tempfile
from pathlib import Path

import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pdproxy.settings.conform import leaves
from pdproxy.settings.errors import MAX_MISTAKES, SettingsError
from pdproxy.settings.load import EngineFlag, Flag, load, variable
from pdproxy.settings.schema import Settings

DECODE = (EngineFlag("decode", "127.0.0.1:8300"),)
PATHS = [path for path, _ in leaves(Settings)]
KEYS = st.sampled_from(
    sorted({step for path in PATHS for step in path} | {"pools", "nodes", "url", "role", "labels"})
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["decode", "http://a:1"])
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


def load_text(
    text: bytes, env: dict[str, str] | None = None, flags: tuple[Flag, ...] = ()
) -> Settings | None:
    """Load bytes as a file; None where it is refused properly."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.yaml"
        path.write_bytes(text)
        try:
            loaded = load(path, env or {}, flags, DECODE)
        except SettingsError as error:
            refused(error)
            return None
    assert isinstance(loaded, Settings)
    return loaded


def refused(error: SettingsError) -> None:
    """Check that an error is fit to print: no line break, no escape sequence, no novel."""
    assert 0 < len(error.mistakes) <= MAX_MISTAKES + 1
    for line in error.mistakes:
        assert line.isprintable()
        assert 0 < len(line) < 1000


# A machine that is busy with engines may be slow to draw and to write files; that is no finding.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@relaxed
@given(st.dictionaries(KEYS, trees, max_size=4))
def test_any_tree_loads_or_is_refused_in_one_line(tree: dict[str, object]) -> None:
    """Trees made of our keys and junk values."""
    load_text(yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass"))


@relaxed
@given(
    st.binary(max_size=200)
    | st.text(alphabet="{}[]:,-&*!|>?#'\"%@` \nab1.", max_size=60).map(str.encode)
)
@example(b"a: !!binary {}")
@example(b"? [a]\n: b")
@example(b"? {a: 1}\n: b")
@example(b"a: !!timestamp x")
@example(b"a: !!int ''")
@example(b"a: !!float []")
@example(b"a: !!set [1]")
@example(b"a: !!omap {a: 1}")
@example(b"<<: 1")
@example(b"a: &a {<<: *a}")
@example(b"? *a\n: 1")
@example(b"&a ? *a")
@example(b"%YAML 3.0\n---\na: 1")
@example(b"\xff\xfea\x00")
@example(b"a: " + b"[" * 1000)
def test_any_bytes_load_or_are_refused_in_one_line(text: bytes) -> None:
    """Files that are hardly YAML."""
    load_text(text)


@relaxed
@given(st.sampled_from(PATHS), st.text())
def test_any_variable_and_any_flag_loads_or_is_refused_in_one_line(
    path: tuple[str, ...], text: str
) -> None:
    """Any text in a known variable, and the same text in a flag."""
    load_text(b"", {variable(path): text})
    load_text(b"", flags=(Flag("--x", ".".join(path), text),))


@relaxed
@given(st.text(alphabet=st.characters(blacklist_characters="\0")))
def test_any_unknown_variable_is_refused_in_one_line(name: str) -> None:
    """Any name with our prefix."""
    load_text(b"", {f"PDPROXY_{name}": "x"})


@relaxed
@given(st.text())
def test_any_engine_url_loads_or_is_refused_in_one_line(url: str) -> None:
    """Any text as the URL of an engine: what is accepted has the one spelling."""
    try:
        loaded = load(None, {}, (), [EngineFlag("decode", url)])
    except SettingsError as error:
        refused(error)
    else:
        (node,) = loaded.pool.nodes
        assert load(None, {}, (), [EngineFlag("decode", node.url)]) == loaded


VALUES = {
    "listen.port": st.integers(1, 65535),
    "deadlines.total": st.floats(1e-3, 1e5),
    "limits.max_queue": st.integers(0, 10**6),
    "observe.log_level": st.sampled_from(["debug", "info", "warning", "error"]),
    "listen.host": st.sampled_from(["a", "b", "::1"]),
}
sources = st.fixed_dictionaries({}, optional=VALUES)


@relaxed
@given(sources, sources, sources)
def test_each_key_comes_from_the_strongest_source_that_has_it(
    file: dict[str, object], env: dict[str, object], flags: dict[str, object]
) -> None:
    """Flags over environment over file over defaults, whatever mixture of keys each of them has."""
    tree: dict[str, dict[str, object]] = {}
    for key, value in file.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    loaded = load_text(
        yaml.safe_dump(tree).encode(),
        {variable(tuple(key.split("."))): str(value) for key, value in env.items()},
        tuple(Flag("--x", key, str(value)) for key, value in flags.items()),
    )
    assert loaded is not None
    expected = file | env | flags
    for key in VALUES:
        section, name = key.split(".")
        default = getattr(getattr(Settings(), section), name)
        assert getattr(getattr(loaded, section), name) == expected.get(key, default)
