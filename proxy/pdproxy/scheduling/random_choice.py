"""The policy `random`: any engine, each as likely as another, whatever its load."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.scheduling.policy import Ask, Best, Policy


def shuffled(engines: Sequence[LedgerEngine], chance: Callable[[], float]) -> list[LedgerEngine]:
    """Return the engines in an order of chance: all orders are as likely."""
    ranked = list(engines)
    for last in range(len(ranked) - 1, 0, -1):
        other = int(chance() * (last + 1))
        ranked[last], ranked[other] = ranked[other], ranked[last]
    return ranked


class RandomChoice(Policy):
    """`chance` returns a number from 0 to 1, without 1."""

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance

    def rank(self, ask: Ask, engines: Sequence[LedgerEngine]) -> list[LedgerEngine]:
        """See `Policy`."""
        return shuffled(engines, self._chance)

    def best_of(self, engines: Sequence[LedgerEngine]) -> Best:
        """See `Policy`."""
        count, chance = len(engines), self._chance
        return lambda _: engines[int(chance() * count)]
