"""What ends a command that starts engines."""

from __future__ import annotations

CANT_START = 2
"""The exit code if nothing can be started: a port, a program or a GPU is not available."""


class UpError(Exception):
    """It can't run, or has failed. The text is for the user; `code` is the exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code
