"""What is lost under requests of a worker, and who of them is tried again: each question is a
message to the scheduler process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.errors import EnginesLostError
from pdproxy.scheduling.leases import Lease
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.scheduling.losses import Fingerprint, KnownSuspects, RequestAtRisk
from pdproxy.workers.loss_messages import (
    Answered,
    AskChange,
    AskForbidden,
    AskJudge,
    AskSlot,
    AskTurn,
    Broke,
    HeldSlots,
    Judgement,
    Known,
    Left,
    Over,
    Question,
    Sender,
    SlotOver,
    Told,
    TurnAnswer,
    TurnOver,
    decoded,
    encode,
    topic,
)
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_messages import Asked, Replied


class RemoteLosses:
    """The `scheduling.losses.Losses` of the pool with this number. Owns the slots of its
    requests.
    """

    def __init__(
        self, link: SchedulerLink, pool: int, engines: EngineRegistry, now: Callable[[], float]
    ) -> None:
        self._link = link
        self._topic = topic(pool)
        self._engines = engines
        self._now = now
        self.known = KnownSuspects()
        """As the scheduler process has told them last."""
        self._slots: set[int] = set()
        link.hears[self._topic] = self._hear
        link.holds[self._topic] = lambda: encode(HeldSlots([*self._slots]))

    def __repr__(self) -> str:
        return f"<RemoteLosses {self._topic}, {len(self._slots)} slots>"

    def _hear(self, body: bytes) -> None:
        told, known = decoded(body, Known), self.known
        known.fingerprints, known.clients = frozenset(told.fingerprints), frozenset(told.clients)
        known.remembers = bool(told.fingerprints or told.clients)

    def tell(self, item: Told) -> None:
        """Tell the scheduler process something."""
        self._link.say(self._topic, encode(item))

    async def _ask(self, item: Question, number: int | None = None) -> bytes:
        """Return the answer to a question. Raises OverloadedError without a scheduler process."""
        number = self._link.numbers(1) if number is None else number
        found = await self._link.ask(Asked(number, self._topic, encode(item)), 1)
        assert isinstance(found, Replied)
        return found.body

    def _sender(self, sender: RequestAtRisk) -> Sender:
        if not sender.lost:
            sender.lost.append(_LostUnder(self, self._link.numbers(1)))
        lost = sender.lost[0]
        assert isinstance(lost, _LostUnder)
        return Sender(lost.number, sender.request_id, sender.client, lost.engines)

    # -- tried again

    async def slot(self, sender: RequestAtRisk) -> _Slot | None:
        """See `deciding.retry_slots`. Raises OverloadedError without a scheduler process."""
        number = self._link.numbers(1)
        try:
            item = AskSlot(self._sender(sender) if sender.lost else None)
            if not decoded(await self._ask(item, number), bool):
                return None
        except asyncio.CancelledError:
            self.tell(SlotOver(number, lost=False))  # it may be on its way
            raise
        self._slots.add(number)
        return _Slot(self, number)

    def end(self, number: int, *, lost: bool) -> None:
        """End a slot."""
        self._slots.discard(number)
        self.tell(SlotOver(number, lost))

    async def engines_change(self, model: str | None, until: float) -> bool:
        """See `deciding.comebacks`. Raises OverloadedError without a scheduler process."""
        return decoded(await self._ask(AskChange(model, until)), bool)

    # -- what is lost

    async def turn(
        self, sender: RequestAtRisk, fingerprint: Fingerprint, seconds: float
    ) -> _Turn | None:
        """See `Losses`. Raises OverloadedError without a scheduler process."""
        number = self._link.numbers(1)
        try:
            item = AskTurn(self._sender(sender), fingerprint, seconds)
            answer = decoded(await self._ask(item, number), TurnAnswer)
        except asyncio.CancelledError:
            self.tell(TurnOver(number, harmless=False))
            raise
        if answer.refusal is not None:
            raise answer.refusal.error
        return _Turn(self, number) if answer.is_given else None

    def broke(
        self, sender: RequestAtRisk, engine: LedgerEngine, since: float, *, streamed: bool
    ) -> bool:
        """See `Losses`."""
        known = self._engines.get(engine.url)
        if known is None or known.in_ledger is not engine or engine.draining is not None:
            return False
        self.tell(Broke(self._sender(sender), engine.url, since, self._now(), streamed))
        return True

    def left(
        self, sender: RequestAtRisk, leases: Iterable[Lease], fingerprint: Fingerprint
    ) -> None:
        """See `Losses`."""
        legs = [(one.engine.url, one.since) for one in leases]
        self.tell(Left(self._sender(sender), legs, fingerprint))

    async def judge(
        self, sender: RequestAtRisk, fingerprint: Fingerprint | None, *, looks_back: bool = False
    ) -> EnginesLostError | None:
        """See `Losses`. Raises OverloadedError without a scheduler process."""
        item = AskJudge(self._sender(sender), fingerprint, looks_back)
        judged = decoded(await self._ask(item), Judgement)
        lost = sender.lost[0]
        assert isinstance(lost, _LostUnder)
        lost.engines = max(lost.engines, judged.lost)
        return None if judged.refusal is None else judged.refusal.error

    async def forbidden(self, sender: RequestAtRisk) -> Sequence[str]:
        """See `Losses`. Raises OverloadedError without a scheduler process."""
        return decoded(await self._ask(AskForbidden(self._sender(sender))), list[str])

    def answered(
        self, client: bytes | str, fingerprint: Fingerprint | None, *, whole: bool
    ) -> None:
        """See `Losses`."""
        self.tell(Answered(client, fingerprint, whole))


class _LostUnder:
    """Says that its request is over once nothing refers to it."""

    __slots__ = ("_losses", "engines", "number")

    def __init__(self, losses: RemoteLosses, number: int) -> None:
        self._losses = losses
        self.number = number
        self.engines = 0

    def __del__(self) -> None:
        self._losses.tell(Over(self.number))

    @property
    def some(self) -> bool:
        """See `LostUnder`."""
        return self.engines > 0


class _Slot:
    """A `scheduling.losses.Slot`."""

    __slots__ = ("_is_left", "_losses", "_lost", "_number")

    def __init__(self, losses: RemoteLosses, number: int) -> None:
        self._losses = losses
        self._number = number
        self._lost = self._is_left = False

    def leave(self) -> None:
        """See `Slot`."""
        if not self._is_left:
            self._is_left = True
            self._losses.end(self._number, lost=self._lost)

    def lost(self) -> None:
        """See `Slot`."""
        self._lost = True


class _Turn:
    """A `scheduling.losses.Turn`."""

    __slots__ = ("_losses", "_number")

    def __init__(self, losses: RemoteLosses, number: int) -> None:
        self._losses = losses
        self._number = number

    def leave_in(self, seconds: float, *, harmless: bool = True) -> None:
        """See `Turn`."""
        self._losses.tell(TurnOver(self._number, harmless, seconds))

    def leave(self, *, harmless: bool = True) -> None:
        """See `Turn`."""
        self._losses.tell(TurnOver(self._number, harmless))
