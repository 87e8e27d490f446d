"""Finished turns of a worker, in one pool: the scheduler process keeps and releases them all, and a
prompt gets the turn that it continues with its engines.

Owns what the scheduler process may not have heard: a killed one leaves in shared memory how much it
has, and its successor is told the rest. So no turn is lost with a scheduler process, and none is
told twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from pdproxy.deciding.kept_turns import Reuse
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.scheduling.turn_before import TurnEnd
from pdproxy.transfer.kept_turn import KeptTurn, TurnRecord
from pdproxy.transfer.turns import DecodeHandle
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.turn_messages import (
    LARGEST,
    PAST_RUN,
    Dropped,
    Ended,
    Freed,
    Given,
    Kept,
    News,
    Open,
    TurnsHeld,
)
from pdproxy.workers.turns_of_workers import TurnsOfWorker
from pdproxy.workers.worker_choices import Chosen

MAX_UNHEARD = 4096
"""What is kept for the next scheduler process. If there is more, the oldest turns are left to their
engines' own time.
"""
STEP = 1 << 20
"""Bytes of open turns by which their number must change before the scheduler process is told."""


class RemoteTurns:
    """A `serving.kv.open_turns.TurnKeeper` of the pool with number `pool`.

    `worker`: this one's number; `heard`: of each worker, the number of the last thing that a
    scheduler process has heard; `first`: the number of the first one; `seconds`: how long after its
    receipt a handle may be used.
    """

    def __init__(
        self,
        link: SchedulerLink,
        pool: int,
        engines: EngineRegistry,
        worker: int,
        heard: memoryview,
        first: int,
        seconds: float,
        now: Callable[[], float],
    ) -> None:
        self._link = link
        self._pool = pool
        self._engines = engines
        self._worker = worker
        self._heard = heard
        self._next = first
        self.seconds = seconds
        self.now = now
        self._unheard: deque[tuple[int, News]] = deque()
        self._given: dict[int, Reuse] = {}
        """By lease, until the scheduler process has heard what came of it."""
        self._size = self._size_told = 0
        link.begins.append(self._begin)

    def __repr__(self) -> str:
        return f"<RemoteTurns of pool {self._pool}, {len(self._given)} in use>"

    # -- as a keeper

    def keep(self, turn: KeptTurn) -> None:
        """See `TurnKeeper`."""
        if turn.size > LARGEST:
            self.dropped(turn.record, turn.handle, "too_long")
        else:
            record = self._told(turn.record)
            self._tell(Kept(msgspec.structs.replace(turn, record=record)))

    def dropped(self, record: TurnRecord, handle: DecodeHandle | None, reason: str) -> None:
        """See `TurnKeeper`."""
        self._tell(Dropped(self._told(record), handle, reason))

    def freed(self, name: str, reason: str) -> None:
        """See `TurnKeeper`."""
        self._tell(Freed(name, reason))

    def leave_space(self, size: int) -> None:
        """See `TurnKeeper`."""
        self._size = size
        if abs(size - self._size_told) >= STEP:
            self._size_told = size
            self._tell(Open(size))

    def _told(self, record: TurnRecord) -> TurnRecord:
        """Return a record as it is sent: with no numbers of runs, but whether its decode engine's
        is over.
        """
        run = 0 if self.run_of(record.decode) == record.decode_run else PAST_RUN
        return msgspec.structs.replace(record, decode_run=run, prefill_run=0, prompt=None)

    # -- turns that it gets

    def noted_by(self, lease: int) -> tuple[Callable[[Chosen], None], Callable[[], None]]:
        """Return what notes the turn that comes with the lease of this number, and what gives that
        turn back.
        """

        def arrived(chosen: Chosen) -> None:
            if chosen.turn is not None:
                self._given[lease] = chosen.turn

        def vain() -> None:
            if lease in self._given:
                self.ended(lease, None)

        return arrived, vain

    def ended(self, lease: int, how: str | None) -> None:
        """Tell what came of it: the value of a `TurnEnd`, None: it was not taken."""
        self._tell(Ended(lease, how))

    def run_of(self, url: str) -> int | None:
        """Return the number of an engine's run, None if there is no such engine."""
        engine = self._engines.get(url)
        return None if engine is None else engine.in_ledger.run_number

    # -- the scheduler process

    def _tell(self, news: News) -> None:
        self._forget_heard()
        number, self._next = self._next, self._next + 1
        self._unheard.append((number, news))
        if len(self._unheard) > MAX_UNHEARD:
            self._forget()
        self._link.tell(TurnsOfWorker.news, self._pool, self._worker, number, news)

    def _forget_heard(self) -> None:
        heard = self._heard[self._worker]
        while self._unheard and self._unheard[0][0] <= heard:
            self._forget()

    def _forget(self) -> None:
        _, news = self._unheard.popleft()
        if isinstance(news, Ended):
            self._given.pop(news.lease, None)

    def _begin(self) -> None:
        """Tell a new scheduler process what there is. The one before hears nothing any more."""
        self._forget_heard()
        self._size_told = self._size
        given = [Given(lease, reuse) for lease, reuse in self._given.items()]
        held = TurnsHeld(given, list(self._unheard), self._worker, self._size)
        self._link.tell(TurnsOfWorker.held, self._pool, held)


class RemoteTurn:
    """A `scheduling.turn_before.FoundTurn` that the scheduler process has taken for this worker."""

    __slots__ = ("_lease", "_reuse", "_run", "_turns", "_was_taken")

    def __init__(self, turns: RemoteTurns, lease: int, reuse: Reuse) -> None:
        self._turns = turns
        self._lease = lease
        self._reuse = reuse
        self._run = turns.run_of(self.decode)
        self._was_taken = False

    def __repr__(self) -> str:
        return f"<RemoteTurn of {self.decode}, {self.tokens} tokens>"

    @property
    def decode(self) -> str:
        """See `FoundTurn`."""
        return self._reuse.turn.record.decode

    @property
    def params(self) -> bytes:
        """See `FoundTurn`."""
        return self._reuse.params

    @property
    def tokens(self) -> int:
        """See `FoundTurn`."""
        return self._reuse.tokens

    def take(self) -> bool:
        """See `FoundTurn`."""
        self._was_taken = True
        return True

    def is_there(self) -> bool:
        """See `FoundTurn`."""
        turns = self._turns
        fresh = self._reuse.turn.received > turns.now() - turns.seconds
        return fresh and self._run is not None and self._run == turns.run_of(self.decode)

    def end(self, how: TurnEnd) -> None:
        """See `FoundTurn`."""
        self._turns.ended(self._lease, how.value)

    def over(self) -> None:
        """Its lease ends: give it back if it was not taken."""
        if not self._was_taken:
            self._was_taken = True
            self._turns.ended(self._lease, None)
