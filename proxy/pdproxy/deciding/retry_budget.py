"""The retry budget: how many attempts behind the first one may be under way at once, of all
requests.

If one of two engines dies, half of all requests are tried again at once: as much work once more, on
the engine that is left. So only a share of the requests in flight is tried again at the same time,
and the others wait for their turn. Refusing them would lose what could be served; waiting bounds
the load in the same way.
"""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.deciding.few_first import Permit
from pdproxy.kit.clock import Clock
from pdproxy.kit.places_in_order import PlacesInOrder
from pdproxy.observe.description import Label, MergeRule, counter, gauge
from pdproxy.observe.events import Observers
from pdproxy.settings.limits import Deadlines, Limits

RETRIES = gauge(
    "pdproxy_retries",
    "requests",
    "Requests whose engine failed before its data, and that are tried again (limits.retry_share)",
    Label(
        "state",
        (
            ("running", "another engine was asked, and has sent no data yet"),
            ("waiting", "too many run"),
        ),
    ),
    workers=MergeRule.SUM,
)
RETRIES_REFUSED = counter(
    "pdproxy_retries_refused_total",
    "requests",
    "Requests that were not tried again since too many were for deadlines.retry",
)


class RetrySlot:
    """A `scheduling.losses.Slot`."""

    __slots__ = ("_budget", "permit")

    def __init__(self, budget: RetryBudget) -> None:
        self._budget: RetryBudget | None = budget
        self.permit: Permit | None = None
        """What other requests wait for behind the loss of an engine. It is left with the place."""

    def leave(self) -> None:
        """See `Slot`."""
        budget, self._budget = self._budget, None
        if budget is not None:
            budget.leave()
        if self.permit is not None:
            self.permit.leave()

    def lost(self) -> None:
        """See `Slot`: the permit ends by its time."""
        self.permit = None


class RetryBudget(PlacesInOrder):
    """At most a share of the requests in flight are tried again at once, some of them in any case
    (`limits`).

    Others wait (`deadlines.retry`), in the order in which they came, at most `limits.max_inflight`
    of them. `inflight` returns how many requests are being served. `clock`: of that deadline.
    """

    def __init__(
        self,
        limits: Limits,
        deadlines: Deadlines,
        inflight: Callable[[], int],
        clock: Clock,
    ) -> None:
        super().__init__(clock)
        self.limits = limits
        self._deadlines = deadlines
        self._inflight = inflight
        self.refused = 0
        """How many got no place in time."""

    def show(self, observers: Observers) -> None:
        """Show how many are tried again, wait, and were refused."""
        observers.show(
            RETRIES, lambda: [(("running",), self.running), (("waiting",), self.waiting)]
        )
        observers.show(RETRIES_REFUSED, lambda: [((), self.refused)])

    @property
    def limit(self) -> int:
        """How many may run now."""
        return max(self.limits.min_retries, int(self.limits.retry_share * self._inflight()))

    def configure(self) -> None:
        """Let those that wait have places by the settings as they are now."""
        self.grant()

    def restore(self) -> RetrySlot:
        """Return a place that was taken before this began, whether or not one is free."""
        self.running += 1
        return RetrySlot(self)

    async def enter(self) -> RetrySlot | None:
        """Wait for a place; None if none came free in time."""
        if self.take() or (
            self.waiting < self.limits.max_inflight and await self.wait(self._deadlines.retry)
        ):
            return RetrySlot(self)
        self.refused += 1
        return None
