"""Places for one more attempt of the requests of one pool."""

from __future__ import annotations

from pdproxy.deciding.engines_lost import EnginesLost
from pdproxy.deciding.retry_budget import RetryBudget, RetrySlot
from pdproxy.scheduling.losses import RequestAtRisk
from pdproxy.settings.limits import Deadlines


class RetrySlots:
    """Those of the budget of all pools. A request that has lost an engine also waits for others
    that have, too.
    """

    def __init__(self, budget: RetryBudget, lost: EnginesLost, deadlines: Deadlines) -> None:
        self._budget = budget
        self._lost = lost
        self._deadlines = deadlines

    def __repr__(self) -> str:
        return f"<RetrySlots of {self._budget!r}>"

    def restore(self) -> RetrySlot:
        """Return a place that was taken before this began."""
        return self._budget.restore()

    async def enter(self, sender: RequestAtRisk) -> RetrySlot | None:
        """Wait for a place behind an attempt that has failed; None if none came free in time."""
        permit, has_lost = None, any(one.some for one in sender.lost)
        if has_lost:
            permit = await self._lost.permit(self._deadlines.retry)
        slot = None
        try:
            if permit is not None or not has_lost:
                slot = await self._budget.enter()
            if slot is not None:
                slot.permit = permit
        finally:
            if slot is None and permit is not None:
                permit.leave()
        return slot
