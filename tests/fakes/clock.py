"""A clock that a test moves: deadlines are reached when the test says so, and never because the
machine is slow.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pdproxy.kit.clock import Clock, Timer

TURNS = 5
"""Turns of the event loop behind each timer: enough for a cancelled task to end and for those that
await it.
"""
STUCK, PAUSE = 20, 0.01
"""So many turns of the event loop, with so many real seconds before each: what has not ended then
waits for a deadline. Proxy, engines and clients of a test are one process, and each of them goes on
in a turn: this takes longer where the machine is slow.
"""
STEP = 8.0
"""Seconds of the first step of `through`, for tests with the deadlines of `tests.fakes.world`."""
PATIENCE = 30.0
"""Real seconds until a timer that a test waits for must have been set."""
_T = TypeVar("_T")


class ManualClock(Clock):
    """Stands still until a test moves it. Its time begins at the real one's."""

    def __init__(self) -> None:
        super().__init__()
        self._time = time.monotonic()
        self._set: dict[int, tuple[float, float]] = {}
        """Of each timer, by its number: when it is due, and for how many seconds it was set."""
        self._number = 0
        self.now = lambda: self._time

    def after(self, seconds: float, then: Callable[[], None]) -> Timer:
        """Call `then` once the test has advanced the clock by `seconds`."""
        self._number += 1
        timer = Timer(self._slots, self._number, then)
        self._slots[self._number] = {timer: None}
        self._set[self._number] = (self._time + seconds, seconds)
        return timer

    def pending(self) -> list[float]:
        """For how many seconds each timer was set that is neither cancelled nor called, in the
        order of their calls.
        """
        return [self._set[number][1] for number in self._order()]

    async def advance(self, seconds: float) -> None:
        """Let so much time pass: timers are called in order, with some turns of the event loop
        behind each.
        """
        await self._advance_to(self._time + seconds)

    async def reach(self, seconds: float) -> None:
        """Wait until a timer is set for just so many seconds, then let time pass until it has been
        called.
        """
        end = time.monotonic() + PATIENCE
        while (due := self._when(seconds)) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"no timer for {seconds:g} s was set, only {self.pending()}")
            await asyncio.sleep(0.002)
        await self._advance_to(due)

    async def through(self, awaitable: Awaitable[_T], step: float = 0.5) -> _T:
        """Await something. Whenever nothing else can end it, let time pass to the next timer, and
        more each time.

        `step`: seconds that pass first, at least: fewer than any deadline. Each step takes real
        time, and a watch that comes each second would take many.
        """
        task, seconds = asyncio.ensure_future(awaitable), step
        while not task.done():
            for _ in range(STUCK):
                await asyncio.sleep(PAUSE)
                if task.done():
                    break
            else:
                if order := self._order():
                    await self._advance_to(max(self._time + seconds, self._set[order[0]][0]))
                    seconds *= 2
        return task.result()

    def _when(self, seconds: float) -> float | None:
        return next(
            (
                due
                for number in self._order()
                if (due := self._set[number][0]) and math.isclose(self._set[number][1], seconds)
            ),
            None,
        )

    def _order(self) -> list[int]:
        self._set = {number: of for number, of in self._set.items() if number in self._slots}
        return sorted(self._set, key=lambda number: (self._set[number][0], number))

    async def _advance_to(self, end: float) -> None:
        await self._turns()
        while (order := self._order()) and (due := self._set[order[0]][0]) <= end:
            self._time = max(self._time, due)
            (timer,) = self._slots.pop(order[0])
            timer.then()
            await self._turns()
        self._time = max(self._time, end)

    async def _turns(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)


async def later_turns() -> None:
    """Let the event loop take so many turns that whatever nothing holds up has ended, however slow
    the machine is.
    """
    for _ in range(STUCK):
        await asyncio.sleep(PAUSE / 4)


def let_loop_time_pass(seconds: float) -> None:
    """Let the event loop's own clock be so much later from now on: aiohttp's deadlines until then
    are over in its next turn.

    The test needs the mark `asyncio_loop`: the clock of uvloop's loop is out of reach.
    `asyncio.timeout` and `asyncio.sleep` are on that clock, too; `tests.fakes.world.until` is not.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, asyncio.BaseEventLoop)
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]
