"""The error that ends a measurement."""

from __future__ import annotations

USAGE_ERROR = 2
"""The exit code of wrong options and files."""


_MAX_LINE = 400


def one_line(text: str, limit: int = _MAX_LINE) -> str:
    """Return a text that a server may have chosen so that a terminal can show it: one line,
    printable, `limit` characters.
    """
    return "".join(
        letter if letter.isprintable() else "?" for letter in " ".join(text.split())[:limit]
    )


class BenchError(Exception):
    """Why nothing can be measured: `str()` is one line for the user, `code` the exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(one_line(message))
        self.code = code
