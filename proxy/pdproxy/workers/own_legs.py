"""A worker tells the scheduler process what its legs have shown, when it is asked; asks whether a
leg may go on waiting behind a deadline; and ends the legs that the scheduler process names.

Nothing is sent while a request is served: the scheduler process asks when it compares an engine's
own numbers with what the legs of all workers have there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.open_legs import OpenLeg
from pdproxy.kit.errors import (
    EngineError,
    EngineTimeoutError,
    OverloadedError,
    StandstillError,
    Wait,
)
from pdproxy.scheduling.pace import Pace
from pdproxy.serving.kv.custody import Custody
from pdproxy.workers.audit import WorkerAuditor
from pdproxy.workers.leg_messages import End, EngineLegs, Shown, ToldLeg, ToldPush
from pdproxy.workers.legs_of_worker import LegsAtWorker, LegsOfWorker, Named
from pdproxy.workers.scheduler_link import PATIENCE, SchedulerLink

ANSWERED = 30.0
"""Seconds for which an answer is waited for. Behind that, a leg may not go on waiting."""
MAX_PREFILLED = 64
"""Ends of large prefills that are told together. More say nothing new."""


class _NotedPace(Pace):
    """The pace of an engine, which the scheduler process learns: here it is noted for that."""

    __slots__ = ("noted",)

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[int, float]] = []

    def prefilled(self, prompt_bytes: int, seconds: float) -> None:
        """See `Pace`."""
        if len(self.noted) < MAX_PREFILLED:
            self.noted.append((prompt_bytes, seconds))

    def taken(self) -> list[tuple[int, float]]:
        """Return what was noted, and forget it."""
        noted, self.noted = self.noted, []
        return noted


class OwnLegs:
    """What a worker says of its legs in the pool with number `pool`. A watcher of the registry.
    `now`: monotonic seconds.
    """

    def __init__(
        self,
        link: SchedulerLink,
        pool: int,
        engines: EngineRegistry,
        auditor: WorkerAuditor,
        now: Callable[[], float],
    ) -> None:
        self._link = link
        self._pool = pool
        self._engines = engines
        self._auditor = auditor
        self._now = now
        self.awaiting: Callable[[], list[Custody]] = list
        """Returns the custodies whose legs await a push."""
        self._told_at = 0.0
        self._told: set[str] = set()
        """Engines of which open legs were told."""
        link.serve(LegsAtWorker, self, pool)
        link.begins.append(self._begin)
        engines.watch(self)
        engines.when_forgotten(self._forgotten)

    def __repr__(self) -> str:
        return f"<OwnLegs of pool {self._pool}>"

    def added(self, engine: Engine) -> None:
        """Note what its legs show of its pace."""
        engine.open_legs.pace = _NotedPace()

    def removed(self, engine: Engine) -> None:
        """Its legs are told until they are over."""

    def _forgotten(self, url: str) -> None:
        """Tell what was not told of an engine that is gone: nobody may ask for it any more."""
        left = self._auditor.forget(url)
        if left.loading or left.arrived:
            self._link.tell(LegsOfWorker.tell, self._pool, 0, [left])

    def _begin(self) -> None:
        """Have a new scheduler process ask from now on."""
        self._auditor.tell_anew()
        self._told_at = 0.0
        self._told.clear()
        self._link.tell(LegsOfWorker.tell, self._pool, 0, [])

    # -- telling

    def tell_legs(self, number: int, *, legs: bool) -> None:
        """See `LegsAtWorker`."""
        told = self._auditor.changes()
        if legs:
            self._show(told)
        self._link.tell(LegsOfWorker.tell, self._pool, number, list(told.values()))

    def _show(self, told: dict[str, EngineLegs]) -> None:
        """Add what legs show of the engines of which there is something new."""
        now, before = self._told_at, self._told
        self._told_at, self._told = self._now(), set()
        pushes: dict[str | None, list[ToldPush]] = {}
        for one in self.awaiting():
            push = ToldPush(id(one), one.since, one.prefill, one.promised)
            pushes.setdefault(one.decode, []).append(push)
        for url, engine in self._engines.known.items():
            open_legs = engine.open_legs
            pace = open_legs.pace
            noted = pace.taken() if isinstance(pace, _NotedPace) else []
            legs = [_told(leg) for leg in open_legs.legs]
            if legs:
                self._told.add(url)
            if legs or noted or open_legs.last_sign >= now or url in before:
                shown = Shown(
                    open_legs.busy_since, open_legs.last_sign, legs, pushes.get(url, []), noted
                )
                told.setdefault(url, EngineLegs(url)).shown = shown

    def end(self, url: str, legs: Sequence[End], pushes: Sequence[End]) -> None:
        """See `LegsAtWorker`. Those that are over are not there any more."""
        engine = self._engines.known.get(url)
        if engine is not None and legs:
            open_legs = {(id(leg), leg.since): leg for leg in engine.open_legs.legs}
            for end in legs:  # in their order: the first one may be the cause
                leg = open_legs.get((end.number, end.since))
                if leg is None:
                    continue
                if end.of_source:
                    leg.source_lost(end.why)
                else:
                    leg.fail(_error(end))
        if pushes:
            awaiting = {(id(one), one.since): one for one in self.awaiting()}
            for end in pushes:
                push = awaiting.get((end.number, end.since))
                if push is not None:
                    push.push_lost()

    # -- asking

    async def works(self, url: str, wait: str) -> bool:
        """Return whether an engine is seen to work on all that it was sent: see
        `fleet.works.Works.on_all`.
        """
        return await self._ask(url, wait, None)

    async def is_push_lost(self, custody: Custody) -> bool:
        """Return whether a push is lost: see `serving.kv.late_pushes.LatePushes.is_lost`."""
        return not await self._ask(custody.prefill, "", (id(custody), custody.since))

    async def _ask(self, url: str, wait: str, push: Named | None) -> bool:
        """Ask whether a leg may go on waiting. It may not if there is no answer in time."""
        link, method = self._link, LegsOfWorker.may_wait
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWERED):
                while True:
                    try:
                        return await link.ask(link.question(), method, self._pool, url, wait, push)
                    except OverloadedError:  # there is no scheduler process yet
                        await asyncio.sleep(PATIENCE)
        return False


def _told(leg: OpenLeg) -> ToldLeg:
    return ToldLeg(
        id(leg),
        leg.since,
        leg.last_sign(),
        leg.prompt_bytes,
        leg.stalled_before,
        leg.is_counted,
        leg.must_progress,
        leg.waits_for,
    )


def _error(end: End) -> EngineError:
    """Return the error that ends a leg."""
    if end.wait is None:
        return EngineError(end.why)
    wait = Wait(end.wait)
    if wait is Wait.STALLED:
        return StandstillError(end.why, may_be_cause=end.may_be_cause)
    return EngineTimeoutError(end.why, wait=wait)
