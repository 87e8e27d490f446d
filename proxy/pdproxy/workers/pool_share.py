"""What several workers share of one pool: memory of its own, and what one worker does with that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from socket import socket

from pdproxy.app.share import Part
from pdproxy.app.sockets import BoundBefore
from pdproxy.app.worker_capacity import WorkerPoolCapacity
from pdproxy.deciding import worker_buffers
from pdproxy.fleet import life_signs, worker_audit
from pdproxy.fleet.engine import Engine
from pdproxy.fleet.handle_hosts import HandleHosts
from pdproxy.kit.clock import Clock
from pdproxy.kit.leading import Lead
from pdproxy.kit.shared_table import SharedTable
from pdproxy.observe.events import Observers
from pdproxy.scheduling import worker_breakers, worker_ledger, worker_windows
from pdproxy.scheduling.auto.workers import AutoMemory, AutoShare, WorkerAuto
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.worker_breakers import WorkerBreakers
from pdproxy.scheduling.worker_ledger import WorkerLedger
from pdproxy.serving.kv import worker_turns
from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.turn_messages import is_turn
from pdproxy.serving.kv.worker_turns import WorkerTurns
from pdproxy.settings.limits import Deadlines
from pdproxy.transfer.contract import Contract
from pdproxy.workers.custodian import WorkerCustodian
from pdproxy.workers.records import Area, SharedRecords
from pdproxy.workers.siblings import LinkedSiblings

MAX_ENGINES = 4096
"""Engines whose load is shared: as many as a pool can have."""


class PoolMemory:
    """The memory of one pool, for so many workers."""

    def __init__(self, workers: int) -> None:
        self.loads = SharedTable(workers, MAX_ENGINES, worker_ledger.MEASURES)
        self.breakers = SharedTable(
            workers, MAX_ENGINES, worker_breakers.MEASURES, worker_breakers.KEPT
        )
        self.moved = SharedTable(workers, MAX_ENGINES, worker_audit.MEASURES, worker_audit.KEPT)
        self.signs = SharedTable(workers, MAX_ENGINES, life_signs.MEASURES)
        self.windows = SharedTable(workers, MAX_ENGINES, worker_windows.MEASURES)
        self.buffers = SharedTable(workers, MAX_ENGINES, worker_buffers.MEASURES)
        self.auto = AutoMemory(workers, MAX_ENGINES)
        self.turns = SharedRecords(workers, worker_turns.UNITS)
        self.listeners: dict[str, socket] = {}
        """Where its engines send messages, by the keys of their places. The parent binds and closes
        them.
        """

    def clear(self, number: int) -> None:
        """Give back what a worker had that has ended."""
        self.auto.clear(number)
        # Loads behind breakers: what workers find changed in the first has them look at the second.
        for table in (
            self.breakers,
            self.loads,
            self.moved,
            self.signs,
            self.windows,
            self.buffers,
        ):
            table.clear(number)


class WorkerPoolShare:
    """A worker's part of the pool with number `at`, a `PoolShare`. `number`: of the worker; `area`:
    its own, for the records of all pools.

    `lead`: whether it does what is done once; `now`: monotonic seconds; `siblings`: the others.
    """

    def __init__(
        self,
        memory: PoolMemory,
        number: int,
        at: int,
        area: Area,
        lead: Lead,
        now: Callable[[], float],
        siblings: LinkedSiblings,
    ) -> None:
        self.number = number
        self.at = at
        self.loads: Part = memory.loads.of(number)
        self.moved: Part = memory.moved.of(number)
        self.signs: Part = memory.signs.of(number)
        self.windows: Part = memory.windows.of(number)
        self.buffers: Part = memory.buffers.of(number)
        self.kept_turns = memory.turns.area(number)
        self._memory = memory
        self._area = area
        self._lead = lead
        self._now = now
        self.siblings = siblings
        self.sockets = BoundBefore(memory.listeners)
        self.ledger: WorkerLedger | None = None
        """This and the next two are set by whoever makes them: they follow the other workers."""
        self.capacity: WorkerPoolCapacity | None = None
        self.turns: WorkerTurns | None = None
        self._custodian: WorkerCustodian | None = None

    def __repr__(self) -> str:
        return f"<WorkerPoolShare of pool {self.at}, worker {self.number}>"

    def start(self) -> None:
        """Follow the other workers."""
        if self.turns is not None:
            self.turns.start()

    def refresh(self) -> None:
        """Take over the loads of the other workers, and what they have learned of engines."""
        if self.ledger is not None:
            self.ledger.refresh(all_of_it=True)
            if isinstance(self.ledger.placement, WorkerAuto):
                self.ledger.placement.look(self._now())
        if self.capacity is not None:
            self.capacity.look()

    def adopt(self, records: list[bytes]) -> None:
        """Become responsible for the KV of a worker that has ended which engines of this pool
        hold.
        """
        if self._custodian is not None:
            self._custodian.adopt([record for record in records if not is_turn(record)])
        if self.turns is not None:
            self.turns.adopt([record for record in records if is_turn(record)])

    def auto(self) -> AutoShare:
        """See `PoolShare`."""
        return self._memory.auto.of(self.number, lambda: self._lead.leads)

    def breakers(self, failures: int, cooldown: float, slow_start: float) -> WorkerBreakers:
        """See `PoolShare`."""
        return WorkerBreakers(
            failures, cooldown, slow_start, *self._memory.breakers.of(self.number), self.number
        )

    def custodian(
        self,
        contract: Contract,
        ledger: Ledger,
        engines: Mapping[str, Engine],
        deadlines: Deadlines,
        observers: Observers,
        now: Callable[[], float],
        clock: Clock,
        hosts: HandleHosts,
    ) -> Custodian:
        """See `PoolShare`."""
        self._custodian = WorkerCustodian(
            contract,
            ledger,
            engines,
            deadlines,
            observers,
            now,
            clock,
            hosts,
            area=self._area,
            pool=self.at,
        )
        return self._custodian
