"""The scheduler process's side of kept turns: what workers tell of them, and what they get.

Owns the turns that each worker got and has not ended. One that ends with its worker is not
released: its prefill engine may still pull.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from pdproxy.deciding.kept_turns import KeptTurns, Reuse, TurnLimits
from pdproxy.deciding.turns import KeptReuse, PoolTurns
from pdproxy.fleet.engine import Engine
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.turn_before import FoundTurn, TurnEnd
from pdproxy.transfer.kept_turn import KeptTurn, TurnRecord
from pdproxy.transfer.turns import DecodeHandle, TurnRules
from pdproxy.workers.calls import told
from pdproxy.workers.records import Area
from pdproxy.workers.scheduler_clients import Holder
from pdproxy.workers.turn_messages import (
    PAST_RUN,
    Dropped,
    Ended,
    Freed,
    Kept,
    News,
    Open,
    TurnLeft,
    TurnsHeld,
    decode_left,
    encode,
)

UNITS = 16_384
"""Units of the area of a pool, 8 MiB. A turn has some hundred bytes, and 6 per block."""


class RecordedTurns(KeptTurns):
    """`KeptTurns` that leave a record of each turn, from which another process can release it.
    `area`: of the records.
    """

    def __init__(
        self,
        area: Area,
        rules: TurnRules,
        limits: TurnLimits,
        engines: Mapping[str, Engine],
        dropped: Callable[[TurnRecord, DecodeHandle, str], None],
        now: Callable[[], float],
    ) -> None:
        super().__init__(rules, limits, engines, dropped, now)
        self._area = area
        self._places: dict[KeptTurn, int | None] = {}

    def add(self, turn: KeptTurn) -> bool:
        """See `KeptTurns`."""
        is_kept = super().add(turn)
        if is_kept:
            self._places[turn] = self._area.put(encode(TurnLeft(turn.record, turn.handle)))
        return is_kept

    def remove(self, turn: KeptTurn) -> None:
        """See `KeptTurns`."""
        super().remove(turn)
        if (place := self._places.pop(turn, None)) is not None:
            self._area.drop(place)


class WorkersTurns:
    """The turns of one pool. `heard`: of each worker, the number of the last thing that was
    heard.
    """

    def __init__(self, turns: PoolTurns, ledger: Ledger, heard: memoryview) -> None:
        self.turns = turns
        self._ledger = ledger
        self._heard = heard

    def __repr__(self) -> str:
        return f"<WorkersTurns {self.turns!r}>"

    def adopt(self, records: list[bytes]) -> None:
        """Release what a scheduler process has kept that was killed."""
        for left in map(decode_left, records):
            self.turns.dropped(self.own(left.record), left.handle, "process_ended")

    def is_new(self, worker: int, number: int) -> bool:
        """Note that something is heard. Return False if it was heard before. It is noted first:
        whoever is killed behind this leaves a turn to its engine's own time, and never releases one
        that is in use.
        """
        if number <= self._heard[worker]:
            return False
        self._heard[worker] = number
        return True

    def own(self, record: TurnRecord) -> TurnRecord:
        """Return a record with this process's numbers of runs."""
        decode, prefill = self._ledger.get(record.decode), self._ledger.get(record.prefill)
        is_over = decode is None or record.decode_run == PAST_RUN
        return msgspec.structs.replace(
            record,
            decode_run=PAST_RUN if decode is None or is_over else decode.run_number,
            prefill_run=0 if prefill is None else prefill.run_number,
        )

    def own_reuse(self, reuse: Reuse) -> Reuse:
        """Return what a worker got of another process, with this one's numbers of runs."""
        prefill = self._ledger.get(reuse.prefill)
        turn = msgspec.structs.replace(reuse.turn, record=self.own(reuse.turn.record))
        run = PAST_RUN if prefill is None else prefill.run_number
        return msgspec.structs.replace(reuse, turn=turn, prefill_run=run)


class TurnsOfWorker(Holder):
    """Those of one worker in a pool."""

    def __init__(self, pool: WorkersTurns) -> None:
        self._pool = pool
        self._given: dict[int, Reuse] = {}
        """By the numbers of leases."""

    def __repr__(self) -> str:
        return f"<TurnsOfWorker {len(self._given)} in use>"

    def __len__(self) -> int:
        return len(self._given)

    def give(self, lease: int, turn: FoundTurn) -> Reuse | None:
        """Take the turn that was found for a choice. Return it as the worker gets it."""
        if not isinstance(turn, KeptReuse) or not turn.take():
            return None
        reuse = self._given[lease] = turn.reuse
        return msgspec.structs.replace(reuse, turn=msgspec.structs.replace(reuse.turn, key=b""))

    def unwanted(self, number: int, *, is_sent: bool) -> None:
        """See `Holder`. A turn that is on its way comes back from there: it is never given back
        twice.
        """
        if not is_sent and (reuse := self._given.pop(number, None)) is not None:
            self._back(reuse)

    def close(self) -> None:
        """See `Holder`."""
        for reuse in self._given.values():
            self._pool.turns.end(reuse, TurnEnd.LEFT)
        self._given.clear()
        self._pool.turns.leave_space(0, self)

    # -- what the worker calls

    @told
    def news(self, worker: int, number: int, news: News) -> None:
        """Process what the worker, with this number, tells. `number`: its own, never used twice."""
        pool = self._pool
        if not pool.is_new(worker, number):
            return
        match news:
            case Kept(turn):
                pool.turns.keep(msgspec.structs.replace(turn, record=pool.own(turn.record)))
            case Dropped(record, handle, reason):
                pool.turns.dropped(pool.own(record), handle, reason)
            case Ended(lease, how):
                self._ended(lease, how)
            case Freed(name, reason):
                pool.turns.freed(name, reason)
            case Open(size):
                pool.turns.leave_space(size, self)

    @told
    def held(self, held: TurnsHeld) -> None:
        """Process what the worker has of a scheduler process that was before."""
        for given in held.given:
            self._given[given.lease] = self._pool.own_reuse(given.reuse)
        for number, news in held.told:
            self.news(held.worker, number, news)
        self._pool.turns.leave_space(held.open, self)

    def _ended(self, lease: int, how: str | None) -> None:
        reuse = self._given.pop(lease, None)
        if reuse is None:
            return
        if how is None:
            self._back(reuse)
        else:
            self._pool.turns.end(reuse, TurnEnd(how))

    def _back(self, reuse: Reuse) -> None:
        if reuse.turn.key:
            self._pool.turns.give_back(reuse)
        else:  # its ids were known to the scheduler process before
            self._pool.turns.end(reuse, TurnEnd.UNUSED)
