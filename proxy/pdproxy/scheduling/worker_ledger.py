"""A ledger that chooses by the load of all workers: each has its own leases, and adds those of the
others to each engine's load.

Owns this worker's column of the table of loads. What a worker notes of an engine's health it tells,
so that all can note it (`fleet.findings`). The table shows a lease at once, and a worker reads
those of the others when it chooses, but not again within `READ_EVERY`: two workers that choose
within this time may choose the same engine. A request lasts a thousand times as long, so an engine
gets few requests too many.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from pdproxy.kit import shared_sums
from pdproxy.kit.shared_sums import Move, OtherSums
from pdproxy.kit.shared_table import Column, Others, key_of
from pdproxy.scheduling.leases import Assignment, Lease, Verdict
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import SIZE_BITS, EngineSpec, Evidence, LedgerEngine, Role
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.worker_breakers import WorkerBreakers

MEASURES = shared_sums.MEASURES
"""Numbers of the table for each engine: requests and prompt bytes as one, so that one store shows
both (`SIZE_BITS`).
"""
_ONE, _HALF = 1 << SIZE_BITS, 1 << SIZE_BITS - 1
READ_EVERY = 0.001
"""Seconds. A worker with much to do begins several requests within them."""


# For each request: a method of the base class as a function of this module takes half the time of
# `super()`.
_assign, _open, _close = Ledger.assign, Ledger._open, Ledger.close  # noqa: SLF001


class LedgerShare(NamedTuple):
    """What a worker's ledger shares. `column`: its own part of the table of loads; `others`: those
    of the others.

    `breakers`: makes its breakers, of failures in a row, cooldown and slow start.
    """

    column: Column
    others: Others
    breakers: Callable[[int, float, float], WorkerBreakers]


class WorkerLedger(Ledger):
    """A `Ledger` of one of several workers. `tell`: called with an engine's URL when something of
    its health was noted here.
    """

    def __init__(
        self, specs: Iterable[EngineSpec], options: LedgerOptions, share: LedgerShare
    ) -> None:
        column, others, breakers = share
        super().__init__([], options, breakers=breakers)
        self.breakers: WorkerBreakers
        self.tell: Callable[[str], None] = lambda _: None
        self.breakers.tell = partial(shared_sums.note, column)
        self._column = column
        self._rows = column.cells.rows
        """This worker's own loads, by the slots of engines."""
        self._slots: dict[str, int] = {}
        """By the URL of each engine that is in the ledger, or has leases of this worker."""
        self._many = False
        """Whether the others must be told which loads have changed."""
        self._unsettled: set[str] = set()
        """Those of them that were removed, or for which there was no space."""
        self._others = OtherSums(others, self.breakers.look)
        self._look = self._others.look
        self._read_next = -math.inf
        """When a choice reads again, in the time of requests."""
        for spec in specs:
            self.add(spec)

    def refresh(self, *, all_of_it: bool = False) -> None:
        """Take over what other workers have leased and given back. `all_of_it`: also what nobody
        has said to be changed.
        """
        self._others.look(all_of_it=all_of_it)
        if all_of_it:
            self.breakers.look(all_of_it=True)
            for url in [*self._unsettled]:
                self._settle(url)

    def add(self, spec: EngineSpec) -> LedgerEngine:
        """See `Ledger`."""
        engine = super().add(spec)
        self.breakers.add(engine)
        self._find_slot(engine)
        self._look()
        self._others.follow(key_of(spec.url), self._mover(engine))
        return engine

    def remove(self, url: str) -> None:
        """See `Ledger`. What is left of the engine's load is this worker's own."""
        engine = self._engines[url]
        self.breakers.drop(engine)  # the others remove it by themselves
        super().remove(url)
        self._others.follow(key_of(url), None)
        self._mover(engine)(-engine.shared)
        self._unsettled.add(url)
        self._settle(url)

    # -- what is noted of an engine's health

    @contextlib.contextmanager
    def following(self, engine: LedgerEngine) -> Iterator[None]:
        """Note what another worker has found of an engine: its breaker is as that worker has made
        it, and nobody is told.
        """
        tell, self.tell = self.tell, lambda _: None
        self.breakers.follows = True
        try:
            self.breakers.read(engine)
            yield
        finally:
            self.tell, self.breakers.follows = tell, False

    def mark_up(self, url: str, evidence: Evidence) -> bool:
        """See `Ledger`."""
        if new := super().mark_up(url, evidence):
            self.tell(url)
        return new

    def mark_down(self, url: str, reason: str, now: float) -> bool:
        """See `Ledger`."""
        engine = self._engines.get(url)
        before = None if engine is None else (engine.probed, engine.down_because)
        was_up = super().mark_down(url, reason, now)
        if engine is not None and before != (engine.probed, engine.down_because):
            self.tell(url)
        return was_up

    def lost_model(self, url: str, model: str) -> bool:
        """See `Ledger`."""
        if lost := super().lost_model(url, model):
            self.tell(url)
        return lost

    def mark_stalled(self, url: str, why: str) -> bool:
        """See `Ledger`."""
        if new := super().mark_stalled(url, why):
            self.tell(url)
        return new

    def let_in(self, url: str, now: float) -> bool:
        """See `Ledger`."""
        if new := super().let_in(url, now):
            self.tell(url)
        return new

    def exclude(self, url: str, why: str, until: float, now: float) -> bool:
        """See `Ledger`."""
        if new := super().exclude(url, why, until, now):
            self.tell(url)
        return new

    def eject(self, prefill: str, decode: str) -> None:
        """See `Ledger`."""
        super().eject(prefill, decode)
        self.tell(decode)

    # -- what a request asks

    def assign(
        self, roles: Sequence[Role], ask: Ask, *, without: Collection[str] = ()
    ) -> Assignment | None:
        """See `Ledger`."""
        if ask.now >= self._read_next:
            self._read_next = ask.now + READ_EVERY
            self._look()
        return _assign(self, roles, ask, without=without)

    def assign_alone(self, ask: Ask, *, without: Collection[str] = ()) -> Lease | None:
        """See `Ledger`."""
        self._read(ask)
        return super().assign_alone(ask, without=without)

    def place(
        self, ask: Ask, *, split: bool, without: Collection[str] = (), avoid: Collection[str] = ()
    ) -> Assignment | None:
        """See `Ledger`."""
        self._read(ask)
        return super().place(ask, split=split, without=without, avoid=avoid)

    def close(self, lease: Lease, verdict: Verdict, now: float, tokens: int | None = None) -> bool:
        """See `Ledger`."""
        if not lease.closed:
            self._rows[lease.engine.slot] -= _ONE + lease.prompt_bytes
            if self._many:
                shared_sums.note(self._column, lease.engine.slot)
        return _close(self, lease, verdict, now, tokens)

    def _open(self, engine: LedgerEngine, role: Role, prompt_bytes: int, ask: Ask) -> Lease:
        self._rows[engine.slot] += _ONE + prompt_bytes
        if self._many:
            shared_sums.note(self._column, engine.slot)
        return _open(self, engine, role, prompt_bytes, ask)

    def _read(self, ask: Ask) -> None:
        if ask.now >= self._read_next:
            self._read_next = ask.now + READ_EVERY
            self._look()

    # -- this worker's own loads, and those of others

    def _find_slot(self, engine: LedgerEngine) -> None:
        """Show an engine's load, once there is space for it."""
        url, spare = engine.url, self._column.spare
        # that of an engine that was removed, and is back, while it has leases
        slot = self._slots.get(url, spare)
        if slot == spare and (slot := self._column.place(key_of(url))) != spare:
            requests, size = engine.known_load
            self._rows[slot] = (requests << SIZE_BITS) + size - engine.shared
            self._many = self._many or shared_sums.are_many(slot)
            shared_sums.note(self._column, slot)
        if slot == spare:
            self._unsettled.add(url)
        self._slots[url] = engine.slot = slot

    def _settle(self, url: str) -> None:
        """Forget an engine that was removed, once it has no leases. Look for space for one that has
        none.
        """
        engine, slot = self._engines.get(url), self._slots[url]
        if engine is not None:
            self._unsettled.discard(url)
            self._find_slot(engine)
        elif slot == self._column.spare or not self._rows[slot]:
            self._unsettled.discard(url)
            self._column.drop(key_of(url))
            del self._slots[url]

    def _mover(self, engine: LedgerEngine) -> Move:
        """Return what has an engine's load hold more of other workers', as one number."""
        interested, uses = self._interested, engine.uses

        def move(more: int) -> None:
            requests = more + _HALF >> SIZE_BITS
            engine.requests += requests
            engine.prompt_bytes += more - (requests << SIZE_BITS)
            engine.shared += more
            for policy in interested[uses]:
                policy.load_changed(engine)

        return move
