"""The scheduler of one pool, for requests of a worker: each choice is a message to the scheduler
process, and so is what legs show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import structs

from pdproxy.app.capacity import FULL
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.observe.events import Event, LegFailed, NodeChanged, Observers
from pdproxy.scheduling.leases import GOOD, Assignment, Lease, Verdict
from pdproxy.scheduling.ledger import DOWN, Ledger
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.scheduler import ANY, Constraints
from pdproxy.workers.remote_turns import RemoteTurn, RemoteTurns
from pdproxy.workers.scheduler_link import Answer, HeldLease, SchedulerLink
from pdproxy.workers.scheduler_messages import (
    Began,
    Choose,
    ChooseEncoders,
    ChooseOne,
    ChooseTurn,
    Chosen,
    ChosenTurn,
    Closed,
    Failed,
    FoundGone,
    KvFailed,
    KvLoaded,
    KvNotMade,
    KvTook,
    LostModel,
    Prefilled,
    RefusesMore,
    RefusesReports,
    SpaceFree,
    Unwanted,
)
from pdproxy.workers.turn_messages import LARGEST

MOST_UNKNOWN = 3
"""How often a choice is made where this worker does not know one of the engines yet."""


class RemoteScheduler:
    """A `scheduling.scheduler.Scheduler` of the pool with number `pool`. `fits`: see there.

    `view`: what this worker knows of engines' states. What its own legs show at once of an engine
    that is gone, it notes there, too: the scheduler process tells it a moment later. `turns`: where
    it gets kept turns, None where none are kept.
    """

    def __init__(
        self,
        link: SchedulerLink,
        pool: int,
        engines: EngineRegistry,
        view: Ledger,
        observers: Observers,
        fits: Callable[[int], bool],
        now: Callable[[], float],
        turns: RemoteTurns | None = None,
    ) -> None:
        self._link = link
        self._pool = pool
        self._engines = engines
        self._view = view
        self._observers = observers
        self._now = now
        self._turns = turns
        self.fits = fits
        link.know_transfers[pool] = view.follow_transfers

    def __repr__(self) -> str:
        return f"<RemoteScheduler of pool {self._pool}, {self._link!r}>"

    # -- choosing

    async def choose(
        self,
        request_id: str,
        ask: Ask,
        constraints: Constraints = ANY,
        turn: bytes | None = None,
    ) -> Assignment | None:
        """See `Scheduler`."""
        for _ in range(MOST_UNKNOWN):
            number = self._link.numbers(2)
            item, ids = Choose(number, self._pool, request_id, ask, constraints), 0
            if turn is not None and constraints.must_be_whole is None and len(turn) <= LARGEST:
                item = ChooseTurn(number, self._pool, request_id, ask, constraints, turn)
                ids = len(turn)
            found = _chosen(await self._link.ask(item, 2, ids))
            leases = self._leases(found, constraints.kv_tokens if found.space else 0)
            if not isinstance(leases, str):
                break
            if isinstance(found, ChosenTurn):
                self._link.turns[self._pool].ended(found.number, None)
            without = (*constraints.without, leases)
            constraints = structs.replace(constraints, without=without)
        if isinstance(leases, str) or not leases:
            return None
        space = _Space(self._link, leases[-1]) if found.space else None
        chosen = Assignment(tuple(leases), found.reason, found.values, space)
        if isinstance(found, ChosenTurn):
            assert self._turns is not None
            chosen.turn = leases[0].turn = RemoteTurn(self._turns, found.number, found.turn)
        return chosen

    async def choose_one(
        self, ask: Ask, without: Sequence[str] = (), avoid: Sequence[str] = ()
    ) -> Lease | None:
        """See `Scheduler`."""
        for _ in range(MOST_UNKNOWN):
            item = ChooseOne(self._link.numbers(1), self._pool, ask, without, avoid)
            leases = self._leases(_chosen(await self._link.ask(item, 1)))
            if not isinstance(leases, str):
                return leases[0] if leases else None
            without = (*without, leases)
        return None

    async def choose_encoders(
        self, asks: Sequence[Ask], without: Sequence[str], *, proven: bool
    ) -> Sequence[Lease]:
        """See `Scheduler`."""
        number = self._link.numbers(len(asks))
        item = ChooseEncoders(number, self._pool, asks, without, proven)
        leases = self._leases(_chosen(await self._link.ask(item, len(asks))))
        return [] if isinstance(leases, str) else leases

    def _leases(self, found: Chosen, space: int = 0) -> list[HeldLease] | str:
        """Return the leases of a choice; or the URL of an engine that was just added, and that this
        worker does not know yet. Then the leases are ended.
        """
        leases: list[HeldLease] = []
        for number, one in enumerate(found.leases, found.number):
            engine = self._engines.known.get(one.url)
            if engine is None:
                for unwanted in leases:
                    self._link.forget(unwanted)
                self._link.tell(Unwanted(found.number, len(found.leases)))
                return one.url
            lease = HeldLease(
                engine.in_ledger,
                one.role,
                one.prompt_bytes,
                trial=one.trial,
                since=one.since,
                expected=one.expected,
                reports=one.reports,
                beside_idle=one.beside_idle,
                number=number,
                pool=self._pool,
            )
            self._link.began(lease)
            leases.append(lease)
        if leases:
            leases[-1].space = space
        return leases

    # -- what legs show

    def began(self, lease: Lease, at: float) -> None:
        """See `Scheduler`."""
        assert isinstance(lease, HeldLease)
        if not lease.closed:
            self._link.tell(Began(lease.number, at))

    def close(
        self,
        lease: Lease,
        verdict: Verdict,
        at: float,
        *,
        pace: float | None = None,
        tokens: int | None = None,
        beside: int = 0,
    ) -> None:
        """See `Scheduler`."""
        assert isinstance(lease, HeldLease)
        if lease.closed:
            return
        lease.closed = True
        if lease.turn is not None:
            lease.turn.over()
        told = Closed(
            lease.number,
            verdict,
            at,
            pace,
            tokens,
            beside,
            lease.reported,
            lease.prompt,
        )
        self._link.end(lease, told)
        if verdict is not GOOD and (why := DOWN.get(verdict)) is not None:
            self._down(lease.engine.url, why, at)

    def cached(self, lease: Lease, reported: int, prompt: int) -> None:
        """See `Scheduler`."""
        assert isinstance(lease, HeldLease)
        lease.reported, lease.prompt = reported, prompt

    def failed(self, lease: Lease, at: float) -> None:
        """See `Scheduler`."""
        told = Failed(self._pool, lease.engine.url, lease.role, lease.trial, at)
        self._link.tell(told)

    def kv_took(self, prefill: str, decode: str, at: float, seconds: float) -> None:
        """See `Scheduler`."""
        self._link.tell(KvTook(self._pool, prefill, decode, at, seconds))

    def kv_failed(self, prefill: str, decode: str, at: float, *, first: bool = True) -> None:
        """See `Scheduler`."""
        self._link.tell(KvFailed(self._pool, prefill, decode, at, first))
        self._view.transfers.told()

    def kv_not_made(self, prefill: str, at: float) -> None:
        """See `Scheduler`."""
        self._link.tell(KvNotMade(self._pool, prefill, at))
        self._view.transfers.told()

    def kv_loaded(self, prefill: str, decode: str, since: float) -> None:
        """See `Scheduler`."""
        if self._view.transfers.suspects:
            self._link.tell(KvLoaded(self._pool, prefill, decode, since))

    def left_out(self, prefill: str, decode: str, failed: Sequence[tuple[str, str]]) -> str:
        """See `Scheduler`."""
        return self._view.left_out(prefill, decode, failed)

    def prefilled(self, lease: Lease, tokens: int, seconds: float) -> None:
        """See `Scheduler`."""
        assert isinstance(lease, HeldLease)
        self._link.tell(Prefilled(lease.number, tokens, seconds))

    def refuses_reports(self, url: str) -> None:
        """See `Scheduler`."""
        self._link.tell(RefusesReports(self._pool, url))

    def lost_model(self, url: str, model: str) -> None:
        """See `Scheduler`."""
        self._link.tell(LostModel(self._pool, url, model))
        self._view.lost_model(url, model)

    def found_gone(self, url: str, why: str, at: float) -> None:
        """See `Scheduler`."""
        self._link.tell(FoundGone(self._pool, url, why, at))
        self._down(url, why, at)

    def _down(self, url: str, why: str, at: float) -> None:
        """Note here what the scheduler process was just told."""
        engine = self._view.get(url)
        if engine is not None and self._view.mark_down(url, why, at):
            role = engine.role.value
            self._observers.notify(NodeChanged(url, role, up=False, reason=why))


def _chosen(answer: Answer) -> Chosen:
    assert isinstance(answer, Chosen)
    return answer


class Refusals:
    """An observer: tells the scheduler process of requests that an engine refuses since it has too
    many.
    """

    only = (LegFailed,)

    def __init__(self, link: SchedulerLink, pool: int) -> None:
        self._link = link
        self._pool = pool

    def notify(self, event: Event) -> None:
        """Tell of a request that was refused."""
        if isinstance(event, LegFailed) and event.status == FULL:
            self._link.tell(RefusesMore(self._pool, event.node))


class _Space:
    """Space for a prompt's KV that the scheduler process counts."""

    __slots__ = ("_lease", "_link")

    def __init__(self, link: SchedulerLink, lease: HeldLease) -> None:
        self._link = link
        self._lease: HeldLease | None = lease

    def release(self) -> None:
        """See `scheduling.leases.Space`."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.space = 0
            self._link.tell(SpaceFree(lease.number))
