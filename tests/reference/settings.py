"""The page of the settings: names, types, defaults and texts from their fields."""

from __future__ import annotations

import argparse
import re
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

from pdproxy.settings.conform import expectation
from pdproxy.settings.load import variable
from pdproxy.settings.schema import Settings
from pdproxy.settings.section import Field, fields_of, is_section
from tests.reference import command_line
from tests.reference.markdown import NOTE, cell, code, table
from tests.reference.texts import AS_THE_POOLS, item_of, spelled, texts

_SHORT = (
    (r"a whole number >= (\d+) and <= 2147483647", r"\1 or more"),
    (r"a whole number >= (\d+) and <= (\d+)", r"\1 to \2"),
    (r"a number > 0 and <= 604800", "seconds"),
    (r"a number >= 0 and <= 604800", "seconds or 0"),
    (r"a number >= (\S+) and <= (\S+)", r"\1 to \2"),
    (r"a number > (\S+) and <= (\S+)", r"above \1, up to \2"),
    (r"text that isn't empty", "text"),
    (r"a file's name", "a file"),
)
"""Words for what a setting may be, each behind a pattern of the words in errors."""
_HEAD = f"""# Settings

{NOTE}

A setting comes from the first of these that has it: an option of the command line, a `PDPROXY_*`
variable, the YAML file (`--config`, or the file that `PDPROXY_CONFIG` names), the default. An
unknown key or variable is an error. [`configs/reference.yaml`](../../configs/reference.yaml) is the
same as a file with all defaults, which `pdproxy config init --all` prints; `pdproxy config print`
prints what is in force, and `pdproxy config validate` checks it.

What is used at once a running proxy takes from the changed file
([how](../guide/operate.md#change-settings)). A number may have a fraction where its default has
one; seconds are above 0, and a week at most. An option stands beside the setting that it sets, or
in the setting's text.

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


def _accepts(field: Field, text: list[str]) -> str:
    """Return what a setting may be, in short: the head says what is meant. Names that the text
    explains are left out, and so is null where it is the default.
    """
    names = expectation(field.type).split(" or ")
    explained = {line.split()[0] for line in text if line.startswith("  ")}
    if names and explained.issuperset(names):
        return "one of these"
    words = _words(field.type)
    return words if field.required or field.default is not None else words.removesuffix(" or null")


def _words(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list: {_words(get_args(kind)[0])}"
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join("null" if one is type(None) else _words(one) for one in get_args(kind))
    words = expectation(kind)
    for pattern, short in _SHORT:
        words = re.sub(pattern, short, words)
    return words


def _flags() -> dict[str, str]:
    """Return the options that set a setting, by its path."""
    serve = command_line.commands(command_line.parser())["serve"]
    shown = (
        action
        for action in serve._actions
        if "." in action.dest and action.help is not argparse.SUPPRESS
    )
    return {
        command_line.setting_of(one): ", ".join(code(name) for name in one.option_strings)
        for one in shown
    }


def _changes(fields: list[Field]) -> str:
    """Return a sentence: when changes of a section's settings are used."""
    restart = [code(one.name) for one in fields if one.live is None]
    at_once = [code(one.name) for one in fields if one.live is not None]
    switches = [code(one.name) for one in fields if one.live is not None and one.live.is_switch]
    if len(at_once) < len(restart):
        parts = ["A change needs a restart", _of(at_once, "it is used at once")]
    else:
        parts = ["A change is used at once", _of(restart, "behind a restart")]
    return "; ".join(part for part in (*parts, _of(switches, "not from or to 0")) if part) + "."


def _of(names: list[str], what: str) -> str:
    return f"of {', '.join(names)} {what}" if names else ""


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
        about = [*(cell(line) for line in words), _changes(fields)]
        parts.append(f"## {path}\n\n{' '.join(about)}\n")
        rows = []
        for field in fields:
            text = meanings[name := f"{path}.{field.name}"]
            if text == AS_THE_POOLS:
                continue
            option = flags.get(name, "")
            is_named = option.strip("`") in " ".join(text)
            rows.append(
                (
                    code(field.name) if is_named else f"{code(field.name)} {option}",
                    cell(_accepts(field, text)),
                    _default(field),
                    _text(text),
                )
            )
        if rows:
            parts.append(table(("setting", "value", "default", "meaning"), rows))
        else:
            parts.append(f"As the pool's: {', '.join(code(one.name) for one in fields)}.\n")
    return "\n".join(parts)
