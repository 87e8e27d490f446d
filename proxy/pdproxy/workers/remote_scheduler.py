"""The scheduler of one pool, for requests of a worker: each choice is a message to the scheduler
process, and so is what legs show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.scheduling.leases import Assignment, Lease, Verdict
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.scheduler import ANY, Constraints
from pdproxy.workers.scheduler_link import HeldLease, SchedulerLink
from pdproxy.workers.scheduler_messages import (
    VERDICTS,
    Began,
    Choose,
    ChooseEncoders,
    ChooseOne,
    Chosen,
    Closed,
    Failed,
    FoundGone,
    KvTook,
    LostModel,
    RefusesReports,
    SpaceFree,
)

_NUMBER_OF = {verdict: number for number, verdict in enumerate(VERDICTS)}
_NEUTRAL = _NUMBER_OF[Verdict.NEUTRAL]
MOST_UNKNOWN = 3
"""How often a choice is made again because this worker does not know one of its engines yet."""


class RemoteScheduler:
    """A `scheduling.scheduler.Scheduler` of the pool with number `pool`. `fits`: see there."""

    def __init__(
        self,
        link: SchedulerLink,
        pool: int,
        engines: EngineRegistry,
        fits: Callable[[int], bool],
        now: Callable[[], float],
    ) -> None:
        self._link = link
        self._pool = pool
        self._engines = engines
        self._now = now
        self.fits = fits

    def __repr__(self) -> str:
        return f"<RemoteScheduler of pool {self._pool}, {self._link!r}>"

    # -- choosing

    async def choose(
        self, request_id: str, ask: Ask, constraints: Constraints = ANY
    ) -> Assignment | None:
        """See `Scheduler`."""
        for _ in range(MOST_UNKNOWN):
            number = self._link.numbers(2)
            item = Choose(number, self._pool, request_id, ask, constraints)
            found = await self._link.ask(item, 2)
            leases = self._leases(found, constraints.kv_tokens if found.space else 0)
            if leases is not None:
                break
        else:
            return None
        if not leases:
            return None
        space = _Space(self._link, leases[-1]) if found.space else None
        return Assignment(tuple(leases), found.reason, found.values, space)

    async def choose_one(
        self, ask: Ask, without: Sequence[str] = (), avoid: Sequence[str] = ()
    ) -> Lease | None:
        """See `Scheduler`."""
        for _ in range(MOST_UNKNOWN):
            item = ChooseOne(self._link.numbers(1), self._pool, ask, without, avoid)
            leases = self._leases(await self._link.ask(item, 1))
            if leases is not None:
                return leases[0] if leases else None
        return None

    async def choose_encoders(
        self, asks: Sequence[Ask], without: Sequence[str], *, proven: bool
    ) -> Sequence[Lease]:
        """See `Scheduler`."""
        number = self._link.numbers(len(asks))
        item = ChooseEncoders(number, self._pool, asks, without, proven)
        return self._leases(await self._link.ask(item, len(asks))) or []

    def _leases(self, found: Chosen, space: int = 0) -> list[HeldLease] | None:
        """Return the leases of a choice. None: this worker does not know one of the engines, which
        was just added; the leases are ended.
        """
        leases: list[HeldLease] = []
        for number, one in enumerate(found.leases, found.number):
            engine = self._engines.known.get(one.url)
            if engine is None:
                now = self._now()
                for ended in range(found.number, found.number + len(found.leases)):
                    self._link.tell(Closed(ended, _NEUTRAL, now, None, None, 0, None, 0))
                    self._link.leases.pop(ended, None)
                return None
            lease = HeldLease(
                engine.in_ledger,
                Role(one.role),
                one.prompt_bytes,
                trial=one.trial,
                since=one.since,
                expected=one.expected,
                reports=one.reports,
                number=number,
                pool=self._pool,
            )
            self._link.leases[number] = lease
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
        told = Closed(
            lease.number,
            _NUMBER_OF[verdict],
            at,
            pace,
            tokens,
            beside,
            lease.reported,
            lease.prompt,
        )
        self._link.end(lease, told)

    def cached(self, lease: Lease, reported: int, prompt: int) -> None:
        """See `Scheduler`."""
        assert isinstance(lease, HeldLease)
        lease.reported, lease.prompt = reported, prompt

    def failed(self, lease: Lease, at: float) -> None:
        """See `Scheduler`."""
        told = Failed(self._pool, lease.engine.url, lease.role.value, lease.trial, at)
        self._link.tell(told)

    def kv_took(self, prefill: str, decode: str, at: float, seconds: float) -> None:
        """See `Scheduler`."""
        self._link.tell(KvTook(self._pool, prefill, decode, at, seconds))

    def refuses_reports(self, url: str) -> None:
        """See `Scheduler`."""
        self._link.tell(RefusesReports(self._pool, url))

    def lost_model(self, url: str, model: str) -> None:
        """See `Scheduler`."""
        self._link.tell(LostModel(self._pool, url, model))

    def found_gone(self, url: str, why: str, at: float) -> None:
        """See `Scheduler`."""
        self._link.tell(FoundGone(self._pool, url, why, at))


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
