"""Requests that were under way when engines disappeared: few of them are tried again at first, then more and more.

Some may be the cause. If all were tried at once, the cause would take the next engine from those that share it. So they
are tried one after the other at first. Each has a moment before the next one begins: a request that makes an engine disappear
mostly does so at once. Behind some that did no harm, more and more are tried together: an engine that has failed by itself had
hundreds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pdproxy.kit.clock import Clock, Timer

SINGLY = 8
"""So many are tried one after the other. Behind them two are together, then four, and so on."""
MOMENT = 0.25
"""Seconds for which one is under way before the next one begins, unless it has its first data before."""


class Permit:
    """The permission to try one request again. Leave it at the request's first data, or at the end of its attempt."""

    __slots__ = ("_over", "_timer")

    def __init__(self, over: Callable[[], None], clock: Clock, moment: float | None) -> None:
        self._over: Callable[[], None] | None = over
        self._timer: Timer | None = None if moment is None else clock.after(moment, self.leave)

    def leave(self) -> None:
        """Let the next request begin. Doing so again changes nothing."""
        over, self._over = self._over, None
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if over is not None:
            over()


class FewFirst:
    """The requests of engines that have disappeared; or, with `singly`, those of one client, each to its end."""

    __slots__ = ("_at_once", "_clock", "_passed", "_singly", "_waiting", "running")

    def __init__(self, clock: Clock, *, singly: bool = False) -> None:
        self._clock = clock
        self._singly = singly
        self._at_once = 1
        self._passed = 0
        self.running = 0
        """Permits that were not left yet."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __repr__(self) -> str:
        return f"<FewFirst {self.running} of {self._at_once} running, {len(self._waiting)} waiting>"

    @property
    def waiting(self) -> int:
        """How many wait for a permit."""
        return len(self._waiting)

    async def enter(self, seconds: float) -> Permit | None:
        """Wait for a permit, in the order in which requests came. None if there was none in time."""
        if not self.running and not self._waiting and not self._singly:
            self.again()  # these are of another loss
        if self.running >= self._at_once or self._waiting:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                async with self._clock.within(seconds):
                    await turn
            except TimeoutError:
                if not self._has(turn):
                    return None
            except asyncio.CancelledError:
                if self._has(turn):
                    self._left()
                raise
        else:
            self.running += 1
        return Permit(self._left, self._clock, None if self._singly else MOMENT)

    def _has(self, turn: asyncio.Future[None]) -> bool:
        """Return whether a permit was given at the moment at which the wait has ended otherwise; give up the turn if not."""
        if turn.done() and not turn.cancelled():
            return True
        turn.cancel()
        if turn in self._waiting:
            self._waiting.remove(turn)
        return False

    def again(self) -> None:
        """One of them has lost another engine: begin again with one at a time."""
        self._at_once, self._passed = 1, 0

    def open(self) -> None:
        """Let all of them run: none is the cause."""
        self._at_once = 1 << 31
        self._grant()

    def _left(self) -> None:
        self.running -= 1
        self._passed += 1
        if not self._singly and self._passed >= max(SINGLY if self._at_once == 1 else 0, self._at_once):
            self._passed = 0
            self._at_once *= 2
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self.running < self._at_once:
            turn = self._waiting.popleft()
            if not turn.done():
                self.running += 1
                turn.set_result(None)
