"""The schema, the reference file and the examples: they say the same, and say it of every setting."""

import ast
import inspect
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest
import yaml

from pdproxy.settings import schema, section
from pdproxy.settings.load import load
from pdproxy.settings.schema import Auth, Node, Pool, Settings

CONFIGS = Path(__file__).parents[2] / "configs"
REFERENCE = CONFIGS / "reference.yaml"


def fields_of(kind: Any, path: str = "") -> set[str]:
    """All keys that the schema knows below `kind`, lists of sections as `[]`."""
    found = set()
    for field in section.fields_of(kind):
        here, type_ = f"{path}.{field.name}".lstrip("."), field.type
        found.add(here)
        if field.name == "dns_nodes":
            continue  # each is as one of `nodes`
        if get_origin(type_) is tuple:
            here, type_ = f"{here}[]", get_args(type_)[0]
        if section.is_section(type_):
            found |= fields_of(type_, here)
    return found


def _named(tree: dict[str, object], path: str) -> list[tuple[str, object]]:
    return [(f"{path}.{key}".lstrip("."), item) for key, item in tree.items()]


def keys_of(value: object, path: str = "") -> set[str]:
    """All keys that a YAML tree has, in the spelling of `fields_of`."""
    if isinstance(value, list):
        return set().union(*(keys_of(item, f"{path}[]") for item in value))
    if isinstance(value, dict):
        return set().union(*({name, *keys_of(item, name)} for name, item in _named(value, path)))
    return set()


def test_reference_names_every_setting_and_no_other() -> None:
    """A setting that is added to the schema alone, or removed from it alone, fails here."""
    assert keys_of(yaml.safe_load(REFERENCE.read_text())) == fields_of(Settings)


def test_reference_holds_the_defaults() -> None:
    """But for its example engines, loading the reference file changes nothing."""
    nodes = (Node(url="http://127.0.0.1:8200", role="prefill"), Node(url="http://127.0.0.1:8300", role="decode"))
    assert load(REFERENCE, {}) == Settings(pools=(Pool(nodes=nodes),))


def test_reference_explains_every_setting() -> None:
    """Every key of the reference file has a comment above it, but for those of the second example engine."""
    above, unexplained = "", []
    for line in REFERENCE.read_text().splitlines():
        text = line.strip()
        if text and not text.startswith("#") and not above.startswith("#"):
            unexplained.append(text)
        above = text
    assert unexplained == ["- url: http://127.0.0.1:8300", "role: decode"]


@pytest.mark.parametrize(("name", "prefills", "decodes"), [("1p1d", 1, 1), ("2p2d", 2, 2)])
def test_examples_load(name: str, prefills: int, decodes: int) -> None:
    """The short examples are what their names say, on the loopback, with defaults for the rest."""
    settings = load(CONFIGS / f"{name}.yaml", {})
    urls = [f"http://127.0.0.1:{8200 + i}" for i in range(prefills)]
    assert [n.url for n in settings.pool.nodes if n.role == "prefill"] == urls
    urls = [f"http://127.0.0.1:{8300 + i}" for i in range(decodes)]
    assert [n.url for n in settings.pool.nodes if n.role == "decode"] == urls
    assert msgspec.structs.replace(settings, pools=()) == Settings()


def test_every_file_in_configs_loads() -> None:
    """Nobody copies an example that doesn't work."""
    for path in CONFIGS.glob("*.yaml"):
        load(path, {})


def test_every_field_has_a_docstring() -> None:
    """What a setting means and why its default is what it is stands under it in the schema."""
    bare = []
    for struct in ast.parse(inspect.getsource(schema)).body:
        if isinstance(struct, ast.ClassDef):
            for field, after in zip(struct.body, [*struct.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and not (
                    isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                ):
                    bare.append(f"{struct.name}.{ast.unparse(field.target)}")
    assert bare == []


def test_settings_are_immutable_and_hold_no_list() -> None:
    """Rooms share one tree: none can change it for another."""
    settings = load(REFERENCE, {})
    with pytest.raises(AttributeError):
        settings.listen.port = 1  # type: ignore[misc]
    assert isinstance(settings.pools, tuple)
    assert isinstance(settings.pool.nodes, tuple)


def test_repr_hides_keys() -> None:
    """Settings in a log or a traceback show that there are keys, and none of them."""
    text = repr(Settings(auth=Auth(api_keys=("client-key",), engine_api_key="engine-key")))
    assert "client-key" not in text
    assert "engine-key" not in text
    assert "1 api_keys" in text
