"""The policy `power_of_two`: of two engines that chance draws, the one with less load.

It spreads almost as well as `least_load` where loads are known exactly. Its use is where they are
not: several proxies in front of the same engines each see only their own requests, and would all
choose the same least loaded engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdproxy.scheduling.least_load import measure_of
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.policy import Ask, Best, Policy
from pdproxy.scheduling.random_choice import shuffled


class PowerOfTwo(Policy):
    """The load is what `least_load` compares in this role. Of two engines with the same load the
    first drawn is taken.
    """

    def __init__(self, role: Role, chance: Callable[[], float]) -> None:
        self._measure = measure_of(role)
        self._chance = chance

    def rank(self, ask: Ask, engines: Sequence[LedgerEngine]) -> list[LedgerEngine]:
        """See `Policy`. Behind the two that were drawn, the others are in an order of chance."""
        ranked = shuffled(engines, self._chance)
        if self._measure(ranked[1]) < self._measure(ranked[0]):
            ranked[0], ranked[1] = ranked[1], ranked[0]
        return ranked

    def best_of(self, engines: Sequence[LedgerEngine]) -> Best:
        """See `Policy`."""
        count, chance, measure = len(engines), self._chance, self._measure

        def best(ask: Ask) -> LedgerEngine:
            one = int(chance() * count)
            other = int(chance() * (count - 1))
            first, second = engines[one], engines[other if other < one else other + 1]
            return second if measure(second) < measure(first) else first

        return best
