"""Reads the files that settings name: keys and passwords. Each error is one line with the setting and the file, and no key."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pdproxy.kit.regular_file import UnreadableError, read_regular
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.section import Key
from pdproxy.settings.yaml_file import spell_file

_MAX_BYTES = 1_048_576
"""A larger file is no file of keys or certificates: its name is wrong."""


def read_keys(setting: str, path: str) -> tuple[str, ...]:
    """Return the keys of a file, as `read_numbered_keys` reads them.

    Raises:
        SettingsError: as there, or there is no key.
    """
    keys = tuple(key for _, key in read_numbered_keys(setting, path))
    if not keys:
        raise SettingsError(f"{setting}: {spell_file(Path(path))}: holds no key")
    return keys


def read_numbered_keys(setting: str, path: str) -> list[tuple[int, str]]:
    """Return the numbers of lines and the keys of a file, one per line; blank lines and those that begin with `#` are skipped.

    Raises:
        SettingsError: it can't be read, or a line is not a key.
    """
    keys: list[tuple[int, str]] = []
    for number, line in enumerate(read_lines(setting, path), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            keys.append((number, msgspec.convert(text, Key)))
        except msgspec.ValidationError:
            raise SettingsError(
                f"{setting}: {spell_file(Path(path))}: line {number} is no key of visible ASCII characters without blanks"
            ) from None
    return keys


def read_key(setting: str, path: str) -> str:
    """Return the one key of a file that is written like those of `read_keys`.

    Raises:
        SettingsError: as `read_keys`, or it holds several.
    """
    keys = read_keys(setting, path)
    if len(keys) > 1:
        raise SettingsError(f"{setting}: {spell_file(Path(path))}: holds {len(keys)} keys, expected one")
    return keys[0]


def read_password(setting: str, path: str) -> str:
    """Return the first line of a file.

    Raises:
        SettingsError: it can't be read, or the line is empty.
    """
    lines = read_lines(setting, path)
    if not lines or not lines[0]:
        raise SettingsError(f"{setting}: {spell_file(Path(path))}: holds no password in its first line")
    return lines[0]


def read_file(setting: str, path: str) -> bytes:
    """Return a file's bytes.

    Raises:
        SettingsError: it can't be read, is no regular file, or is too large.
    """
    name = spell_file(Path(path))
    try:
        return read_regular(path, _MAX_BYTES)
    except UnreadableError as error:
        raise SettingsError(f"{setting}: {name}: {error}") from None


def read_lines(setting: str, path: str) -> list[str]:
    """Return the lines of a file of text.

    Raises:
        SettingsError: it can't be read.
    """
    try:
        return read_file(setting, path).decode().splitlines()
    except UnicodeDecodeError:
        raise SettingsError(f"{setting}: {spell_file(Path(path))}: is no text") from None
