"""The deadline between the events of a stream. It restarts with each event, without any work per event."""

from __future__ import annotations

import math
from collections.abc import Callable

from pdproxy.kit.clock import Clock


class StallTimer:
    """Calls `stalled` once, when nothing has come for `seconds`. Runs until it is cancelled.

    `last` returns when something came last (the clock's time, s), None while the stream is paused. `excused`: a silence that has
    lasted up to now does not count.
    """

    __slots__ = ("_clock", "_excused", "_last", "_seconds", "_stalled", "_suspected", "_timer")

    def __init__(
        self,
        clock: Clock,
        seconds: float,
        last: Callable[[], float | None],
        stalled: Callable[[], None],
        *,
        excused: bool = False,
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._last = last
        self._excused = clock.now() if excused else -math.inf
        self._stalled = stalled
        self._suspected: float | None = None
        self._timer = clock.after(seconds, self._look)

    def __repr__(self) -> str:
        return f"<StallTimer of {self._seconds:g} s>"

    def cancel(self) -> None:
        """Stop. Cancelling again changes nothing."""
        self._timer.cancel()

    def _look(self) -> None:
        last, now = self._last(), self._clock.now()
        if last is None:
            wait = self._seconds
        elif now < self._excused + self._seconds:
            wait = self._excused + self._seconds - now
        elif now < last + self._seconds:
            wait = last + self._seconds - now
        elif self._suspected != last:
            # If the event loop was held up, it may not have read what has arrived. It reads that before the next tick.
            self._suspected, wait = last, 0.0
        else:
            self._stalled()
            return
        self._timer = self._clock.after(wait, self._look)
