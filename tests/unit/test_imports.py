"""No circles among the imports of the packages' modules, whether an import runs at the start, in a
function or for types only.
"""

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

import pdproxy

PACKAGES = Path(pdproxy.__file__).parents[1]


def imported(source: str, modules: set[str]) -> set[str]:
    """Return those of the modules that a source file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            for name in node.names:
                submodule = f"{node.module}.{name.name}"
                found.add(submodule if submodule in modules else str(node.module))
    return found & modules


def circles(imports: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Return the sets of modules that all reach each other, and modules that import themselves."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = imports[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reach = {module: reached(module) for module in imports}
    return {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in imports
        if module in reach[module]
    }


def test_no_module_imports_itself_through_others() -> None:
    files = {
        ".".join(path.relative_to(PACKAGES).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGES.rglob("*.py")
    }
    imports = {
        name: imported(path.read_text(), set(files)) - {name} for name, path in files.items()
    }
    assert len(files) > 200
    assert sum(map(len, imports.values())) > 500, "imports are found"
    assert circles(imports) == set()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import a.b", {"a.b"}),
        ("from a import b", {"a.b"}),
        ("from a import name", {"a"}),
        ("def f():\n    from a.b import name", {"a.b"}),
        ("if TYPE_CHECKING:\n    from a.b import name", {"a.b"}),
        ("import os", set()),
    ],
)
def test_every_form_of_import_is_found(source: str, expected: set[str]) -> None:
    assert imported(source, {"a", "a.b"}) == expected


def test_circles_of_every_length_are_found() -> None:
    imports = {
        "a": {"b"},
        "b": {"c"},
        "c": {"a"},
        "d": {"e", "a"},
        "e": {"d"},
        "f": {"a"},
        "g": {"g"},
    }
    assert circles(imports) == {frozenset("abc"), frozenset("de"), frozenset("g")}
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == set()
