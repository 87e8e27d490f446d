"""Checks a tree of plain values against the schema and names every key that is wrong.

msgspec would find it, too. But its errors have its own paths and type names, and don't state where
the value was read, which key was probably meant, and hide no secret values. Owns the texts of what
is expected.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import inspect

from pdproxy.settings.errors import KeyPath, Mistakes, did_you_mean, spell_key, spell_value
from pdproxy.settings.section import NAMES, Section, fields_of, is_section

_NOT_OF_THAT_KIND = (msgspec.ValidationError, UnicodeEncodeError)
"""The second one is raised for a variable or a flag with bytes that are no text in UTF-8."""
_MAX_MEANT = 3


def conform(value: object, kind: Any, where: str, path: KeyPath = ()) -> Any:
    """Return `value` as the schema's `kind` needs it, still plain: sections left empty in YAML are
    dropped.

    `kind` is a type of the schema, `where` names the source of the value.

    Raises:
        SettingsError: naming every key that is wrong.
    """
    found = Mistakes()
    plain = collect(value, kind, where, path, found)
    found.raise_any()
    return plain


def collect(value: object, kind: Any, where: str, path: KeyPath, found: Mistakes) -> Any:
    """Do as `conform`, but add mistakes to `found`. What is wrong is left out of a section, and
    None in a list.
    """
    found.read_from(path, where)
    if is_section(kind):
        return _section(value, kind, where, path, found)
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            _unexpected(value, kind, where, path, found)
            return []
        return [
            collect(item, get_args(kind)[0], where, (*path, index), found)
            for index, item in enumerate(value)
        ]
    if get_origin(kind) is dict:
        if not isinstance(value, dict):
            _unexpected(value, kind, where, path, found)
            return {}
        return {
            name: collect(item, get_args(kind)[1], where, (*path, str(name)), found)
            for name, item in value.items()
            if _is_name(name, where, path, found)
        }
    if value is False and get_origin(kind) is Literal and "off" in get_args(kind):
        value = "off"  # YAML reads that word as false
    optional = get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind)
    if (
        (names := _names(kind)) is not None
        and value not in names
        and not (optional and value is None)
    ):
        return _unexpected(value, kind, where, path, found)
    try:
        return msgspec.convert(value, kind)
    except _NOT_OF_THAT_KIND:
        return _unexpected(value, kind, where, path, found)


def parse(text: str, kind: Any) -> object:
    """Read the text of a variable or a flag as `kind`. A text that is not of that kind is returned,
    and `conform` refuses it.

    A mapping is JSON: `{"a": 3}`.

    A list is `a,b` or, as for vLLM's flags, JSON: `["a", "b"]`. A text that begins with `[` is
    always read as JSON.
    """
    text = text.strip()
    if get_origin(kind) is tuple:
        items = (
            json_list(text) if text.startswith("[") else [part.strip() for part in text.split(",")]
        )
        if items is None:
            return text
        return [parse(item, get_args(kind)[0]) if isinstance(item, str) else item for item in items]
    if get_origin(kind) is dict:
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return text
    try:
        return msgspec.convert(text, kind, strict=False)
    except _NOT_OF_THAT_KIND:
        return text


def json_list(text: str) -> list[Any] | None:
    """Return the list that a JSON text holds, None if it holds none."""
    try:
        return msgspec.json.decode(text, type=list[Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None


def leaves(kind: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and type of every setting that a text can set: all but lists of sections and what
    is in them.
    """
    for field in fields_of(kind):
        here = (*path, field.name)
        if is_section(field.type):
            yield from leaves(field.type, here)
        elif not (get_origin(field.type) is tuple and is_section(get_args(field.type)[0])):
            yield here, field.type


def _section(
    value: object, kind: Any, where: str, path: KeyPath, found: Mistakes
) -> dict[str, object]:
    if isinstance(value, str) and issubclass(kind, Section):
        short: dict[str, object] | None = kind.of_text(value)
        if short is not None:
            return short
    if not isinstance(value, dict):
        _unexpected(value, kind, where, path, found)
        return {}
    fields = {field.name: field for field in fields_of(kind)}
    tree: dict[str, object] = {}
    for name, item in value.items():
        if not _is_name(name, where, path, found):
            continue
        if now := kind.former.get(name) if issubclass(kind, Section) else None:
            old, new = (spell_key((*path, one)) for one in (name, now))
            line = found.line((*path, name))
            place = f": change line {line}" if line else ""
            found.add(path, f"{old}: is called {new} now{place}{where}")
            continue
        if name not in fields:
            hint = (not path and _further_in(name, kind)) or did_you_mean(name, fields)
            found.add(path, f"{spell_key((*path, name))}: unknown key{hint}{where}")
            continue
        # A section whose keys are all commented out is null in YAML: it has its defaults.
        if item is None and is_section(fields[name].type):
            continue
        tree[name] = collect(item, fields[name].type, where, (*path, name), found)
    for name, field in fields.items():
        if field.required and name not in tree:
            found.add(
                (*path, name),
                f"{spell_key((*path, name))}: missing: expected {expectation(field.type)}{where}",
            )
    return tree


def _further_in(name: str, kind: Any) -> str:
    """Return ` (did you mean x?)` for the keys of this name in the sections of a file, else
    nothing.
    """
    known = [spell_key(path) for path in _keys(kind) if path[-1] == name][:_MAX_MEANT]
    return f" (did you mean {' or '.join(known)}?)" if known else ""


def _keys(kind: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of all keys, of a list's sections those of the first one."""
    for field in fields_of(kind):
        here = (*path, field.name)
        yield here
        if is_section(field.type):
            yield from _keys(field.type, here)
        elif get_origin(field.type) is tuple and is_section(get_args(field.type)[0]):
            yield from _keys(get_args(field.type)[0], (*here, 0))


def _is_name(name: object, where: str, path: KeyPath, found: Mistakes) -> bool:
    if not isinstance(name, str):
        found.add(
            path, f"{spell_key(path)}: expected text as key, got {spell_value(path, name)}{where}"
        )
    return isinstance(name, str)


def _unexpected(value: object, kind: Any, where: str, path: KeyPath, found: Mistakes) -> None:
    hint = did_you_mean(value, choices(kind)) if isinstance(value, str) else ""
    text = (
        f"{spell_key(path)}: expected {expectation(kind)}, got "
        f"{spell_value(path, value)}{hint}{where}"
    )
    found.add(path, text)


def expectation(kind: Any) -> str:
    """Return in words what a type of the schema accepts."""
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(
            "null" if one is type(None) else expectation(one) for one in get_args(kind)
        )
    if (names := _names(kind)) is not None:
        return " or ".join(names)
    if is_section(kind) and (texts := choices(kind)):
        return f"{' or '.join(texts)}, or a mapping"
    match inspect.type_info(kind):
        case inspect.Metadata(extra_json_schema={"description": str(words)}):
            return words
        case inspect.IntType() as number:
            return f"a whole number{_bounds(number)}"
        case inspect.FloatType() as number:
            return f"a number{_bounds(number)}"
        case inspect.StrType(min_length=minimum):
            return "text that isn't empty" if minimum else "text"
        case inspect.BoolType():
            return "true or false"
        case inspect.VarTupleType():
            return "a list"
        case _:
            return "a mapping"


def choices(kind: Any) -> tuple[str, ...]:
    """Return the texts that a type of the schema takes, if there are only a few."""
    if kind is bool:
        return ("true", "false")
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind.texts()
    return tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else _names(kind) or ()


def _names(kind: Any) -> tuple[str, ...] | None:
    """Return the names that a type made with `names_of` takes, or such a type or null; None for
    another type.
    """
    if get_origin(kind) in (Union, types.UnionType):
        return next((names for one in get_args(kind) if (names := _names(one)) is not None), None)
    extra = next(
        (
            meta.extra
            for meta in getattr(kind, "__metadata__", ())
            if isinstance(meta, msgspec.Meta)
        ),
        None,
    )
    return tuple(extra[NAMES]()) if extra is not None and NAMES in extra else None


def _bounds(number: inspect.IntType | inspect.FloatType) -> str:
    signs = (">", number.gt), (">=", number.ge), ("<=", number.le)
    return " and".join(f" {sign} {bound}" for sign, bound in signs if bound is not None)
