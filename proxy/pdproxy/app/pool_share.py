"""What several workers share of one pool: memory of its own, and what one worker does with that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from socket import socket
from typing import Any

from pdproxy.app.capacity import PoolCapacity
from pdproxy.app.shared_capacity import SharedPoolCapacity
from pdproxy.app.siblings import Siblings
from pdproxy.app.sockets import BoundBefore, BoundHere
from pdproxy.fleet import shared_audit, shared_signs
from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.shared_audit import SharedAuditor
from pdproxy.fleet.shared_signs import Signs
from pdproxy.kit.leading import Leading
from pdproxy.kit.shared_records import Area, SharedRecords
from pdproxy.kit.shared_table import SharedTable
from pdproxy.scheduling import shared_breakers, shared_ledger, shared_windows
from pdproxy.scheduling.auto.workers import AutoMemory, AutoShare, WorkerAuto
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.shared_breakers import SharedBreakers
from pdproxy.scheduling.shared_ledger import SharedLedger
from pdproxy.scheduling.shared_replicas import SharedReplicaLedger
from pdproxy.scheduling.shared_windows import SharedWindows
from pdproxy.serving.kv import shared_buffers, shared_turns
from pdproxy.serving.kv.buffers import ReceiveBuffers
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.shared_buffers import SharedReceiveBuffers
from pdproxy.serving.kv.shared_custodian import SharedCustodian
from pdproxy.serving.kv.shared_turns import SharedTurns
from pdproxy.serving.kv.turn_messages import is_turn
from pdproxy.serving.kv.turns import Turns

MAX_ENGINES = 4096
"""Engines whose load is shared: as many as a pool can have."""


class PoolMemory:
    """The memory of one pool, for so many workers."""

    def __init__(self, workers: int) -> None:
        self.loads = SharedTable(workers, MAX_ENGINES, shared_ledger.MEASURES)
        self.breakers = SharedTable(workers, MAX_ENGINES, shared_breakers.MEASURES, shared_breakers.KEPT)
        self.moved = SharedTable(workers, MAX_ENGINES, shared_audit.MEASURES, shared_audit.KEPT)
        self.signs = SharedTable(workers, MAX_ENGINES, shared_signs.MEASURES)
        self.windows = SharedTable(workers, MAX_ENGINES, shared_windows.MEASURES)
        self.buffers = SharedTable(workers, MAX_ENGINES, shared_buffers.MEASURES)
        self.auto = AutoMemory(workers, MAX_ENGINES)
        self.turns = SharedRecords(workers, shared_turns.UNITS)
        self.listeners: dict[str, socket] = {}
        """Where its engines send messages, by the keys of their places. The parent binds and closes them."""

    def clear(self, number: int) -> None:
        """Give back what a worker had that has ended."""
        self.auto.clear(number)
        # Loads behind breakers: what workers find changed in the first has them look at the second.
        for table in (self.breakers, self.loads, self.moved, self.signs, self.windows, self.buffers):
            table.clear(number)


class PoolAlone:
    """The parts of a pool of a process that serves alone."""

    ledger = Ledger
    custodian = Custodian
    auditor = Auditor
    capacity = PoolCapacity
    sockets = BoundHere()
    buffers = ReceiveBuffers
    turns = Turns

    def auto(self) -> None:
        """The placement `auto` shares nothing."""

    def signs(self) -> None:
        """Nobody else sees any."""


class PoolShare:
    """A worker's part of the pool with number `at`. `number`: of the worker; `area`: its own, for the records of all pools.

    `lead`: who does what is done once; `now`: monotonic seconds; `siblings`: the other workers.
    """

    def __init__(
        self,
        memory: PoolMemory,
        number: int,
        at: int,
        area: Area,
        lead: Leading,
        now: Callable[[], float],
        siblings: Siblings,
    ) -> None:
        self._memory = memory
        self._number = number
        self._at = at
        self._area = area
        self._lead = lead
        self._now = now
        self._siblings = siblings
        self._ledger: SharedLedger | None = None
        self._custodian: SharedCustodian | None = None
        self._capacity: SharedPoolCapacity | None = None
        self._turns: SharedTurns | None = None
        self.sockets = BoundBefore(memory.listeners)

    def __repr__(self) -> str:
        return f"<PoolShare of pool {self._at}, worker {self._number}>"

    def start(self) -> None:
        """Follow the other workers."""
        if self._turns is not None:
            self._turns.start()

    def refresh(self) -> None:
        """Take over the loads of the other workers, and what they have learned of engines."""
        if self._ledger is not None:
            self._ledger.refresh(all_of_it=True)
            if isinstance(self._ledger.placement, WorkerAuto):
                self._ledger.placement.look(self._now())
        if self._capacity is not None:
            self._capacity.look()

    def adopt(self, records: list[bytes]) -> None:
        """Become responsible for the KV of a worker that has ended which engines of this pool hold."""
        if self._custodian is not None:
            self._custodian.adopt([record for record in records if not is_turn(record)])
        if self._turns is not None:
            self._turns.adopt([record for record in records if is_turn(record)])

    def auto(self) -> AutoShare:
        """Return what the worker's placement `auto` shares with the others'."""
        return self._memory.auto.of(self._number, lambda: self._lead.leads)

    def ledger(self, *arguments: Any, **options: Any) -> SharedLedger:
        """Return the worker's ledger. The arguments: those of `Ledger`, or of `ReplicaLedger`."""
        loads, breakers, number = self._memory.loads, self._memory.breakers, self._number
        make = partial(SharedBreakers, column=breakers.column(number), others=breakers.others(number), number=number)
        kind = SharedReplicaLedger if "replicas" in options else SharedLedger
        column, others = loads.column(number), loads.others(number)
        self._ledger = kind(*arguments, column=column, others=others, breakers=make, **options)
        return self._ledger

    def capacity(self, *arguments: Any) -> SharedPoolCapacity:
        """Return what bounds the engines' requests, of all workers. The arguments: those of `PoolCapacity`."""
        assert self._ledger is not None  # a pool's ledger is its first part
        table, number = self._memory.windows, self._number
        windows = SharedWindows(table.column(number), table.others(number), number)
        self._capacity = SharedPoolCapacity(*arguments, windows=windows, ledger=self._ledger)
        return self._capacity

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

    def turns(self, *arguments: Any, **options: Any) -> SharedTurns:
        """Return the worker's turns. The arguments: those of `Turns`."""
        own = partial(
            SharedTurns,
            number=self._number,
            pool=self._at,
            area=self._memory.turns.area(self._number),
            siblings=self._siblings,
        )
        self._turns = own(*arguments, **options)
        return self._turns
