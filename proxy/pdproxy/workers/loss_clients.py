"""The scheduler process's answers about engines that disappear under workers' requests, and about
requests that are tried again.

Owns what each worker has of these. When a worker has ended, its places are free, and its requests
count as those whose clients have left as their engines disappeared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from pdproxy.deciding.comebacks import Comebacks
from pdproxy.deciding.engines_lost import EnginesLost
from pdproxy.deciding.few_first import Permit
from pdproxy.deciding.retry_budget import RetrySlot
from pdproxy.deciding.retry_slots import RetrySlots
from pdproxy.kit.errors import EnginesLostError
from pdproxy.scheduling.leases import Lease
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.losses import SOON, Fingerprint, LostUnder
from pdproxy.workers.links import LinkError
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
    Refusal,
    Sender,
    SlotOver,
    TurnAnswer,
    TurnOver,
    decode_asked,
    decode_told,
    encode,
    topic,
)
from pdproxy.workers.scheduler_clients import MAX_OPEN, SchedulerClient
from pdproxy.workers.scheduler_links import SchedulerLinks


class _Request(msgspec.Struct, eq=False):
    """A `RequestAtRisk` of a worker. `fingerprint`: None while it is not known; `broken`: legs of
    which it has not been judged whether their engines are lost.
    """

    request_id: str
    client: bytes | str
    lost: list[LostUnder] = []
    fingerprint: Fingerprint | None = None
    broken: list[Lease] = []


class _OfWorker(msgspec.Struct, eq=False):
    """What one worker has, by its own numbers."""

    requests: dict[int, _Request] = {}
    slots: dict[int, RetrySlot] = {}
    turns: dict[int, Permit] = {}

    def turn_left(self, number: int) -> Callable[[bool], None]:
        """Return what forgets a turn as it is left."""

        def left(_: bool) -> None:
            self.turns.pop(number, None)

        return left


class LossesOfWorkers:
    """Those of the pool with the number `at`."""

    def __init__(
        self,
        links: SchedulerLinks,
        at: int,
        ledger: Ledger,
        lost: EnginesLost,
        slots: RetrySlots,
        comebacks: Comebacks,
    ) -> None:
        self._links = links
        self._topic = topic(at)
        self._ledger = ledger
        self._lost = lost
        self._slots = slots
        self._comebacks = comebacks
        self._workers: dict[SchedulerClient, _OfWorker] = {}
        self._will_tell = False
        lost.changed = self._changed
        links.hears[self._topic] = self._hear
        links.answers[self._topic] = self._answer
        links.greets.append(self._greet)
        links.leaves.append(self._leave)

    def __repr__(self) -> str:
        return f"<LossesOfWorkers {self._topic}, {len(self._workers)} workers>"

    # -- the suspects

    def _known(self) -> bytes:
        known = self._lost.known
        return encode(Known([*known.fingerprints], [*known.clients]))

    def _greet(self, client: SchedulerClient) -> None:
        client.say(self._topic, self._known())

    def _changed(self) -> None:
        """Tell all workers, once per turn of the event loop."""
        if not self._will_tell:
            self._will_tell = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._will_tell = False
        self._links.say(self._topic, self._known())

    # -- a worker

    def _of(self, client: SchedulerClient) -> _OfWorker:
        found = self._workers.get(client)
        if found is None:
            found = self._workers[client] = _OfWorker()
        return found

    def _request(self, client: SchedulerClient, sender: Sender) -> _Request:
        requests = self._of(client).requests
        found = requests.get(sender.number)
        if found is None:
            if len(requests) >= MAX_OPEN:
                raise LinkError(f"a worker has {MAX_OPEN} requests under which engines are lost")
            found = requests[sender.number] = _Request(sender.request_id, sender.client)
            if sender.lost:
                self._lost.restore(found, sender.lost)
        return found

    def _leases(self, url: str, since: float) -> list[Lease]:
        engine = self._ledger.get(url)
        return [] if engine is None else [Lease(engine, engine.role, 0, closed=True, since=since)]

    def _leave(self, client: SchedulerClient) -> None:
        """A worker says no more."""
        of = self._workers.pop(client, None)
        if of is None:
            return
        for slot in of.slots.values():
            slot.leave()
        for turn in [*of.turns.values()]:
            turn.leave_in(SOON, harmless=False)
        for request in of.requests.values():
            if request.broken and request.fingerprint is not None:
                self._lost.left(request, request.broken, request.fingerprint)

    # -- what it tells

    def _hear(self, client: SchedulerClient, body: bytes) -> None:
        of = self._of(client)
        match decode_told(body):
            case Broke(sender, url, since, at, streamed):
                request = self._request(client, sender)
                for lease in self._leases(url, since):
                    self._lost.broke(request, lease.engine, since, streamed=streamed, at=at)
                    request.broken.append(lease)
            case Left(sender, legs, fingerprint):
                leases = [lease for leg in legs for lease in self._leases(*leg)]
                self._lost.left(self._request(client, sender), leases, fingerprint)
            case Answered(name, fingerprint, whole):
                self._lost.answered(name, fingerprint, whole=whole)
            case Over(number):
                of.requests.pop(number, None)
            case SlotOver(number, lost):
                if (slot := of.slots.pop(number, None)) is not None:
                    if lost:
                        slot.lost()
                    slot.leave()
            case TurnOver(number, harmless, seconds):
                if (turn := of.turns.get(number)) is None:
                    return
                if seconds is None:
                    turn.leave(harmless=harmless)
                else:
                    turn.leave_in(seconds, harmless=harmless)
            case HeldSlots(numbers):
                for number in numbers[:MAX_OPEN]:
                    of.slots[number] = self._slots.restore()

    # -- what it asks

    async def _answer(self, client: SchedulerClient, number: int, body: bytes) -> bytes:
        of = self._of(client)
        match decode_asked(body):
            case AskSlot(sender):
                asking = _NOBODY if sender is None else self._request(client, sender)
                slot = await self._slots.enter(asking)
                if slot is not None:
                    of.slots[number] = slot
                return encode(slot is not None)
            case AskChange(model, until):
                return encode(await self._comebacks.wait(model, until))
            case AskTurn(sender, fingerprint, seconds):
                request = self._request(client, sender)
                request.fingerprint = fingerprint
                try:
                    turn = await self._lost.turn(request, fingerprint, seconds)
                except EnginesLostError as error:
                    return encode(TurnAnswer(is_given=False, refusal=Refusal.of(error)))
                if turn is not None:
                    of.turns[number] = turn
                    turn.add(of.turn_left(number))
                return encode(TurnAnswer(turn is not None))
            case AskJudge(sender, fingerprint, looks_back):
                request = self._request(client, sender)
                request.fingerprint = request.fingerprint or fingerprint
                found = await self._lost.judge(request, fingerprint, looks_back=looks_back)
                request.broken.clear()
                refusal = None if found is None else Refusal.of(found)
                return encode(Judgement(self._lost.lost_under(request), refusal))
            case AskForbidden(sender):
                return encode(await self._lost.forbidden(self._request(client, sender)))
        raise AssertionError(body)


_NOBODY = _Request("", "")
"""A request under which no engine is lost."""
