"""What several workers share of one pool: memory of its own, and what one worker does with that."""

from __future__ import annotations

from functools import partial
from socket import socket
from typing import Any

from pdproxy.app.sockets import BoundBefore, BoundHere
from pdproxy.fleet import shared_audit, shared_signs
from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.shared_audit import SharedAuditor
from pdproxy.fleet.shared_signs import Signs
from pdproxy.kit.shared_records import Area
from pdproxy.kit.shared_table import SharedTable
from pdproxy.scheduling import shared_breakers, shared_ledger
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.shared_breakers import SharedBreakers
from pdproxy.scheduling.shared_ledger import SharedLedger
from pdproxy.scheduling.shared_replicas import SharedReplicaLedger
from pdproxy.serving.kv import shared_buffers
from pdproxy.serving.kv.buffers import ReceiveBuffers
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.shared_buffers import SharedReceiveBuffers
from pdproxy.serving.kv.shared_custodian import SharedCustodian

MAX_ENGINES = 4096
"""Engines whose load is shared: as many as a pool can have."""


class PoolMemory:
    """The memory of one pool, for so many workers."""

    def __init__(self, workers: int) -> None:
        self.loads = SharedTable(workers, MAX_ENGINES, shared_ledger.MEASURES)
        self.breakers = SharedTable(workers, MAX_ENGINES, shared_breakers.MEASURES, shared_breakers.KEPT)
        self.moved = SharedTable(workers, MAX_ENGINES, shared_audit.MEASURES, shared_audit.KEPT)
        self.signs = SharedTable(workers, MAX_ENGINES, shared_signs.MEASURES)
        self.buffers = SharedTable(workers, MAX_ENGINES, shared_buffers.MEASURES)
        self.listeners: dict[str, socket] = {}
        """Where its engines send messages, by sections of the settings. The parent binds and closes them."""

    def clear(self, number: int) -> None:
        """Give back what a worker had that has ended."""
        for table in (self.loads, self.breakers, self.moved, self.signs, self.buffers):
            table.clear(number)


class PoolAlone:
    """The parts of a pool of a process that serves alone."""

    ledger = Ledger
    custodian = Custodian
    auditor = Auditor
    sockets = BoundHere()
    buffers = ReceiveBuffers

    def signs(self) -> None:
        """Nobody else sees any."""


class PoolShare:
    """A worker's part of the pool with number `at`. `number`: of the worker; `area`: its own, for the records of all pools."""

    def __init__(self, memory: PoolMemory, number: int, at: int, area: Area) -> None:
        self._memory = memory
        self._number = number
        self._at = at
        self._area = area
        self._ledger: SharedLedger | None = None
        self._custodian: SharedCustodian | None = None
        self.sockets = BoundBefore(memory.listeners)

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
        loads, breakers, number = self._memory.loads, self._memory.breakers, self._number
        make = partial(SharedBreakers, column=breakers.column(number), others=breakers.others(number), number=number)
        kind = SharedReplicaLedger if "replicas" in options else SharedLedger
        column, others = loads.column(number), loads.others(number)
        self._ledger = kind(*arguments, column=column, others=others, breakers=make, **options)
        return self._ledger

    def auditor(self, *arguments: Any) -> SharedAuditor:
        """Return the worker's audit. The arguments: those of `Auditor`."""
        table = self._memory.moved
        return SharedAuditor(*arguments, column=table.column(self._number), others=table.others(self._number))

    def signs(self) -> Signs:
        """Return the signs of life that engines have shown to any worker."""
        table = self._memory.signs
        return Signs(table.column(self._number), table.others(self._number))

    def buffers(self, *arguments: Any) -> SharedReceiveBuffers:
        """Return what is taken of decode engines' receive buffers. The arguments: those of `ReceiveBuffers`."""
        table = self._memory.buffers
        return SharedReceiveBuffers(*arguments, column=table.column(self._number), others=table.others(self._number))

    def custodian(self, *arguments: Any, **options: Any) -> SharedCustodian:
        """Return the worker's custodian. The arguments: those of `Custodian`."""
        self._custodian = SharedCustodian(*arguments, area=self._area, pool=self._at, **options)
        return self._custodian
