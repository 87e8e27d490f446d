"""The lines of a file of keys: a key alone, or `name:key` with words behind it.

    team-a:sk-1234 inflight=20 rpm=600 tpm=200000 weight=3 priority=0..10 models=llama-* until=2027-01-31T00:00:00Z
    ops:sk-5678 read-only

The first line is a client's: limits of all keys of its name, and what this key is good for (`settings.key_rights`). The second
line is an operator's. Owns their grammar. No error quotes a line: any part of it may be a key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pdproxy.settings.errors import SettingsError
from pdproxy.settings.files import read_lines
from pdproxy.settings.key_rights import ALL_RIGHTS, RIGHTS, KeyRights, whole
from pdproxy.settings.section import Key
from pdproxy.settings.yaml_file import spell_file

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_DECIMAL = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
_RANGE = re.compile(r"(-?[0-9]{1,18})\.\.(-?[0-9]{1,18})")
MOST_WEIGHT = 1000.0
_NO_KEY = "is no key of visible ASCII characters without blanks"
READ_ONLY = "read-only"
"""The word behind a key of operators that may change nothing."""


class KeyLimits(msgspec.Struct, frozen=True):
    """What the clients with keys of one name may do, together. None: no limit.

    `inflight`: requests at once, those that wait included; `rpm`, `tpm`: requests and tokens per minute; `weight`: their part of
    the places, compared with others' while all of them wait; `priority`: the least and the greatest that a request may have.
    """

    inflight: int | None = None
    rpm: int | None = None
    tpm: int | None = None
    weight: float | None = None
    priority: tuple[int, int] | None = None


class KeyLine(msgspec.Struct, frozen=True):
    """One key of a file. `name`: None for a key alone. `read_only`: of an operator's key."""

    number: int
    name: str | None
    key: str
    limits: KeyLimits = KeyLimits()
    rights: KeyRights = ALL_RIGHTS
    read_only: bool = False


def read_key_lines(setting: str, path: str, *, of_operators: bool = False) -> list[KeyLine]:
    """Return the keys of a file; blank lines and those that begin with `#` are skipped.

    Raises:
        SettingsError: it can't be read, or a line is wrong.
    """
    where, found = f"{setting}: {spell_file(Path(path))}", []
    names: dict[str, KeyLine] = {}
    keys: dict[str, KeyLine] = {}
    for number, line in enumerate(read_lines(setting, path), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            one = _line(number, text, of_operators=of_operators)
            _compare(one, names, keys)
        except ValueError as error:
            raise SettingsError(f"{where}: line {number} {error}") from None
        found.append(one)
    return found


def _compare(one: KeyLine, names: dict[str, KeyLine], keys: dict[str, KeyLine]) -> None:
    same_key = keys.setdefault(one.key, one)
    if same_key.name != one.name:
        raise ValueError(f"holds the same key as line {same_key.number}, under another name")
    if (same_key.rights, same_key.read_only) != (one.rights, one.read_only):
        raise ValueError(f"holds the same key as line {same_key.number}, with other words behind it")
    if one.name is None:
        return
    same_name = names.setdefault(one.name, one)
    if same_name.limits != one.limits:
        raise ValueError(f"has other limits than line {same_name.number}, and the same name: they share the limits")


def _line(number: int, text: str, *, of_operators: bool) -> KeyLine:
    """Return a line's key. Raises ValueError with what is wrong, which follows "line 5"."""
    first, *words = text.split()
    name, colon, key = first.partition(":")
    if not colon:
        if words:
            has_words = any("=" in word or word == READ_ONLY for word in words)
            raise ValueError("has words behind its key, and no name: expected name:key" if has_words else _NO_KEY)
        return KeyLine(number, None, _key(first))
    if not _NAME.fullmatch(name):
        raise ValueError(
            "has a wrong name before its colon: expected up to 64 letters, digits, dots, dashes and underscores"
        )
    key = _key(key)
    if of_operators:
        if any(word != READ_ONLY for word in words):
            raise ValueError(f"has an unknown word behind its key: a key for the admin API has none but {READ_ONLY}")
        return KeyLine(number, name, key, read_only=bool(words))
    found = _words(words)
    rights = {word: value for word, value in found.items() if word in RIGHTS}
    limits = {word: value for word, value in found.items() if word not in RIGHTS}
    return KeyLine(number, name, key, KeyLimits(**limits), KeyRights(**rights))


def _key(text: str) -> str:
    try:
        return msgspec.convert(text, Key)
    except msgspec.ValidationError:
        raise ValueError(_NO_KEY) from None


def _words(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in _READ:
            raise ValueError(f"has an unknown word behind its key: expected {_WORDS}, each with = and its value")
        if name in found:
            raise ValueError(f"gives {name} twice")
        found[name] = _READ[name](name, value)
    return found


def _weight(name: str, value: str) -> float:
    number = float(value) if _DECIMAL.fullmatch(value) else math.nan
    if not 0.001 <= number <= MOST_WEIGHT:
        raise ValueError(f"has a wrong {name}: expected a number from 0.001 to {MOST_WEIGHT:g}")
    return number


def _priority(name: str, value: str) -> tuple[int, int]:
    found = _RANGE.fullmatch(value)
    if found is None or int(found[1]) > int(found[2]):
        raise ValueError(f"has a wrong {name}: expected the least and the greatest, such as 0..10")
    return int(found[1]), int(found[2])


_READ: dict[str, Callable[[str, str], Any]] = {
    "inflight": whole,
    "rpm": whole,
    "tpm": whole,
    "weight": _weight,
    "priority": _priority,
    **RIGHTS,
}
_WORDS = f"{', '.join([*_READ][:-1])} and {[*_READ][-1]}"
