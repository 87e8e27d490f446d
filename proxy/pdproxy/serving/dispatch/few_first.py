"""Requests that were under way when engines disappeared: few of them are tried again at first, then more and more.

Some may be the cause. If all were tried at once, the cause would take the next engine from those that share it. So they
are tried one after the other at first. Each has a moment before the next one begins: a request that makes an engine disappear
mostly does so at once. Behind some that did no harm, more and more are tried together: an engine that has failed by itself had
hundreds.
"""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.kit.clock import Clock, Timer
from pdproxy.kit.places_in_order import PlacesInOrder

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


class FewFirst(PlacesInOrder):
    """The requests of engines that have disappeared; or, with `singly`, those of one client, each to its end."""

    __slots__ = ("_at_once", "_passed", "_singly")

    def __init__(self, clock: Clock, *, singly: bool = False) -> None:
        super().__init__(clock)
        self._singly = singly
        self._at_once = 1
        self._passed = 0

    @property
    def limit(self) -> int:
        """How many may be under way now."""
        return self._at_once

    async def enter(self, seconds: float) -> Permit | None:
        """Wait for a permit, in the order in which requests came. None if there was none in time."""
        if not self.running and not self.waiting and not self._singly:
            self.again()  # these are of another loss
        if not self.take() and not await self.wait(seconds):
            return None
        return Permit(self._left, self._clock, None if self._singly else MOMENT)

    def again(self) -> None:
        """One of them has lost another engine: begin again with one at a time."""
        self._at_once, self._passed = 1, 0

    def open(self) -> None:
        """Let all of them run: none is the cause."""
        self._at_once = 1 << 31
        self.grant()

    def _left(self) -> None:
        self._passed += 1
        if not self._singly and self._passed >= max(SINGLY if self._at_once == 1 else 0, self._at_once):
            self._passed = 0
            self._at_once *= 2
        self.leave()
