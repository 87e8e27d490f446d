"""The retry budget: how many attempts behind the first one may be under way at once, of all requests.

If one of two engines dies, half of all requests are tried again at once: as much work once more, on the engine that is left. So
only a share of the requests in flight is tried again at the same time, and the others wait for their turn. Refusing them would
lose what could be served; waiting bounds the load in the same way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pdproxy.kit.clock import Clock
from pdproxy.serving.dispatch.few_first import Permit


class RetrySlot:
    """A place for one more attempt, from its beginning to its first data or its answer. Leave it once."""

    __slots__ = ("_budget", "permit")

    def __init__(self, budget: RetryBudget) -> None:
        self._budget: RetryBudget | None = budget
        self.permit: Permit | None = None
        """What other requests wait for behind the loss of an engine. It is left with the place."""

    def leave(self) -> None:
        """Give the place back. Doing so again changes nothing."""
        budget, self._budget = self._budget, None
        if budget is not None:
            budget.left()
        if self.permit is not None:
            self.permit.leave()


class RetryBudget:
    """At most `share` of the requests in flight are tried again at once, `least` of them in any case.

    Others wait for `seconds`, in the order in which they came, at most `most` of them. `inflight` returns how many requests are
    being served. `clock`: of that deadline.
    """

    def __init__(
        self, share: float, least: int, most: int, inflight: Callable[[], int], clock: Clock, seconds: float
    ) -> None:
        self._share = share
        self._least = least
        self._most = most
        self._inflight = inflight
        self._clock = clock
        self._seconds = seconds
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.running = 0
        """Attempts behind the first that are under way, and have no data yet."""
        self.refused = 0
        """How many got no place in time."""

    def __repr__(self) -> str:
        return f"<RetryBudget {self.running} of {self.limit} running, {self.waiting} waiting>"

    @property
    def limit(self) -> int:
        """How many may run now."""
        return max(self._least, int(self._share * self._inflight()))

    def configure(self, share: float, least: int, most: int, seconds: float) -> None:
        """Use these limits from now on, see the class. Those that wait may get a place by them."""
        self._share, self._least, self._most, self._seconds = share, least, most, seconds
        self._grant()

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    async def enter(self) -> RetrySlot | None:
        """Wait for a place; None if none came free in time."""
        self._grant()
        if self.running < self.limit and not self.waiting:
            self.running += 1
            return RetrySlot(self)
        if self.waiting >= self._most:
            self.refused += 1
            return None
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            with self._clock.within(self._seconds):
                await turn
        except TimeoutError:
            if self._has(turn):
                return RetrySlot(self)
            self.refused += 1
            return None
        except asyncio.CancelledError:
            if self._has(turn):
                self.left()
            raise
        return RetrySlot(self)

    def _has(self, turn: asyncio.Future[None]) -> bool:
        """Return whether a place was granted, at the moment at which the wait has ended otherwise; give up the turn if not."""
        if turn.done() and not turn.cancelled():
            return True
        turn.cancel()
        if turn in self._waiting:
            self._waiting.remove(turn)
        return False

    def left(self) -> None:
        """A place was given back: it is the next one's."""
        self.running -= 1
        self._grant()

    def _grant(self) -> None:
        limit = self.limit
        while self._waiting and self.running < limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self.running += 1
                turn.set_result(None)
