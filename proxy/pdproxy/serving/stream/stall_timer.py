"""The deadline between the events of a stream. It restarts with each event, without any work per
event.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from pdproxy.kit.clock import Clock


class StallTimer:
    """Calls `stalled` once, when nothing has come for `seconds`. Runs until it is cancelled.

    `last` returns when something came last (the clock's time, s), None while the stream is paused.
    `works` returns whether the engine is seen to work although nothing comes: then the wait goes on
    for as long again. None: it is not asked.
    """

    __slots__ = (
        "_asking",
        "_clock",
        "_excused",
        "_last",
        "_seconds",
        "_stalled",
        "_suspected",
        "_timer",
        "_works",
    )

    def __init__(
        self,
        clock: Clock,
        seconds: float,
        last: Callable[[], float | None],
        stalled: Callable[[], None],
        works: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._last = last
        self._stalled = stalled
        self._works = works
        self._suspected: float | None = None
        self._excused = -math.inf
        """Up to when a silence does not count."""
        self._asking: asyncio.Task[None] | None = None
        self._timer = clock.after(seconds, self._look)

    def __repr__(self) -> str:
        return f"<StallTimer of {self._seconds:g} s>"

    def cancel(self) -> None:
        """Stop. Cancelling again changes nothing."""
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None  # it refers to this

    def _look(self) -> None:
        last, now = self._last(), self._clock.now()
        if last is None:
            wait = self._seconds
        elif now < (since := max(last, self._excused)) + self._seconds:
            wait = since + self._seconds - now
        elif self._suspected != last:
            # If the event loop was held up, it may not have read what has arrived. It reads that
            # before the next tick.
            self._suspected, wait = last, 0.0
        elif self._works is None:
            self._stalled()
            return
        else:
            ask = self._ask(self._works, last)
            self._asking = asyncio.get_running_loop().create_task(
                ask, name="does a silent engine work"
            )
            return
        self._timer = self._clock.after(wait, self._look)

    async def _ask(self, works: Callable[[], Awaitable[bool]], before: float) -> None:
        if await works() or self._last() != before:
            self._excused = self._clock.now()
            self._timer = self._clock.after(self._seconds, self._look)
        else:
            self._stalled()
        self._asking = None
