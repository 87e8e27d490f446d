"""How long an engine may be silent while it works: learned from the silences that it came back
from. Pure: time is passed in.
"""

from __future__ import annotations

LARGE = 64 << 10
"""Prompt bytes from which on a prefill's time says something about its length: smaller prompts
mostly wait in the queue.
"""
MARGIN = 4.0
"""So many times as long as before: a batch may be fuller, and a graph may be compiled again."""
FALSE_MARGIN = 2.0
"""The same behind a silence that was taken for a standstill, and ended by itself soon: it may have
been one, too.
"""
REMEMBERED = 300.0
"""Seconds for which a silence counts at least, and at most twice as long: one bad minute must not
hide a stall for ever.
"""


class Pace:
    """The pace of one run of an engine."""

    __slots__ = ("_before", "_longest", "_per_byte", "_window")

    def __init__(self) -> None:
        self._longest = self._before = 0.0
        self._window = 0
        self._per_byte = 0.0

    def __repr__(self) -> str:
        return f"<Pace {max(self._longest, self._before):g} s, {self._per_byte:g} s per byte>"

    @property
    def knows_large(self) -> bool:
        """Whether a large prefill has ended well."""
        return self._per_byte > 0

    def came_back(self, silence: float, now: float) -> None:
        """The engine has shown a sign after so many seconds without any."""
        self._turn(now)
        self._longest = max(self._longest, silence)

    def was_judged(self, silence: float, now: float) -> None:
        """The engine was taken for one that stands still, and has shown a sign soon after, behind
        so many seconds of silence.
        """
        self.came_back(silence * FALSE_MARGIN / MARGIN, now)

    def prefilled(self, prompt_bytes: int, seconds: float) -> None:
        """A prefill has ended well, this long after it was sent."""
        if prompt_bytes >= LARGE:
            pace = seconds / prompt_bytes
            # A mean that follows slowly: the time in the engine's queue is in it, too.
            self._per_byte = pace if not self._per_byte else 0.75 * self._per_byte + 0.25 * pace

    def allowed(self, stalled_after: float, most: float, prompt_bytes: int, now: float) -> float:
        """Return after how many seconds of silence it counts as standing still: `most` at most,
        where that is not less.

        `prompt_bytes`: of the longest prompt that it prefills now.
        """
        self._turn(now)
        learned = MARGIN * max(self._longest, self._before)
        if prompt_bytes >= LARGE:
            learned = max(learned, MARGIN * prompt_bytes * self._per_byte)
        return max(stalled_after, min(most, learned))

    def _turn(self, now: float) -> None:
        window = int(now / REMEMBERED)
        if window != self._window:
            self._before = self._longest if window == self._window + 1 else 0.0
            self._longest, self._window = 0.0, window
