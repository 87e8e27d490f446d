"""What several workers share of one pool: memory of its own, and what one worker does with that."""

from __future__ import annotations

from typing import Any

from pdproxy.kit.shared_records import Area
from pdproxy.kit.shared_table import SharedTable
from pdproxy.scheduling import shared_ledger
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.shared_ledger import SharedLedger
from pdproxy.scheduling.shared_replicas import SharedReplicaLedger
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.shared_custodian import SharedCustodian

MAX_ENGINES = 4096
"""Engines whose load is shared: as many as a pool can have."""


class PoolMemory:
    """The memory of one pool, for so many workers."""

    def __init__(self, workers: int) -> None:
        self.loads = SharedTable(workers, MAX_ENGINES, shared_ledger.MEASURES)

    def clear(self, number: int) -> None:
        """Give back what a worker had that has ended."""
        self.loads.clear(number)


class PoolAlone:
    """The parts of a pool of a process that serves alone."""

    ledger = Ledger
    custodian = Custodian


class PoolShare:
    """A worker's part of the pool with number `at`. `number`: of the worker; `area`: its own, for the records of all pools."""

    def __init__(self, memory: PoolMemory, number: int, at: int, area: Area) -> None:
        self._memory = memory
        self._number = number
        self._at = at
        self._area = area
        self._ledger: SharedLedger | None = None
        self._custodian: SharedCustodian | None = None

    def __repr__(self) -> str:
        return f"<PoolShare of pool {self._at}, worker {self._number}>"

    def refresh(self) -> None:
        """Take over the loads of the other workers."""
        if self._ledger is not None:
            self._ledger.refresh(all_of_it=True)

    def adopt(self, records: list[bytes]) -> None:
        """Become responsible for those handles of a worker that has ended which engines of this pool hold."""
        if self._custodian is not None:
            self._custodian.adopt(records)

    def ledger(self, *arguments: Any, **options: Any) -> SharedLedger:
        """Return the worker's ledger. The arguments: those of `Ledger`, or of `ReplicaLedger`."""
        table = self._memory.loads
        kind = SharedReplicaLedger if "replicas" in options else SharedLedger
        self._ledger = kind(*arguments, column=table.column(self._number), others=table.others(self._number), **options)
        return self._ledger

    def custodian(self, *arguments: Any, **options: Any) -> SharedCustodian:
        """Return the worker's custodian. The arguments: those of `Custodian`."""
        self._custodian = SharedCustodian(*arguments, area=self._area, pool=self._at, **options)
        return self._custodian
