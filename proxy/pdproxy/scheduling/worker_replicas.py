"""The ledger of one of several workers of a proxy that is one of several replicas. Pure.

What this proxy has of an engine is the sum over its workers; what other replicas have is estimated
from that, as for one process. A worker that is killed takes its requests along: other replicas seem
to lose as many, until the engine's next report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pdproxy.kit.shared_sums import Move
from pdproxy.scheduling.ledger import LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, LedgerEngine
from pdproxy.scheduling.replicas import ReplicaLedger
from pdproxy.scheduling.worker_ledger import LedgerShare, WorkerLedger


class WorkerReplicaLedger(ReplicaLedger, WorkerLedger):
    """A `ReplicaLedger` that counts the leases of all workers as its own."""

    def __init__(
        self,
        specs: Iterable[EngineSpec],
        options: LedgerOptions,
        share: LedgerShare,
        *,
        replicas: int,
        max_age: Callable[[], float],
    ) -> None:
        WorkerLedger.__init__(self, [], options, share)
        self._begin(specs, replicas, max_age)

    def _mover(self, engine: LedgerEngine) -> Move:
        move = super()._mover(engine)

        def moved(more: int) -> None:
            move(more)
            self._suppose(engine, self._of_replicas(engine, 0))
            for policy in self._interested[engine.uses]:
                policy.load_changed(engine)

        return moved
