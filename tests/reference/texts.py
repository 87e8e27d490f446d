"""What settings mean: the docstrings of their fields and sections, as lines. Python has them in the
source only. And defaults.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any, get_args, get_origin

import yaml

from pdproxy.settings.schema import Settings
from pdproxy.settings.section import Field, fields_of, is_section

AS_THE_POOLS = ["As the pool's."]
"""The meaning of a setting of an engine that its pool has, too."""


@cache
def texts() -> dict[str, list[str]]:
    """Return the text of each setting and section by its path: `pools[].nodes[].url`.

    A line that begins with two blanks is an item of a list, all others are one paragraph. A section
    without a docstring at its field has that of its class.
    """
    found: dict[str, list[str]] = {}
    _collect(Settings, "", found, {Settings})
    return found


def item_of(field: Field) -> tuple[Any, str]:
    """Return what a field holds, and `[]` if it is a list of sections."""
    if get_origin(field.type) is tuple and is_section(get_args(field.type)[0]):
        return get_args(field.type)[0], "[]"
    return field.type, ""


def spelled(value: object) -> str:
    """Return the value of a setting as YAML on one line."""
    value = list(value) if isinstance(value, tuple) else value
    return (
        yaml.safe_dump(value, default_flow_style=True, width=1000)
        .removesuffix("\n")
        .removesuffix("\n...")
    )


def _collect(kind: Any, path: str, found: dict[str, list[str]], seen: set[Any]) -> None:
    own = docstrings(inspect.getsource(kind))
    for field in fields_of(kind):
        here, (item, suffix) = f"{path}{field.name}", item_of(field)
        if not is_section(item):
            found[here] = own[field.name]
            continue
        found[here] = own.get(field.name) or docstrings(inspect.getsource(item))[""]
        if item in seen:
            found |= {f"{here}.{one.name}": AS_THE_POOLS for one in fields_of(item)}
        else:
            seen.add(item)
            _collect(item, f"{here}{suffix}.", found, seen)


def docstrings(source: str) -> dict[str, list[str]]:
    """Return the docstrings of a class's fields by their names, and under the empty name that of
    the class.
    """
    body = ast.parse(textwrap.dedent(source)).body[0].body  # type: ignore[attr-defined]
    found: dict[str, list[str]] = {}
    for before, one in zip([None, *body], body, strict=False):
        if (
            isinstance(one, ast.Expr)
            and isinstance(one.value, ast.Constant)
            and isinstance(one.value.value, str)
        ):
            if before is None:
                found[""] = _lines(one.value.value)
            elif isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
                found[before.target.id] = _lines(one.value.value)
    return found


def _lines(text: str) -> list[str]:
    return [line.removeprefix("    ").rstrip() for line in text.splitlines() if line.strip()]
