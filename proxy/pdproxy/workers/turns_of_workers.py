"""The scheduler process's side of kept turns: what workers tell of them, and what they get.

Owns the turns that each worker got and has not ended. One that ends with its worker is not
released: its prefill engine may still pull.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pdproxy.deciding.kept_turns import KeptTurns, Reuse, TurnLimits
from pdproxy.deciding.turns import KeptReuse, PoolTurns
from pdproxy.fleet.engine import Engine
from pdproxy.scheduling.leases import Assignment
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.turn_before import TurnEnd
from pdproxy.transfer.kept_turn import KeptTurn, TurnRecord
from pdproxy.transfer.turns import DecodeHandle, TurnRules
from pdproxy.workers.records import Area
from pdproxy.workers.turn_messages import (
    PAST_RUN,
    Dropped,
    Ended,
    Freed,
    Kept,
    Open,
    TurnLeft,
    decode_held,
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


class TurnsOfWorker:
    """Those of one worker. `of`: returns the turns of the pool with a number, None if none are kept
    there.
    """

    def __init__(self, of: Callable[[int], WorkersTurns | None]) -> None:
        self._of = of
        self._given: dict[int, tuple[WorkersTurns, Reuse]] = {}
        self._do: dict[type, Callable[[WorkersTurns, Any], None]] = {
            Kept: self._kept,
            Dropped: self._dropped,
            Ended: self._ended,
            Freed: lambda pool, news: pool.turns.freed(news.name, news.reason),
            Open: lambda pool, news: pool.turns.leave_space(news.size, self),
        }
        self._pools: set[WorkersTurns] = set()
        """Those of which it has told something."""

    def __repr__(self) -> str:
        return f"<TurnsOfWorker {len(self._given)} in use>"

    def give(self, lease: int, turns: WorkersTurns | None, found: Assignment) -> Reuse | None:
        """Take the turn that was found for a choice. Return it as the worker gets it."""
        turn = found.turn
        if turns is None or not isinstance(turn, KeptReuse) or not turn.take():
            return None
        reuse = turn.reuse
        self._given[lease] = turns, reuse
        return msgspec.structs.replace(reuse, turn=msgspec.structs.replace(reuse.turn, key=b""))

    def back(self, lease: int) -> None:
        """Keep the turn again that was taken with a lease, if any was: the worker is not told."""
        if (given := self._given.pop(lease, None)) is not None:
            self._back(*given)

    def told(self, pool: int, worker: int, number: int, news: object) -> None:
        """Process what the worker tells."""
        turns = self._of(pool)
        if turns is not None and turns.is_new(worker, number):
            self._pools.add(turns)
            self._do[type(news)](turns, news)

    def held(self, pool: int, body: bytes) -> None:
        """Process what the worker has of a scheduler process that was before."""
        held, turns = decode_held(body), self._of(pool)
        if turns is None:
            return
        for given in held.given:
            self._given[given.lease] = turns, turns.own_reuse(given.reuse)
        for number, news in held.told:
            self.told(pool, held.worker, number, news)
        self._pools.add(turns)
        turns.turns.leave_space(held.open, self)

    def close(self) -> None:
        """The worker has ended."""
        for turns, reuse in self._given.values():
            turns.turns.end(reuse, TurnEnd.LEFT)
        self._given.clear()
        for pool in self._pools:
            pool.turns.leave_space(0, self)

    @staticmethod
    def _kept(pool: WorkersTurns, news: Kept) -> None:
        turn = news.turn
        pool.turns.keep(msgspec.structs.replace(turn, record=pool.own(turn.record)))

    @staticmethod
    def _dropped(pool: WorkersTurns, news: Dropped) -> None:
        pool.turns.dropped(pool.own(news.record), news.handle, news.reason)

    def _ended(self, _: WorkersTurns, news: Ended) -> None:
        given = self._given.pop(news.lease, None)
        if given is None:
            return
        if news.how is None:
            self._back(*given)
        else:
            turns, reuse = given
            turns.turns.end(reuse, TurnEnd(news.how))

    @staticmethod
    def _back(pool: WorkersTurns, reuse: Reuse) -> None:
        if reuse.turn.key:
            pool.turns.give_back(reuse)
        else:  # its ids were known to the scheduler process before
            pool.turns.end(reuse, TurnEnd.UNUSED)
