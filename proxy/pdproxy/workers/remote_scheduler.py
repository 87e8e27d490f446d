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
from pdproxy.scheduling.scheduler import ANY, Constraints, Scheduler
from pdproxy.scheduling.transfer_faults import KnownTransfers
from pdproxy.workers.remote_turns import RemoteTurn, RemoteTurns
from pdproxy.workers.scheduler_clients import SchedulerClient
from pdproxy.workers.scheduler_link import Question, SchedulerLink
from pdproxy.workers.turn_messages import LARGEST
from pdproxy.workers.worker_choices import ChoicesOfWorker, Chosen, Held, LeasesOfWorker

TRANSFERS = "transfers"
"""Behind this word, the topic of what is known of KV that does not move has a pool's number."""
MOST_UNKNOWN = 3
"""How often a choice is made where this worker does not know one of the engines yet."""


class HeldLease(Lease):
    """A lease of this worker, with its number. `prompt`, `cached`: what its engine says of the
    prompt (`Scheduler.counted`). `space`: tokens whose KV has space at its engine, 0: none was
    taken, or it is free again. `turn`: what has come with it, None: nothing.
    """

    number: int = 0
    prompt: int | None = None
    cached: int | None = None
    space: int = 0
    turn: RemoteTurn | None = None


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
        self.leases: dict[int, HeldLease] = {}
        """Those of this worker, by their numbers."""
        link.subscriber.subscribe(
            f"{TRANSFERS} {pool}", KnownTransfers, lambda _, known: view.follow_transfers(known)
        )
        link.begins.append(self._begin)
        engines.keep_known(lambda: {one.engine.url for one in self.leases.values()})

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
        if turn is not None and (constraints.must_be_whole is not None or len(turn) > LARGEST):
            turn = None
        link, method, pool = self._link, ChoicesOfWorker.choose, self._pool
        for _ in range(MOST_UNKNOWN):
            question: Question[Chosen] = Question(link.numbers(2))
            if turn is not None and self._turns is not None:
                question.ids = len(turn)
                question.arrived, question.vain = self._turns.noted_by(question.number)
            found = await link.ask(question, method, pool, request_id, ask, constraints, turn)
            space = constraints.kv_tokens if found.space else 0
            leases = self._leases(question.number, found, space)
            if not isinstance(leases, str):
                break
            if found.turn is not None and question.vain is not None:
                question.vain()
            without = (*constraints.without, leases)
            constraints = structs.replace(constraints, without=without)
        if isinstance(leases, str) or not leases:
            return None
        chosen = Assignment(
            tuple(leases),
            found.reason,
            found.weighed,
            _Space(link, leases[-1]) if found.space else None,
        )
        if found.turn is not None:
            assert self._turns is not None
            chosen.turn = leases[0].turn = RemoteTurn(self._turns, question.number, found.turn)
        return chosen

    async def choose_one(
        self, ask: Ask, without: Sequence[str] = (), avoid: Sequence[str] = ()
    ) -> Lease | None:
        """See `Scheduler`."""
        link, method, pool = self._link, ChoicesOfWorker.choose_one, self._pool
        for _ in range(MOST_UNKNOWN):
            question: Question[Chosen] = Question(link.numbers(1))
            found = await link.ask(question, method, pool, ask, without, avoid)
            leases = self._leases(question.number, found)
            if not isinstance(leases, str):
                return leases[0] if leases else None
            without = (*without, leases)
        return None

    async def choose_encoders(
        self, asks: Sequence[Ask], without: Sequence[str], *, proven: bool
    ) -> Sequence[Lease]:
        """See `Scheduler`."""
        question: Question[Chosen] = Question(self._link.numbers(len(asks)))
        method = ChoicesOfWorker.choose_encoders
        found = await self._link.ask(question, method, self._pool, asks, without, proven=proven)
        leases = self._leases(question.number, found)
        return [] if isinstance(leases, str) else leases

    def _leases(self, question: int, found: Chosen, space: int = 0) -> list[HeldLease] | str:
        """Return the leases of a choice; or the URL of an engine that was just added, and that this
        worker does not know yet. Then the leases are ended.
        """
        leases: list[HeldLease] = []
        for number, one in enumerate(found.leases, question):
            engine = self._engines.known.get(one.url)
            if engine is None:
                for unwanted in leases:
                    self._forget(unwanted)
                self._link.tell(SchedulerClient.unwanted, 0, question)
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
            )
            self.leases[number] = lease
            engine.in_ledger.requests += 1  # this worker's load, as it shows it
            engine.in_ledger.prompt_bytes += lease.prompt_bytes
            leases.append(lease)
        if leases:
            leases[-1].space = space
        return leases

    def _forget(self, lease: HeldLease) -> None:
        del self.leases[lease.number]
        lease.engine.requests -= 1
        lease.engine.prompt_bytes -= lease.prompt_bytes

    def _begin(self) -> None:
        """Tell a new scheduler process which leases this worker has."""
        held = [
            Held(one.number, one.engine.url, one.role, one.prompt_bytes, one.since, one.space)
            for one in self.leases.values()
        ]
        if held:
            self._link.tell(ChoicesOfWorker.restore, self._pool, held)

    # -- what legs show

    def began(self, lease: Lease, at: float) -> None:
        """See `Scheduler`."""
        assert isinstance(lease, HeldLease)
        if not lease.closed:
            self._link.tell(LeasesOfWorker.began, 0, lease.number, at)

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
        self._forget(lease)
        self._link.tell(
            LeasesOfWorker.closed,
            0,
            lease.number,
            verdict,
            at,
            pace,
            tokens,
            beside,
            lease.prompt,
            lease.cached,
        )
        if verdict is not GOOD and (why := DOWN.get(verdict)) is not None:
            self._down(lease.engine.url, why, at)

    def counted(self, lease: Lease, prompt: int, cached: int | None) -> None:
        """See `Scheduler`."""
        assert isinstance(lease, HeldLease)
        lease.prompt, lease.cached = prompt, cached

    def failed(self, lease: Lease, at: float) -> None:
        """See `Scheduler`."""
        url, role, trial = lease.engine.url, lease.role, lease.trial
        self._link.tell(ChoicesOfWorker.failed, self._pool, url, role, trial, at)

    def kv_took(self, prefill: str, decode: str, at: float, seconds: float) -> None:
        """See `Scheduler`."""
        self._link.tell(Scheduler.kv_took, self._pool, prefill, decode, at, seconds)

    def kv_failed(self, prefill: str, decode: str, at: float, *, first: bool = True) -> None:
        """See `Scheduler`."""
        self._link.tell(Scheduler.kv_failed, self._pool, prefill, decode, at, first=first)
        self._view.transfers.told()

    def kv_not_made(self, prefill: str, at: float) -> None:
        """See `Scheduler`."""
        self._link.tell(Scheduler.kv_not_made, self._pool, prefill, at)
        self._view.transfers.told()

    def kv_loaded(self, prefill: str, decode: str, since: float) -> None:
        """See `Scheduler`."""
        if self._view.transfers.suspects:
            self._link.tell(Scheduler.kv_loaded, self._pool, prefill, decode, since)

    def left_out(self, prefill: str, decode: str, failed: Sequence[tuple[str, str]]) -> str:
        """See `Scheduler`."""
        return self._view.left_out(prefill, decode, failed)

    def prefilled(self, lease: Lease, tokens: int, seconds: float) -> None:
        """See `Scheduler`."""
        assert isinstance(lease, HeldLease)
        self._link.tell(LeasesOfWorker.prefilled, 0, lease.number, tokens, seconds)

    def refuses_reports(self, url: str) -> None:
        """See `Scheduler`."""
        self._link.tell(Scheduler.refuses_reports, self._pool, url)

    def lost_model(self, url: str, model: str) -> None:
        """See `Scheduler`."""
        self._link.tell(Scheduler.lost_model, self._pool, url, model)
        self._view.lost_model(url, model)

    def found_gone(self, url: str, why: str, at: float) -> None:
        """See `Scheduler`."""
        self._link.tell(Scheduler.found_gone, self._pool, url, why, at)
        self._down(url, why, at)

    def _down(self, url: str, why: str, at: float) -> None:
        """Note here what the scheduler process was just told."""
        engine = self._view.get(url)
        if engine is not None and self._view.mark_down(url, why, at):
            role = engine.role.value
            self._observers.notify(NodeChanged(url, role, up=False, reason=why))


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
            self._link.tell(ChoicesOfWorker.refused_more, self._pool, event.node)


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
            self._link.tell(LeasesOfWorker.space_free, 0, lease.number)
