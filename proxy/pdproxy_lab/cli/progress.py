"""The progress of a command that takes more than some seconds: one line on a terminal, written anew
in place. Without a terminal nothing is written, so that logs and pipes have the report alone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

_PAUSE = 0.25
"""Seconds between two lines: a simulation would write thousands per second."""
_MIN_WIDTH = 20


class ProgressLine:
    """Shows the last text it was given. At its end the line is empty again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal = sys.stderr.isatty()
        self._clock = clock
        self._next = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._write("")

    def show(self, text: str) -> None:
        """Show a text in place of the one before, unless that one is too new."""
        if self._terminal and (now := self._clock()) >= self._next:
            self._next = now + _PAUSE
            try:
                width = max(os.get_terminal_size(sys.stderr.fileno()).columns - 1, _MIN_WIDTH)
            except (OSError, ValueError):  # no terminal by now
                width = 80
            self._write(text[:width])

    def _write(self, text: str) -> None:
        if self._terminal:
            with contextlib.suppress(OSError):
                sys.stderr.write(f"\r\x1b[K{text}")
                sys.stderr.flush()


def seconds_left(begun: float, now: float, part: float) -> str:
    """Return how long what began at `begun` still takes, in words, if `part` of it is done; empty
    while nothing is known.
    """
    if not 0 < part <= 1:
        return ""
    return f", {left_text((now - begun) * (1 - part) / part)}"


def left_text(seconds: float) -> str:
    """Return a time that is left in words: minutes above two of them."""
    if seconds > 120:
        return f"{seconds / 60:.0f} minutes left"
    return f"{max(seconds, 0):.0f} seconds left"
