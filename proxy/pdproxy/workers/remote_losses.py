"""What is lost under requests of a worker, and who of them is tried again: each question is a
message to the scheduler process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.errors import EnginesLostError
from pdproxy.scheduling.leases import Lease
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.scheduling.losses import Fingerprint, KnownSuspects, RequestAtRisk
from pdproxy.workers.loss_clients import SUSPECTS, Known, LossesOfWorker, Sender
from pdproxy.workers.scheduler_link import SchedulerLink


class RemoteLosses:
    """The `scheduling.losses.Losses` of the pool with this number. Owns the slots of its
    requests.
    """

    def __init__(
        self, link: SchedulerLink, pool: int, engines: EngineRegistry, now: Callable[[], float]
    ) -> None:
        self._link = link
        self._pool = pool
        self._engines = engines
        self._now = now
        self.known = KnownSuspects()
        """As the scheduler process has told them last."""
        self._slots: set[int] = set()
        link.subscriber.subscribe(f"{SUSPECTS} {pool}", Known, self._follow)
        link.begins.append(self._begin)

    def __repr__(self) -> str:
        return f"<RemoteLosses of pool {self._pool}, {len(self._slots)} slots>"

    def _follow(self, _: str, told: Known) -> None:
        known = self.known
        known.fingerprints, known.clients = frozenset(told.fingerprints), frozenset(told.clients)
        known.remembers = bool(told.fingerprints or told.clients)

    def _begin(self) -> None:
        self._link.tell(LossesOfWorker.restore, self._pool, [*self._slots])

    def _sender(self, sender: RequestAtRisk) -> Sender:
        lost = self._lost_under(sender)
        return Sender(lost.number, sender.request_id, sender.client, lost.engines)

    def _lost_under(self, sender: RequestAtRisk) -> _LostUnder:
        if not sender.lost:
            sender.lost.append(_LostUnder(self._link, self._pool))
        lost = sender.lost[0]
        assert isinstance(lost, _LostUnder)
        return lost

    # -- tried again

    async def slot(self, sender: RequestAtRisk) -> _Slot | None:
        """See `deciding.retry_slots`. Raises OverloadedError without a scheduler process."""
        link, question = self._link, self._link.question()
        known = self._sender(sender) if sender.lost else None
        if not await link.ask(question, LossesOfWorker.slot, self._pool, known):
            return None
        self._slots.add(question.number)
        return _Slot(self, question.number)

    def end(self, number: int, *, lost: bool) -> None:
        """End a slot."""
        self._slots.discard(number)
        self._link.tell(LossesOfWorker.slot_over, self._pool, number, lost=lost)

    async def engines_change(self, model: str | None, until: float) -> bool:
        """See `deciding.comebacks`. Raises OverloadedError without a scheduler process."""
        link, method = self._link, LossesOfWorker.engines_change
        return await link.ask(link.question(), method, self._pool, model, until)

    # -- what is lost

    async def turn(
        self, sender: RequestAtRisk, fingerprint: Fingerprint, seconds: float
    ) -> _Turn | None:
        """See `Losses`. Raises OverloadedError without a scheduler process."""
        link, question = self._link, self._link.question()
        known, method = self._sender(sender), LossesOfWorker.turn
        is_given = await link.ask(question, method, self._pool, known, fingerprint, seconds)
        return _Turn(link, self._pool, question.number) if is_given else None

    def broke(
        self, sender: RequestAtRisk, engine: LedgerEngine, since: float, *, streamed: bool
    ) -> bool:
        """See `Losses`."""
        known = self._engines.get(engine.url)
        if known is None or known.in_ledger is not engine or engine.draining is not None:
            return False
        risk, method, at = self._sender(sender), LossesOfWorker.broke, self._now()
        self._link.tell(method, self._pool, risk, engine.url, since, streamed=streamed, at=at)
        return True

    def left(
        self, sender: RequestAtRisk, leases: Iterable[Lease], fingerprint: Fingerprint
    ) -> None:
        """See `Losses`."""
        legs = [(one.engine.url, one.since) for one in leases]
        known, method = self._sender(sender), LossesOfWorker.left
        self._link.tell(method, self._pool, known, legs, fingerprint)

    async def judge(
        self, sender: RequestAtRisk, fingerprint: Fingerprint | None, *, looks_back: bool = False
    ) -> EnginesLostError | None:
        """See `Losses`. Raises OverloadedError without a scheduler process."""
        link, lost, method = self._link, self._lost_under(sender), LossesOfWorker.judge
        judged = await link.ask(
            link.question(),
            method,
            self._pool,
            self._sender(sender),
            fingerprint,
            looks_back=looks_back,
        )
        lost.engines = max(lost.engines, judged.lost)
        if judged.refusal is None:
            return None
        text, retry_after = judged.refusal
        return EnginesLostError(text, retry_after=retry_after)

    async def forbidden(self, sender: RequestAtRisk) -> Sequence[str]:
        """See `Losses`. Raises OverloadedError without a scheduler process."""
        link, known = self._link, self._sender(sender)
        return await link.ask(link.question(), LossesOfWorker.forbidden, self._pool, known)

    def answered(
        self, client: bytes | str, fingerprint: Fingerprint | None, *, whole: bool
    ) -> None:
        """See `Losses`."""
        method = LossesOfWorker.answered
        self._link.tell(method, self._pool, client, fingerprint, whole=whole)


class _LostUnder:
    """Says that its request is over once nothing refers to it."""

    __slots__ = ("_link", "_pool", "engines", "number")

    def __init__(self, link: SchedulerLink, pool: int) -> None:
        self._link = link
        self._pool = pool
        self.number = link.numbers(1)
        self.engines = 0

    def __del__(self) -> None:
        self._link.tell(LossesOfWorker.over, self._pool, self.number)

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

    __slots__ = ("_link", "_number", "_pool")

    def __init__(self, link: SchedulerLink, pool: int, number: int) -> None:
        self._link = link
        self._pool = pool
        self._number = number

    def leave_in(self, seconds: float, *, harmless: bool = True) -> None:
        """See `Turn`."""
        self._over(harmless, seconds)

    def leave(self, *, harmless: bool = True) -> None:
        """See `Turn`."""
        self._over(harmless, None)

    def _over(self, harmless: bool, seconds: float | None) -> None:
        method, number = LossesOfWorker.turn_over, self._number
        self._link.tell(method, self._pool, number, harmless=harmless, seconds=seconds)
