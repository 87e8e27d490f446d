"""The retry budget: how many attempts behind the first one may be under way at once, of all requests.

If one of two engines dies, half of all requests are tried again at once: as much work once more, on the engine that is left. So
only a share of the requests in flight is tried again at the same time, and the others wait for their turn. Refusing them would
lose what could be served; waiting bounds the load in the same way.
"""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.kit.clock import Clock
from pdproxy.kit.places_in_order import PlacesInOrder
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
            budget.leave()
        if self.permit is not None:
            self.permit.leave()


class RetryBudget(PlacesInOrder):
    """At most `share` of the requests in flight are tried again at once, `least` of them in any case.

    Others wait for `seconds`, in the order in which they came, at most `most` of them. `inflight` returns how many requests are
    being served. `clock`: of that deadline.
    """

    def __init__(
        self, share: float, least: int, most: int, inflight: Callable[[], int], clock: Clock, seconds: float
    ) -> None:
        super().__init__(clock)
        self._share = share
        self._least = least
        self._most = most
        self._inflight = inflight
        self._seconds = seconds
        self.refused = 0
        """How many got no place in time."""

    @property
    def limit(self) -> int:
        """How many may run now."""
        return max(self._least, int(self._share * self._inflight()))

    def configure(self, share: float, least: int, most: int, seconds: float) -> None:
        """Use these limits from now on, see the class. Those that wait may get a place by them."""
        self._share, self._least, self._most, self._seconds = share, least, most, seconds
        self.grant()

    async def enter(self) -> RetrySlot | None:
        """Wait for a place; None if none came free in time."""
        if self.take() or (self.waiting < self._most and await self.wait(self._seconds)):
            return RetrySlot(self)
        self.refused += 1
        return None
