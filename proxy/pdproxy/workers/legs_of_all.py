"""What the legs of all workers show of engines, in the scheduler process.

It asks all workers at once, when an engine's own numbers have just been read, or are to be read.
Their answers come behind all that they have told before. A worker that does not answer in time is
not waited for until it answers again. Their questions, whether a leg may go on waiting, are
answered here, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.tasks import TaskOwner
from pdproxy.serving.kv.lost_pushes import AwaitedPush
from pdproxy.workers.leg_messages import EngineLegs
from pdproxy.workers.legs_of_worker import LegsOfWorker, Named
from pdproxy.workers.scheduler_links import SchedulerLinks

WITHIN = 0.25
"""Seconds for which workers' answers are waited for."""
LONGEST = 1.0
"""Seconds for which anybody waits for them: the question before may be open still."""


class LegsOfAll:
    """Those of the pool with number `pool`."""

    def __init__(
        self, links: SchedulerLinks, pool: int, engines: EngineRegistry, tasks: TaskOwner
    ) -> None:
        self._engines = engines
        self._tasks = tasks
        self._workers: dict[LegsOfWorker, None] = {}
        """Those that are asked."""
        self._number = 0
        self._missing: dict[LegsOfWorker, None] = {}
        """Who has still to answer the last question."""
        self._all_told = asyncio.Event()
        self._next: asyncio.Future[bool] | None = None
        """What is set behind the answers to the next question."""
        self._with_legs = False
        """Whether that asks for legs."""
        self._asking: asyncio.Task[None] | None = None
        self.moved: Callable[[str, int, int], None] = lambda url, loading, arrived: None
        """Takes an engine's URL, and what has changed in prompt tokens: those whose KV is loading,
        and how many have arrived.
        """
        self._works: Callable[[str, str], Awaitable[bool]] = _never
        self._is_push_lost: Callable[[AwaitedPush], Awaitable[bool]] = _never
        links.greets.append(lambda client: LegsOfWorker(self, client, pool))

    def __repr__(self) -> str:
        return f"<LegsOfAll {self._workers!r}>"

    def answer(
        self,
        works: Callable[[str, str], Awaitable[bool]],
        is_push_lost: Callable[[AwaitedPush], Awaitable[bool]],
    ) -> None:
        """Answer workers' questions by these."""
        self._works, self._is_push_lost = works, is_push_lost

    def loading(self, url: str) -> int:
        """Return the prompt tokens whose KV is loading at an engine, as workers have told."""
        return sum(worker.loading.get(url, 0) for worker in self._workers)

    def pushes(self) -> list[AwaitedPush]:
        """Return the pushes that workers' legs await, as they were told last."""
        return [
            push
            for worker in self._workers
            for pushes in worker.pushes.values()
            for push in pushes.values()
        ]

    # -- asking workers

    async def hear(self, *, legs: bool = True) -> bool:
        """Wait until all workers have told what they have seen until now, for some time at most.
        Return whether they have. `legs`: whether their open legs are needed, too.
        """
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        self._with_legs = self._with_legs or legs
        over = self._next
        if self._asking is None:
            self._asking = self._tasks.spawn(self._ask(), "legs of workers")
        try:
            async with asyncio.timeout(LONGEST):
                return await asyncio.shield(over)
        except TimeoutError:
            return False

    async def _ask(self) -> None:
        """Ask, one question behind another, while somebody waits for the next answers."""
        try:
            while (over := self._next) is not None:
                self._next = None
                try:
                    await self._ask_once()
                finally:
                    over.set_result(not any(one.is_late for one in self._workers))
        finally:
            self._asking = None

    async def _ask_once(self) -> None:
        self._number += 1
        legs, self._with_legs = self._with_legs, False
        self._missing = {worker: None for worker in self._workers if not worker.is_late}
        if not self._missing:
            return
        self._all_told.clear()
        for worker in self._missing:
            worker.ask(self._number, legs=legs)
        try:
            async with asyncio.timeout(WITHIN):
                await self._all_told.wait()
        except TimeoutError:
            for worker in self._missing:
                worker.is_late = True

    def _told(self, worker: LegsOfWorker) -> None:
        self._missing.pop(worker, None)
        if not self._missing:
            self._all_told.set()

    # -- what workers say

    def tell(self, worker: LegsOfWorker, number: int, engines: Sequence[EngineLegs]) -> None:
        """See `LegsOfWorker`."""
        self._workers[worker] = None
        for one in engines:
            self._take(worker, one)
        if number:
            worker.is_late = False
        if number == self._number:
            self._told(worker)

    def _take(self, worker: LegsOfWorker, one: EngineLegs) -> None:
        if one.loading or one.arrived:
            worker.moved(one)
            self.moved(one.url, one.loading, one.arrived)
        engine = self._engines.known.get(one.url)
        if one.shown is not None and engine is not None:
            worker.show(one.url, engine.open_legs, one.shown)

    def left(self, worker: LegsOfWorker) -> None:
        """A worker says no more: its legs have ended."""
        self._workers.pop(worker, None)
        for url, tokens in worker.loading.items():
            self.moved(url, -tokens, 0)
        for url, legs in worker.legs.items():
            if (engine := self._engines.known.get(url)) is not None:
                for leg in legs.values():
                    engine.open_legs.legs.pop(leg, None)
        self._told(worker)

    async def may_wait(self, worker: LegsOfWorker, url: str, wait: str, push: Named | None) -> bool:
        """See `LegsOfWorker`."""
        async with worker.at_once:
            if push is None:
                return await self._works(url, wait)
            await self.hear()
            awaited = worker.push(push)
            return awaited is None or not await self._is_push_lost(awaited)


async def _never(*_: object) -> bool:
    return False
