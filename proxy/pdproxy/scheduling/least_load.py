"""The policy `least_load`: the engine with the least work comes first, and equal engines take
turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger_engine import LedgerEngine, Role
from pdproxy.scheduling.policy import Ask, Best, Policy, Turns


def measure_of(role: Role) -> Callable[[LedgerEngine], tuple[int, int]]:
    """Return the measure of an engine's load in a role: the engine with the least is the best."""
    return attrgetter(
        *(("prompt_bytes", "requests") if role is Role.PREFILL else ("requests", "prompt_bytes"))
    )


_LOAD_BITS = 48
"""More bits than the second of two measures ever needs."""


class LeastLoad(Policy):
    """Prefill engines by outstanding prompt bytes, then by requests; others by requests, then by
    prompt bytes.

    Every request asks, so each set of engines has its loads in a list that `opened` and `closed`
    keep up to date: a choice is two passes over integers, in C.
    """

    def __init__(self, role: Role) -> None:
        self._by_bytes = role is Role.PREFILL
        self._measures = measure_of(role)
        self._turn = 0
        self._rankings = Turns()
        """The turns of rankings, apart: they follow where the best engines of two roles can't work
        together. If each such request took two turns, it would be the same engine's turn for ever.
        """
        self._places: dict[LedgerEngine, list[tuple[list[int], int]]] = {}
        """For each engine: the lists of loads that it is in, and its index in each."""

    def rank(self, ask: Ask, engines: Sequence[LedgerEngine]) -> list[LedgerEngine]:
        """See `Policy`."""
        return sorted(self._rankings.of(engines), key=self._measures)

    def best_of(self, engines: Sequence[LedgerEngine]) -> Best:
        """See `Policy`."""
        count = len(engines)
        loads = [0] * count
        for at, engine in enumerate(engines):
            self._places.setdefault(engine, []).append((loads, at))
            self.load_changed(engine)

        def best(ask: Ask) -> LedgerEngine:
            self._turn += 1
            turn = self._turn % count
            least = min(loads)
            if loads[turn] == least:
                return engines[turn]
            try:
                return engines[loads.index(least, turn)]
            except ValueError:
                return engines[loads.index(least)]

        return best

    def engines_changed(self) -> None:
        """See `Policy`."""
        self._places.clear()

    def opened(self, lease: Lease, ask: Ask) -> None:
        """See `Policy`."""
        if self._places:  # a placement chooses without it
            self.load_changed(lease.engine)

    def closed(self, lease: Lease, verdict: Verdict, now: float) -> None:
        """See `Policy`."""
        if self._places:
            self.load_changed(lease.engine)

    def load_changed(self, engine: LedgerEngine) -> None:
        """See `Policy`."""
        if self._by_bytes:
            load = (engine.prompt_bytes << _LOAD_BITS) + engine.requests
        else:
            load = (engine.requests << _LOAD_BITS) + engine.prompt_bytes
        for loads, at in self._places.get(engine, ()):
            loads[at] = load
