"""Reads values of a file whose schema is another project's: only some keys are checked, all others are ignored.

Owns the errors for it: each names the key, what was expected, what was found, and the file. `conform` is for files whose whole
schema is known, and refuses unknown keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pdproxy.settings.errors import KeyPath, SettingsError, quote, spell_key, spell_value
from pdproxy.settings.mappings import NotAMappingError, as_mapping


class ForeignFile:
    """Reads one file's values. `where` names the file, at the end of each error.

    Each method takes the path of what it reads, and raises SettingsError. A key that is absent or null is None.
    """

    def __init__(self, where: str) -> None:
        self.where = where

    def wrong(self, path: KeyPath, why: str) -> SettingsError:
        """Return the error that a key is wrong."""
        return SettingsError(f"{spell_key(path)}: {why}{self.where}")

    def mapping(self, value: object, path: KeyPath, *, may_be_null: bool = False) -> dict[str, Any]:
        """Return a mapping from a value that is or describes one. With `may_be_null`, null is an empty one."""
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
            raise self.wrong(path, f"can't be read: expected a mapping or its JSON, got {quote(text)}") from None

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
        """Return a key's number. A text with a number is accepted, since YAML reads `1e9` as text."""
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
        """Return a key's TCP port. A text with a port is accepted, since environments hold texts."""
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
