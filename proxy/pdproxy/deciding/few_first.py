"""Requests that may end engines: few of them begin at first, then more and more.

Those that were under way when engines disappeared, and those that are alike or of one client, where
engines were lost before. If all began at once, the cause would take the next engine from those that
share it, or one with each copy of itself. So they begin one after the other at first. Each has a
moment before the next one begins: a request that makes an engine disappear mostly does so at once.
Behind some that did no harm, more and more are under way together: an engine that has failed by
itself had hundreds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pdproxy.kit.clock import Clock, Timer
from pdproxy.kit.places_in_order import PlacesInOrder

SINGLY = 8
"""So many are tried again one after the other. Behind them two are together, then four, and so
on.
"""
MOMENT = 0.25
"""Seconds for which one is tried again before the next one is, unless it has its first data
before.
"""


class Permit:
    """A `scheduling.losses.Turn`: a request's places in one or several orders, which are left
    together.
    """

    __slots__ = ("_clock", "_left", "_timer")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left: list[Callable[[bool], None]] = []
        self._timer: Timer | None = None

    def add(self, left: Callable[[bool], None]) -> None:
        """Add a place. `left` is called once, with whether the request did no harm."""
        self._left.append(left)

    def leave_in(self, seconds: float, *, harmless: bool = True) -> None:
        """See `Turn`."""
        self._keep()
        if self._left:
            self._timer = self._clock.after(seconds, partial(self.leave, harmless=harmless))

    def leave(self, *, harmless: bool = True) -> None:
        """See `Turn`."""
        self._keep()
        places, self._left = self._left, []
        for left in places:
            left(harmless)

    def _keep(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


class FewFirst(PlacesInOrder):
    """One order of such requests. `singly`: so many of them are one after the other at first.

    `moment`: as `MOMENT`; None: each has its place until its permit is left.
    """

    __slots__ = ("_at_once", "_moment", "_passed", "_round", "_singly")

    def __init__(
        self, clock: Clock, *, singly: int = SINGLY, moment: float | None = MOMENT
    ) -> None:
        super().__init__(clock)
        self._singly = singly
        self._moment = moment
        self._at_once = 1
        self._passed = 0
        self._round = 0
        """How often it has begun again: what those of another round do says nothing."""

    @property
    def limit(self) -> int:
        """How many may be under way now."""
        return self._at_once

    async def enter(
        self, seconds: float, permit: Permit | None = None, *, waits: bool = True
    ) -> Permit | None:
        """Wait for a place, in the order in which requests came, and return its permit. None if
        there was none in time.

        `permit`: gets the place, if the request has one. `waits` False: it does not wait.
        """
        if not self.running:  # then nobody waits
            self.again()  # these are of another loss
        if not self.take() and not (waits and await self.wait(seconds)):
            return None
        permit = permit or Permit(self._clock)
        permit.add(partial(self._leave, self._round))
        if self._moment is not None:
            permit.leave_in(self._moment)
        return permit

    def again(self) -> None:
        """One of them has lost another engine: begin again with one at a time."""
        self._at_once, self._passed = 1, 0
        self._round += 1

    def open(self) -> None:
        """Let all of them run: none is the cause."""
        self._at_once = 1 << 31
        self.grant()

    def _leave(self, of_round: int, harmless: bool) -> None:
        if harmless and of_round == self._round:
            self._passed += 1
            if self._passed >= max(self._singly if self._at_once == 1 else 0, self._at_once):
                self._passed = 0
                self._at_once *= 2
        self.leave()
