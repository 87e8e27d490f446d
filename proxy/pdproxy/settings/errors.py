"""Errors of settings: one line per mistake that names the key, what was expected and where it was
read.

Owns `SettingsError`, `Mistakes` that collects several, and how they show keys and values. Values of
secrets are not shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

MASK = "********"

KeyPath = tuple[str | int, ...]
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_MAX_SHOWN = 80  # characters of a value or a key in an error
MAX_MISTAKES = 20
"""How many mistakes one error names. Only the number of the others is stated."""


class SettingsError(ValueError):
    """The settings are wrong. `mistakes` has one line for each mistake, for the operator; `str()`
    joins the lines.
    """

    def __init__(self, *mistakes: str) -> None:
        super().__init__("; ".join(mistakes))
        self.mistakes = mistakes


@contextmanager
def naming_pool(at: int, name: str, *, pools: int) -> Iterator[None]:
    """Name a pool in the errors of the block: its settings are those of the only one there.
    `pools`: how many there are.
    """
    try:
        yield
    except SettingsError as error:
        if pools == 1:
            raise
        lines = (line.replace("pools[0]", f"pools[{at}]") for line in error.mistakes)
        raise SettingsError(*(f"pool {name}: {line}" for line in lines)) from None


class Mistakes:
    """Everything that is wrong with the settings, in the order in which it was found, and where
    each value and key was read.
    """

    def __init__(self) -> None:
        self._found: dict[str, KeyPath] = {}
        self._sources: dict[KeyPath, str] = {}
        self._lines: dict[KeyPath, int] = {}

    def add(self, path: KeyPath, *texts: str) -> None:
        """Add mistakes in the value of a key. The empty path: nothing is known of any key."""
        for text in texts:
            self._found.setdefault(text, path)

    @contextmanager
    def collecting(self, *path: str | int) -> Iterator[None]:
        """Add the mistakes of a `SettingsError` that the block raises, and go on behind the
        block.
        """
        try:
            yield
        except SettingsError as error:
            self.add(path, *error.mistakes)

    def read_from(self, path: KeyPath, where: str) -> None:
        """Note where a key's value was read: ` (--port)`."""
        self._sources[path] = where

    def read_at(self, path: KeyPath, line: int) -> None:
        """Note the line of a file in which a key stands."""
        self._lines[path] = line

    def line(self, path: KeyPath) -> int | None:
        """Return the line of a file in which a key stands; None: it stands in none."""
        return self._lines.get(path)

    def source(self, path: KeyPath) -> str:
        """Return where the value of a key was read, as the end of an error: its own source, or that
        of the section around it.
        """
        ends = range(len(path), 0, -1)
        return next((self._sources[path[:end]] for end in ends if path[:end] in self._sources), "")

    def within(self, *path: str | int) -> bool:
        """Return whether there is a mistake in the value of a key, or in a section around it."""
        return any(path[: len(wrong)] == wrong[: len(path)] for wrong in self._found.values())

    def raise_any(self) -> None:
        """Raise one error for all.

        Raises:
            SettingsError: there is at least one mistake.
        """
        if not self._found:
            return
        shown = list(self._found)[:MAX_MISTAKES]
        more = len(self._found) - len(shown)
        raise SettingsError(*shown, *([f"and {more} more"] if more else [])) from None


def spell_key(path: KeyPath) -> str:
    """Return a key's path as people write it: `pools[0].nodes[1].url`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += ("." if text else "") + (
                step if _PLAIN.fullmatch(step) and len(step) <= _MAX_SHOWN else quote(step)
            )
    return text or "the top level"


def spell_value(path: KeyPath, value: object) -> str:
    """Return a value as an error may show it: only the kind of a collection; nothing of API keys or
    of values under `auth`.
    """
    match value:
        case None:
            return "null"
        case dict():
            return "a mapping"
        case list() | tuple() | set():
            return "a list"
        case _ if path[:1] == ("auth",) or path[-1:] in (("api_key",), ("secret",)):
            return "something else (not shown)"
        case bool():
            return "true" if value else "false"
        case int() if abs(value) < 10**_MAX_SHOWN:
            return str(value)
        case int():
            return "a huge number"
        case float():
            return str(value)
        case str():
            return quote(value)
        case _:
            return quote(str(value))


def quote(text: str) -> str:
    """Return a text in quotes, on one line and at most 80 characters long, without line breaks and
    terminal escapes.
    """
    return json.dumps(text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "...")


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return ` (did you mean x?)` for the known name that is closest, else nothing."""
    # Imported here: most settings are right, and a health check that runs every few seconds should
    # start fast.
    from difflib import get_close_matches

    close = get_close_matches(wrong[:_MAX_SHOWN], list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""
