"""The policy `round_robin`: engines take turns, whatever their load."""

from __future__ import annotations

from collections.abc import Sequence

from pdproxy.scheduling.leases import Lease
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.policy import Ask, Best, Policy


class RoundRobin(Policy):
    """The engine whose last turn in this role was longest ago comes first; of those without any,
    the first one of the settings.

    A turn is a lease, not a choice: where the engines that two roles would choose can't work
    together, others get the request. With a counter of choices, some of them might never have a
    turn.
    """

    def __init__(self, role: Role) -> None:
        self._role = role
        self._number = 0
        self._turns: dict[LedgerEngine, int] = {}
        """The number of each engine's last turn, the oldest one first."""

    def rank(self, ask: Ask, engines: Sequence[LedgerEngine]) -> list[LedgerEngine]:
        """See `Policy`."""
        return sorted(engines, key=self._turn)

    def best_of(self, engines: Sequence[LedgerEngine]) -> Best:
        """See `Policy`."""
        turn = self._turn
        return lambda _: min(engines, key=turn)

    def opened(self, lease: Lease, ask: Ask) -> None:
        """See `Policy`."""
        role = (
            lease.role if lease.role in lease.engine.uses else Role.DECODE
        )  # a decode engine that serves whole is ranked as one
        if role is not self._role:
            return
        turns, self._number = self._turns, self._number + 1
        turns.pop(lease.engine, None)
        turns[lease.engine] = self._number

    def forget(self, engine: LedgerEngine) -> None:
        """See `Policy`."""
        self._turns.pop(engine, None)

    def _turn(self, engine: LedgerEngine) -> int:
        return self._turns.get(engine, 0)
