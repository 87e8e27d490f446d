"""Words that sentences of conditions are made of."""

from __future__ import annotations

from collections.abc import Sequence


def number_of(number: int, one: str, several: str | None = None) -> str:
    """Return `3 engines`, `1 engine`. `several`: the plural, None: with an s."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def are(number: int) -> str:
    """Return the verb for a number of things."""
    return "is" if number == 1 else "are"


def some_are(number: int, of: int, one: str, several: str | None = None) -> str:
    """Return `2 of 3 engines are`."""
    return f"{number} of {number_of(of, one, several)} {'is' if 1 in (number, of) else 'are'}"


def listed(names: Sequence[str]) -> str:
    """Return `a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def first_of(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def sentence(text: str) -> str:
    """Return a text with a mark at its end."""
    return text if text.endswith((".", "?", "!")) else f"{text}."
