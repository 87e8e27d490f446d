"""The page of the settings: names, types, defaults and texts from their fields."""

from __future__ import annotations

import argparse
import re
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

import msgspec

from pdproxy.settings.conform import expectation
from pdproxy.settings.load import variable
from pdproxy.settings.schema import Settings
from pdproxy.settings.section import Field, Seconds, fields_of, is_section
from tests.reference import command_line
from tests.reference.markdown import NOTE, cell, code, table
from tests.reference.texts import item_of, spelled, texts

_UNBOUNDED = 2**31 - 1
"""The largest number that a count may be: nobody reaches it."""
_HEAD = f"""# Settings

{NOTE}

A setting comes from the first of these that has it: an option of the command line, a `PDPROXY_*`
variable, the YAML file (`--config`, or the file that `PDPROXY_CONFIG` names), the default. An
unknown key or variable is an error. [`configs/reference.yaml`](../../configs/reference.yaml) is the
same as a file with all defaults, which `pdproxy config init --all` prints; `pdproxy config print`
prints what is in force, and `pdproxy config validate` checks it.

What is used `at once` a running proxy takes from the changed file
([how](../guide/operate.md#change-settings)); anything else needs a restart.

A variable's name is the setting's path in capitals, with two underscores between its parts:
`{variable(("deadlines", "first_token"))}` is `deadlines.first_token`. Lists are comma separated.
Engines (`pools`) are given by options or in the file, not by variables.
"""


def _sections(kind: Any, path: str = "") -> Iterator[tuple[str, list[Field]]]:
    """Yield each section's path and its own values, those above first."""
    fields = fields_of(kind)
    inner = [(field, *item_of(field)) for field in fields]
    own = [field for field, type_, _ in inner if not is_section(type_)]
    if own:
        yield path, own
    for field, type_, suffix in inner:
        if is_section(type_):
            yield from _sections(type_, f"{path}.{field.name}{suffix}".lstrip("."))


def _default(field: Field) -> str:
    if field.required:
        return "required"
    return code(spelled(field.default))


def _accepts(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list: each {expectation(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "a mapping of texts"
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join("null" if one is type(None) else _accepts(one) for one in get_args(kind))
    if kind == Seconds:
        return "seconds, above 0, up to a week"
    match msgspec.inspect.type_info(kind):
        case msgspec.inspect.IntType(ge=least, le=most):
            return (
                f"a whole number, {least} or more"
                if most in (None, _UNBOUNDED)
                else f"a whole number, {least} to {most}"
            )
        case _:
            return expectation(kind)


def _flags() -> dict[str, str]:
    """Return the options that set a setting, by its path."""
    serve = command_line.commands(command_line.parser())["serve"]
    shown = (
        action
        for action in serve._actions
        if "." in action.dest and action.help is not argparse.SUPPRESS
    )
    return {
        re.sub(r"\[\d*\]", "[]", one.dest): ", ".join(code(name) for name in one.option_strings)
        for one in shown
    }


def _change(field: Field) -> str:
    if field.live is None:
        return "restart"
    return "at once, but from and to 0" if field.live.is_switch else "at once"


def _text(lines: list[str]) -> str:
    """Return a text as a cell. Lines that are indented further are a list."""
    parts: list[str] = []
    for line in lines:
        if line.startswith("  "):
            name, _, rest = line.strip().partition("  ")
            parts.append(f"<br>{code(name)}: {cell(rest)}" if rest else cell(line))
        else:
            parts.append(cell(line))
    return " ".join(parts)


def page() -> str:
    """Return the page."""
    meanings, flags = texts(), _flags()
    parts = [_HEAD]
    for path, fields in _sections(Settings):
        words = meanings[path.removesuffix("[]")]
        parts.append(f"## {path}\n\n{' '.join(cell(line) for line in words)}\n")
        rows = []
        for field in fields:
            name = f"{path}.{field.name}"
            rows.append(
                (
                    code(field.name),
                    cell(_accepts(field.type)),
                    _default(field),
                    _change(field),
                    flags.get(name, ""),
                    _text(meanings[name]),
                )
            )
        parts.append(table(("setting", "value", "default", "change", "option", "meaning"), rows))
    return "\n".join(parts)
