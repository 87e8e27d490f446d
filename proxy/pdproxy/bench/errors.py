"""The error that ends a measurement."""

from __future__ import annotations

USAGE_ERROR = 2
"""The exit code of wrong options and files."""


class BenchError(Exception):
    """Why nothing can be measured: `str()` is one line for the user, `code` the exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code
