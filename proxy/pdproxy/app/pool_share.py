"""What several workers share of one pool: memory of its own, and what one worker does with that."""

from __future__ import annotations

from collections.abc import Callable
from socket import socket

from pdproxy.app.shared_capacity import SharedPoolCapacity
from pdproxy.app.siblings import Siblings
from pdproxy.app.sockets import BoundBefore
from pdproxy.fleet import shared_audit, shared_signs
from pdproxy.kit.leading import Leading
from pdproxy.kit.shared_records import Area, SharedRecords
from pdproxy.kit.shared_table import SharedTable
from pdproxy.scheduling import shared_breakers, shared_ledger, shared_windows
from pdproxy.scheduling.auto.workers import AutoMemory, AutoShare, WorkerAuto
from pdproxy.scheduling.shared_breakers import SharedBreakers
from pdproxy.scheduling.shared_ledger import SharedLedger
from pdproxy.serving.kv import shared_buffers, shared_turns
from pdproxy.serving.kv.shared_custodian import SharedCustodian
from pdproxy.serving.kv.shared_turns import SharedTurns
from pdproxy.serving.kv.turn_messages import is_turn

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
        self.memory = memory
        self.number = number
        self.at = at
        self.area = area
        self._lead = lead
        self._now = now
        self.siblings = siblings
        self.sockets = BoundBefore(memory.listeners)
        self.ledger: SharedLedger | None = None
        """This and the next three are set by whoever makes them: they follow the other workers."""
        self.custodian: SharedCustodian | None = None
        self.capacity: SharedPoolCapacity | None = None
        self.turns: SharedTurns | None = None

    def __repr__(self) -> str:
        return f"<PoolShare of pool {self.at}, worker {self.number}>"

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
        """Become responsible for the KV of a worker that has ended which engines of this pool hold."""
        if self.custodian is not None:
            self.custodian.adopt([record for record in records if not is_turn(record)])
        if self.turns is not None:
            self.turns.adopt([record for record in records if is_turn(record)])

    def auto(self) -> AutoShare:
        """Return what the worker's placement `auto` shares with the others'."""
        return self.memory.auto.of(self.number, lambda: self._lead.leads)

    def breakers(self, failures: int, cooldown: float, slow_start: float) -> SharedBreakers:
        """Return the breakers of all workers."""
        return SharedBreakers(failures, cooldown, slow_start, *self.memory.breakers.of(self.number), self.number)
