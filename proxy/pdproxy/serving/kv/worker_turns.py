"""Turns of one of several workers: each finished turn is known to all, and kept by the worker that
served it.

A worker whose prompt continues another one's turn asks that worker for it, which gives it away
once. Nobody waits for one that does not answer: the prompt is prefilled without. What a killed
worker kept is in memory that outlives it, and is released.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import msgspec

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.handle_hosts import HandleHosts
from pdproxy.kit.clock import Clock
from pdproxy.kit.records import Records
from pdproxy.kit.siblings import ALL
from pdproxy.observe.description import Label, counter
from pdproxy.observe.events import Observers, TurnClaimed
from pdproxy.scheduling.engine_states import EngineStates
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.serving.kv.kept_turns import KeptTurn, Reuse, TurnLimits, TurnRecord
from pdproxy.serving.kv.turn_messages import (
    Began,
    Claim,
    ClaimAnswer,
    Gone,
    Hung,
    KeptMessage,
    TurnLeft,
    decode,
    encode,
    left_in,
    record_of,
)
from pdproxy.serving.kv.turns import PoolTurns
from pdproxy.settings.limits import Deadlines
from pdproxy.transfer.turns import TurnRules

UNITS = 8192
"""Units of a worker's area, 4 MiB. A turn has some hundred bytes, and 6 per block."""
PATIENCE = 0.05
"""Seconds for the answer of the worker that keeps a turn, and a tick of the clock."""
CLAIMS = 2
"""Workers that are asked for one prompt, if a turn is gone."""
SILENT = 1.0
"""Seconds for which one that has not answered is asked no more: it may have ended, or be
stopped.
"""
LARGEST = 1 << 20
"""Bytes of ids and handle: larger turns are used by their own worker only."""
TOLD_AGAIN = 4 << 20
"""Bytes of turns that a worker which has just started learns from each other one: the newest."""
MAX_LATE = 256
"""Questions without an answer that are remembered: what is still given then is released."""
TURN_CLAIMS = counter(
    "pdproxy_turn_claims_total",
    "turns",
    "Questions of one worker to another for a turn that it keeps",
    Label(
        "result",
        (
            ("given", "the prompt uses it"),
            ("gone", "it was used or dropped meanwhile"),
            ("late", "the worker did not answer in time: it has ended, or is stopped"),
        ),
    ),
    of=TurnClaimed,
)


class OtherWorkers(Protocol):
    """The other workers. See `kit.siblings`."""

    hears: dict[str, Callable[[bytes], None]]
    is_behind: Callable[[], bool]

    def pass_on(self, worker: int, topic: str, body: bytes) -> bool:
        """Tell one worker something, or all. Return whether it was sent."""


class WorkerTurns(PoolTurns):
    """`PoolTurns` of worker `number`, in pool `pool`. `area`: for the records of what it keeps;
    `siblings`: the other workers.
    """

    def __init__(
        self,
        rules: TurnRules,
        limits: TurnLimits,
        states: EngineStates,
        engines: EngineRegistry,
        deadlines: Deadlines,
        observers: Observers,
        clock: Clock,
        *,
        by_notice: bool,
        hosts: HandleHosts,
        number: int,
        pool: int,
        area: Records,
        siblings: OtherWorkers,
    ) -> None:
        super().__init__(
            rules,
            limits,
            states,
            engines,
            deadlines,
            observers,
            clock,
            by_notice=by_notice,
            hosts=hosts,
        )
        self._number = number
        self._pool = pool
        self._area = area
        self._siblings = siblings
        self._topic = f"turns {pool}"
        self._own: dict[int, KeptTurn] = {}
        self._noted: dict[KeptTurn, tuple[int, int | None]] = {}
        """Of these, the number and the place of the record."""
        self._copies: dict[tuple[int, int], KeptTurn] = {}
        """What others keep, by worker and number."""
        self._silent_workers: dict[int, float] = {}
        """Workers that have not answered, and until when they are asked no more."""
        self._last = int.from_bytes(os.urandom(6))
        """The number of the last question. An answer to the process that had this worker's number
        before has another one.
        """
        self._claims: dict[int, tuple[asyncio.Future[bool], KeptTurn]] = {}
        """Questions whose tasks wait: whether the turn is given, and the turn."""
        self._late: OrderedDict[int, KeptTurn] = OrderedDict()
        self.kept.removed = self._removed
        siblings.hears[self._topic] = self.received

    def start(self) -> None:
        """Ask the others for what they keep."""
        self._tell(Began(self._number))

    # -- using one

    async def take(self, key: bytes, prefill: LedgerEngine) -> Reuse | None:
        """See `PoolTurns`."""
        for _ in range(CLAIMS):
            now = self._now()
            found = self._find(
                key, prefill, [one for one, until in self._silent_workers.items() if until > now]
            )
            if found is None:
                return None
            self.kept.remove(found.turn)
            if found.turn.owner is None:
                return found
            result = await self._claimed(found.turn, found.turn.owner)
            self._observers.notify(TurnClaimed(result))
            if result != "gone":
                return found if result == "given" else None
        return None

    async def _claimed(self, turn: KeptTurn, owner: int) -> str:
        """Ask a worker for a turn that it keeps. Return given, gone or late."""
        self._last += 1
        claim = self._last
        answer = asyncio.get_running_loop().create_future()
        self._claims[claim] = answer, turn
        self._siblings.pass_on(owner, self._topic, encode(Claim(self._number, claim, turn.number)))
        try:
            with self._clock.within(PATIENCE):
                return "given" if await answer else "gone"
        except TimeoutError:
            self._give_up(claim)
            self._silent_workers[owner] = self._now() + SILENT
            return "late"
        except asyncio.CancelledError:
            self._give_up(claim)
            raise
        finally:
            self._claims.pop(claim, None)

    def _give_up(self, claim: int) -> None:
        if claim not in self._claims:  # the answer came behind the cancellation, and before this
            return
        answer, turn = self._claims[claim]
        if not answer.done() or answer.cancelled():
            self._late[claim] = msgspec.structs.replace(turn, key=b"")
            if len(self._late) > MAX_LATE:
                self._late.popitem(last=False)
        elif answer.result():
            self._dropped(turn.record, turn.handle, "unused")

    def hung(self, reuse: Reuse) -> None:
        """See `PoolTurns`."""
        super().hung(reuse)
        self._tell(Hung(self._number, reuse.prefill))

    # -- what others are told

    def _added(self, turn: KeptTurn) -> None:
        super()._added(turn)
        if turn not in self.kept:
            return
        # Not the next of a row: a worker that is started again has the number of the one before,
        # and must not give another turn.
        number = int.from_bytes(os.urandom(7))
        place = self._area.put(record_of(TurnLeft(self._pool, turn.record, turn.handle)))
        self._own[number] = turn
        self._noted[turn] = number, place
        if turn.size <= LARGEST:
            self._tell(self._message(number, turn))

    def _removed(self, turn: KeptTurn) -> None:
        if turn.owner is not None:
            self._copies.pop((turn.owner, turn.number), None)
        elif (noted := self._noted.pop(turn, None)) is not None:
            number, place = noted
            del self._own[number]
            if place is not None:
                self._area.drop(place)
            self._tell(Gone(self._number, number))

    def _message(self, number: int, turn: KeptTurn) -> KeptMessage:
        return KeptMessage(
            self._number, number, turn.record, turn.handle, turn.key, turn.known, turn.received
        )

    def _tell(self, message: msgspec.Struct) -> None:
        """Tell all others. What is lost costs a prompt a question in vain, or the use of a turn."""
        self._siblings.pass_on(ALL, self._topic, encode(message))

    # -- what others tell

    def received(self, body: bytes) -> None:
        """Process what a worker tells."""
        message = decode(body)
        if isinstance(message, ClaimAnswer):
            self._answered(message)
        elif message.worker == self._number:
            return  # all hear what is told to all
        elif isinstance(message, KeptMessage):
            self._learn(message)
        elif isinstance(message, Gone):
            if (turn := self._copies.get((message.worker, message.number))) is not None:
                self.kept.remove(turn)
        elif isinstance(message, Claim):
            self._answer(message)
        elif isinstance(message, Hung):
            if (engine := self._engines.get(message.prefill)) is not None:
                self._never_answers(engine.in_ledger.run_number, engine.url)
        else:
            self._began(message.worker)

    def _learn(self, message: KeptMessage) -> None:
        record = self._with_own_runs(message.record)
        if record is None:
            return
        place = message.worker, message.number
        if place in self._copies:  # it was told again
            return
        turn = KeptTurn(
            record, message.handle, message.key, message.known, message.received, *place
        )
        self._copies[place] = turn
        if not self.kept.add(turn):
            del self._copies[place]

    def _answer(self, message: Claim) -> None:
        """Give a turn away, if it is here and its engine's run goes on. Without space for the
        answer nothing is given.
        """
        if self._siblings.is_behind():
            return
        self.kept.sweep()
        turn = self._own.get(message.number)
        engine = None if turn is None else self._engines.get(turn.record.decode)
        given = (
            turn is not None
            and engine is not None
            and engine.in_ledger.run_number == turn.record.decode_run
        )
        if turn is not None and given:
            self.kept.remove(turn)  # with its record, before anybody else may use it
        elif turn is not None:
            self.kept.drop(turn, "restarted")
        self._siblings.pass_on(
            message.worker, self._topic, encode(ClaimAnswer(message.claim, given))
        )

    def _answered(self, message: ClaimAnswer) -> None:
        waiting = self._claims.get(message.claim)
        if waiting is None:
            turn = self._late.pop(message.claim, None)
        elif waiting[0].cancelled():  # its task will hear that in the next pass of the event loop
            del self._claims[message.claim]
            turn = waiting[1]
        else:
            waiting[0].set_result(message.given)
            return
        if turn is not None and message.given:
            self._dropped(turn.record, turn.handle, "unused")

    def _began(self, worker: int) -> None:
        """A worker has started: forget what its predecessor kept, and tell it what is here."""
        for copy in [one for (owner, _), one in self._copies.items() if owner == worker]:
            self.kept.remove(copy)
        size = 0
        for number, turn in reversed(self._own.items()):
            size += turn.size
            if size > TOLD_AGAIN:
                return
            if turn.size <= LARGEST:
                self._siblings.pass_on(worker, self._topic, encode(self._message(number, turn)))

    def adopt(self, records: list[bytes]) -> None:
        """Release what a worker has kept that has ended, in this pool."""
        for left in map(left_in, records):
            record = self._with_own_runs(left.record) if left.pool == self._pool else None
            if record is not None:
                self._dropped(record, left.handle, "worker_ended")

    def _with_own_runs(self, record: TurnRecord) -> TurnRecord | None:
        """Return another worker's record with the numbers of engines' runs here, None if its decode
        engine is not known.
        """
        decode, prefill = self._engines.get(record.decode), self._engines.get(record.prefill)
        if decode is None:
            return None
        run = 0 if prefill is None else prefill.in_ledger.run_number
        return msgspec.structs.replace(
            record, decode_run=decode.in_ledger.run_number, prefill_run=run
        )
