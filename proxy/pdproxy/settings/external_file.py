"""Reads values of a file whose schema is another project's: only some keys are checked, all others
are ignored.

Owns the errors for it: each names the key, what was expected, what was found, and the file.
`conform` is for files whose whole schema is known, and refuses unknown keys.

Objects that describe KV transfer are read as plain mappings: values from YAML or JSON, dataclasses,
structs, pydantic models. None stays None, and what can't be read is an error that names its type.
An empty mapping in its place would mean that nothing was configured, and the engines would silently
recompute every prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from typing import Any

import msgspec

from pdproxy.settings.errors import KeyPath, SettingsError, quote, spell_key, spell_value


class NotAMappingError(TypeError):
    """An object can't be read as names with values. The error's text is the object's type."""


def as_mapping(value: object) -> dict[str, Any] | None:
    """Return a mapping of names to values (a dict is returned itself), None for None.

    Accepted: dicts and other mappings, instances of dataclasses, msgspec structs, pydantic models
    old and new, sequences of pairs, and plain objects with attributes.

    Raises:
        NotAMappingError: it is none of these, or can't be read as one; or a name in it is no text.
    """
    if value is None or (isinstance(value, dict) and all(isinstance(name, str) for name in value)):
        return value
    try:
        plain = _read(value)
    except (TypeError, ValueError, AttributeError):
        plain = None
    if plain is None:
        raise NotAMappingError(type(value).__name__)
    if not all(isinstance(name, str) for name in plain):
        raise NotAMappingError(f"{type(value).__name__} with names that are no text")
    return plain


def _read(value: object) -> dict[Any, Any] | None:
    if isinstance(value, type | str | bytes | bytearray | int | float):
        return None
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields_of(value)}
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    for name in ("model_dump", "dict"):  # pydantic 2 and 1
        if callable(dump := getattr(value, name, None)):
            dumped = dump()
            return dict(dumped) if isinstance(dumped, Mapping) else None
    if callable(getattr(value, "items", None)) and isinstance(value, Iterable):
        return dict(value)  # not registered as a Mapping, such as OmegaConf's
    if isinstance(value, Iterable):
        pairs = list(value)
        return dict(pairs) if all(isinstance(pair, tuple) for pair in pairs) and pairs else None
    return dict(vars(value))


class ForeignFile:
    """Reads one file's values. `where` names the file, at the end of each error.

    Each method takes the path of what it reads, and raises SettingsError. A key that is absent or
    null is None.
    """

    def __init__(self, where: str) -> None:
        self.where = where

    def wrong(self, path: KeyPath, why: str) -> SettingsError:
        """Return the error that a key is wrong."""
        return SettingsError(f"{spell_key(path)}: {why}{self.where}")

    def mapping(self, value: object, path: KeyPath, *, may_be_null: bool = False) -> dict[str, Any]:
        """Return a mapping from a value that is or describes one. With `may_be_null`, null is an
        empty one.
        """
        if value is None and may_be_null:
            return {}
        try:
            found = as_mapping(value)
        except NotAMappingError as error:
            raise self.wrong(path, f"can't be read: expected a mapping, got {error}") from None
        if found is None:
            raise self.wrong(path, "expected a mapping, got null")
        return found

    def json(self, text: str, path: KeyPath) -> object:
        """Return what a JSON text holds."""
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise self.wrong(
                path, f"can't be read: expected a mapping or its JSON, got {quote(text)}"
            ) from None

    def bool(self, value: object, path: KeyPath) -> bool:
        """Return true or false; null is false."""
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.wrong(path, f"expected true or false, got {spell(path, value)}")

    def text(self, section: Mapping[str, Any], name: str, path: KeyPath) -> str | None:
        """Return a key's text, None if it is empty."""
        value = section.get(name)
        if value is None or isinstance(value, str):
            return value or None
        raise self.wrong((*path, name), f"expected text, got {spell(path, value)}")

    def number(self, section: Mapping[str, Any], name: str, path: KeyPath) -> float | None:
        """Return a key's number. A text with a number is accepted, since YAML reads `1e9` as
        text.
        """
        value = section.get(name)
        if isinstance(value, str):
            with suppress(ValueError):
                value = float(value)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        raise self.wrong((*path, name), f"expected a number, got {spell(path, value)}")

    def count(self, section: Mapping[str, Any], name: str, path: KeyPath) -> int | None:
        """Return a key's whole number of 1 or more."""
        value = section.get(name)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            return value
        raise self.wrong((*path, name), f"expected a whole number >= 1, got {spell(path, value)}")

    def port(self, section: Mapping[str, Any], name: str, path: KeyPath) -> int | None:
        """Return a key's TCP port. A text with a port is accepted, since environments hold
        texts.
        """
        value = section.get(name)
        if value is None:
            return None
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 5:
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65_535:
            return value
        raise self.wrong((*path, name), f"expected a port, 1 to 65535, got {spell(path, value)}")


def spell(path: KeyPath, value: object) -> str:
    """Return a value as an error may show it: only the type of what is no plain value."""
    plain = value is None or isinstance(value, bool | int | float | str | dict | list | tuple)
    return spell_value(path, value) if plain else type(value).__name__
