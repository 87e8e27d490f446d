"""The scheduler process's answers about engines that disappear under workers' requests, and about
requests that are tried again.

Owns what each worker has of these. When a worker has ended, its places are free, and its requests
count as those whose clients have left as their engines disappeared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from pdproxy.deciding.comebacks import Comebacks
from pdproxy.deciding.engines_lost import EnginesLost
from pdproxy.deciding.few_first import Permit
from pdproxy.deciding.retry_budget import RetrySlot
from pdproxy.deciding.retry_slots import RetrySlots
from pdproxy.scheduling.leases import Lease
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.losses import SOON, Fingerprint, LostUnder
from pdproxy.workers.admitted_worker import ClientName
from pdproxy.workers.calls import Answer, asked, told
from pdproxy.workers.scheduler_clients import Holder, SchedulerClient
from pdproxy.workers.scheduler_links import SchedulerLinks

SUSPECTS = "suspects"
"""Behind this word, the topic of the suspects of a pool has the pool's number."""


class Sender(msgspec.Struct, array_like=True):
    """A worker's request under which engines may be lost. `number`: the worker's; `lost`: how many
    engines were lost under it before.
    """

    number: int
    request_id: str
    client: ClientName
    lost: int


class Judgement(msgspec.Struct, array_like=True):
    """How many engines were lost under a request. `refusal`: the text of the error with which no
    other one is tried, and when it may be sent again; None: it may be tried.
    """

    lost: int
    refusal: tuple[str, float | None] | None


class Known(msgspec.Struct, array_like=True):
    """All suspects."""

    fingerprints: Sequence[Fingerprint]
    clients: Sequence[ClientName]


class _Request(msgspec.Struct, eq=False):
    """A `RequestAtRisk` of a worker. `fingerprint`: None while it is not known; `broken`: legs of
    which it has not been judged whether their engines are lost.
    """

    request_id: str
    client: ClientName
    lost: list[LostUnder] = []
    fingerprint: Fingerprint | None = None
    broken: list[Lease] = []


_NOBODY = _Request("", "")
"""A request under which no engine is lost."""


class LossesOfPool(msgspec.Struct, frozen=True, eq=False):
    """What decides in one pool."""

    ledger: Ledger
    lost: EnginesLost
    slots: RetrySlots
    comebacks: Comebacks


class LossesOfWorker(Holder):
    """Those of one worker in a pool. Slots and turns have the numbers of the questions
    for them, and requests numbers of the worker's own.
    """

    def __init__(self, pool: LossesOfPool) -> None:
        self._pool = pool
        self._requests: dict[int, _Request] = {}
        self._slots: dict[int, RetrySlot] = {}
        self._turns: dict[int, Permit] = {}

    def __repr__(self) -> str:
        return f"<LossesOfWorker {len(self._requests)} requests, {len(self._slots)} slots>"

    def __len__(self) -> int:
        return len(self._requests) + len(self._slots) + len(self._turns)

    def unwanted(self, number: int, *, is_sent: bool) -> None:
        """See `Holder`."""
        self.slot_over(number, lost=False)
        self.turn_over(number, harmless=False)

    def close(self) -> None:
        """See `Holder`."""
        for slot in self._slots.values():
            slot.leave()
        for turn in [*self._turns.values()]:
            turn.leave_in(SOON, harmless=False)
        for request in self._requests.values():
            if request.broken and request.fingerprint is not None:
                self._pool.lost.left(request, request.broken, request.fingerprint)

    def _request(self, sender: Sender) -> _Request:
        found = self._requests.get(sender.number)
        if found is None:
            found = _Request(sender.request_id, sender.client)
            self._requests[sender.number] = found
            if sender.lost:
                self._pool.lost.restore(found, sender.lost)
        return found

    def _leases(self, url: str, since: float) -> list[Lease]:
        engine = self._pool.ledger.get(url)
        return [] if engine is None else [Lease(engine, engine.role, 0, closed=True, since=since)]

    # -- what the worker tells

    @told
    def broke(self, sender: Sender, url: str, since: float, *, streamed: bool, at: float) -> None:
        """See `Losses`. `at`: when it has broken."""
        request = self._request(sender)
        for lease in self._leases(url, since):
            self._pool.lost.broke(request, lease.engine, since, streamed=streamed, at=at)
            request.broken.append(lease)

    @told
    def left(
        self, sender: Sender, legs: Sequence[tuple[str, float]], fingerprint: Fingerprint
    ) -> None:
        """See `Losses`. `legs`: to which engines, and since when."""
        leases = [lease for leg in legs for lease in self._leases(*leg)]
        self._pool.lost.left(self._request(sender), leases, fingerprint)

    @told
    def answered(self, client: ClientName, fingerprint: Fingerprint | None, *, whole: bool) -> None:
        """See `Losses`."""
        self._pool.lost.answered(client, fingerprint, whole=whole)

    @told
    def over(self, request: int) -> None:
        """A request is over."""
        self._requests.pop(request, None)

    @told
    def slot_over(self, slot: int, *, lost: bool) -> None:
        """See `Slot.leave`. `lost`: whether `Slot.lost` was called."""
        if (found := self._slots.pop(slot, None)) is not None:
            if lost:
                found.lost()
            found.leave()

    @told
    def turn_over(self, turn: int, *, harmless: bool, seconds: float | None = None) -> None:
        """See `Turn.leave`, or `Turn.leave_in` so many seconds."""
        if (found := self._turns.get(turn)) is None:
            return
        if seconds is None:
            found.leave(harmless=harmless)
        else:
            found.leave_in(seconds, harmless=harmless)

    @told
    def restore(self, slots: Sequence[int]) -> None:
        """Take over the slots that it has of a scheduler process that was before."""
        for number in slots:
            self._slots[number] = self._pool.slots.restore()

    # -- what the worker asks

    @asked
    def slot(self, number: int, sender: Sender | None) -> Answer[bool]:
        """See `deciding.retry_slots`. Whether there is a place for one more attempt. `sender`: None
        if no engine was lost under the request.
        """
        return self._slot(number, _NOBODY if sender is None else self._request(sender))

    async def _slot(self, number: int, request: _Request) -> bool:
        slot = await self._pool.slots.enter(request)
        if slot is not None:
            self._slots[number] = slot
        return slot is not None

    @asked
    def engines_change(self, number: int, model: str | None, until: float) -> Answer[bool]:
        """See `Comebacks.wait`."""
        return self._pool.comebacks.wait(model, until)

    @asked
    def turn(
        self, number: int, sender: Sender, fingerprint: Fingerprint, seconds: float
    ) -> Answer[bool]:
        """See `Losses`. Whether there is a turn."""
        request = self._request(sender)
        request.fingerprint = fingerprint
        return self._turn(number, request, fingerprint, seconds)

    async def _turn(
        self, number: int, request: _Request, fingerprint: Fingerprint, seconds: float
    ) -> bool:
        turn = await self._pool.lost.turn(request, fingerprint, seconds)
        if turn is None:
            return False
        self._turns[number] = turn
        turn.add(partial(self._left_turn, number))
        return True

    def _left_turn(self, number: int, _: bool) -> None:
        self._turns.pop(number, None)

    @asked
    def judge(
        self, number: int, sender: Sender, fingerprint: Fingerprint | None, *, looks_back: bool
    ) -> Answer[Judgement]:
        """See `Losses`."""
        request = self._request(sender)
        request.fingerprint = request.fingerprint or fingerprint
        return self._judge(request, fingerprint, looks_back)

    async def _judge(
        self, request: _Request, fingerprint: Fingerprint | None, looks_back: bool
    ) -> Judgement:
        lost = self._pool.lost
        error = await lost.judge(request, fingerprint, looks_back=looks_back)
        request.broken.clear()
        refusal = None if error is None else (error.message, error.retry_after)
        return Judgement(lost.lost_under(request), refusal)

    @asked
    def forbidden(self, number: int, sender: Sender) -> Answer[Sequence[str]]:
        """See `Losses`."""
        return self._pool.lost.forbidden(self._request(sender))


def decide_losses(links: SchedulerLinks, at: int, pool: LossesOfPool) -> None:
    """Decide for all workers in the pool with this number."""
    known = pool.lost.known
    pool.lost.changed = links.publisher.topic(
        f"{SUSPECTS} {at}", lambda _: Known([*known.fingerprints], [*known.clients])
    ).changed

    def greet(client: SchedulerClient) -> None:
        losses = LossesOfWorker(pool)
        client.hold(losses)
        client.serve(LossesOfWorker, losses, at)

    links.greets.append(greet)
