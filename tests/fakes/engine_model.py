"""Engines without HTTP behind an admission of its own, in virtual time: how requests fare under
load, at little cost.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from pdproxy.deciding.local_admission import LocalAdmission
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import PdproxyError
from pdproxy.observe.events import Observers
from pdproxy.scheduling.admission import Place, RequestDemand
from pdproxy.serving.access.clients import Client, Clients
from pdproxy.settings.limits import Deadlines, Limits, Overload
from tests.chaos.virtual.loop import VirtualLoop
from tests.chaos.virtual.network import VirtualNetwork

STEPS = 4
"""Tokens that are made between two looks at the batch: fewer events."""
WITHIN = 2.0
"""Times the time without load that each request has."""
Shape = tuple[int, int]
"""Tokens of a prompt and of an answer."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class Pool:
    """What there is. Times in seconds: a step of one sequence, what each further one adds; `noise`:
    how much steps scatter.

    `unlike`: how much answers' lengths scatter, which nobody knows before. `together`: prompts that
    wait are prefilled in one step, at whose end all of them are ready.
    """

    places: int = 16
    batch: int = 16
    step: float = 0.01
    further: float = 0.000_1
    prefill_tokens_per_s: float = 20_000.0
    noise: float = 0.0
    unlike: float = 0.0
    together: bool = False
    shapes: tuple[Shape, ...] = ((256, 64),)

    def unloaded(self, shape: Shape) -> float:
        """Return the seconds that a request takes without others."""
        return shape[0] / self.prefill_tokens_per_s + shape[1] * self.step

    @property
    def capacity(self) -> float:
        """Requests per second, if as many at once took no longer than one."""
        return self.batch * len(self.shapes) / sum(self.unloaded(shape) for shape in self.shapes)


class Engines:
    """One that prefills, one by one or together, also what was given up; and one that decodes
    `batch` sequences at once.
    """

    def __init__(self, pool: Pool, chance: random.Random) -> None:
        self._pool, self._chance = pool, chance
        self._prefilled = 0.0
        self._prompts: dict[asyncio.Future[None], float] = {}
        self._prefills = False
        self._running: dict[asyncio.Future[None], int] = {}
        self._waiting: dict[asyncio.Future[None], int] = {}
        self._steps = False
        self.slower = 1.0

    async def serve(self, shape: Shape) -> None:
        """Return once the answer is made."""
        loop = asyncio.get_running_loop()
        took = shape[0] / self._pool.prefill_tokens_per_s * self.slower
        if self._pool.together:
            ready = loop.create_future()
            self._prompts[ready] = took
            if not self._prefills:
                loop.call_soon(self._prefill)
                self._prefills = True
            await ready
        else:
            self._prefilled = max(self._prefilled, loop.time()) + took
            await asyncio.sleep(self._prefilled - loop.time())
        done = loop.create_future()
        self._waiting[done] = shape[1]
        try:
            if not self._steps:
                self._step()
            await done
        finally:
            self._waiting.pop(done, None)
            self._running.pop(done, None)

    def _prefill(self) -> None:
        prompts, self._prompts = self._prompts, {}
        self._prefills = bool(prompts)
        if prompts:
            asyncio.get_running_loop().call_later(
                sum(prompts.values()), self._prefilled_all, list(prompts)
            )

    def _prefilled_all(self, prompts: list[asyncio.Future[None]]) -> None:
        for ready in prompts:
            if not ready.done():
                ready.set_result(None)
        self._prefill()

    def _step(self) -> None:
        while self._waiting and len(self._running) < self._pool.batch:
            first = next(iter(self._waiting))
            self._running[first] = self._waiting.pop(first)
        self._steps = bool(self._running)
        if self._running:
            count = min(STEPS, *self._running.values())
            seconds = (
                count
                * (self._pool.step + self._pool.further * (len(self._running) - 1))
                * self.slower
            )
            seconds *= self._chance.lognormvariate(0.0, self._pool.noise)
            asyncio.get_running_loop().call_later(
                seconds, self._stepped, count, list(self._running)
            )

    def _stepped(self, count: int, batch: list[asyncio.Future[None]]) -> None:
        for done in batch:
            if done in self._running:
                self._running[done] -= count
                if self._running[done] <= 0:
                    del self._running[done]
                    done.set_result(None)
        self._step()


class Model:
    """An admission before engines, and two tenants, a and b, with weights 3 and 1. Make it in a
    virtual loop.
    """

    names = "ab"
    """The tenants of requests, in turn."""
    hurry: Mapping[str, float] = MappingProxyType({})
    """What the times of a tenant's requests are multiplied by."""

    def __init__(self, pool: Pool, seed: int, timeout: float = 30.0) -> None:
        self._pool, self._chance = pool, random.Random(seed)
        self.engines = Engines(pool, random.Random(seed + 1))
        self.clock = Clock(now=asyncio.get_running_loop().time)
        self.admission = LocalAdmission(
            Limits(max_inflight=pool.places, max_queue=1024),
            Deadlines(queue=timeout),
            Overload(),
            Observers([]),
            self.clock,
            Clients(()),
        )
        self._clients = {name: Client(name) for name in "ab"}
        self._clients["a"].weight = 3.0

    def set_weight(self, name: str, weight: float) -> None:
        """Give a tenant another weight."""
        self._clients[name].weight = weight

    async def enter(self, name: str) -> Place:
        """Take a place for a request without a deadline."""
        return await self.admission.enter(Client(name), RequestDemand(1, 1, 1))

    async def load(self, times: float, seconds: float, *, asks: bool = True) -> Counter[str]:
        """Send so many times the capacity; return what became of it: good, good of a, late, or the
        reason of a refusal.

        `asks`: whether clients name their deadlines.
        """
        loop, found, tasks = asyncio.get_running_loop(), Counter[str](), set[asyncio.Task[None]]()
        due, end, number = loop.time(), loop.time() + seconds, 0
        while due < end:
            await asyncio.sleep(due - loop.time())
            shape = self._chance.choice(self._pool.shapes)
            tasks.add(
                asyncio.create_task(
                    self._one(self.names[number % len(self.names)], shape, found, asks=asks)
                )
            )
            number += 1
            due += self._chance.expovariate(times * self._pool.capacity)
        await asyncio.wait(tasks)
        return found

    async def _one(self, name: str, shape: Shape, found: Counter[str], *, asks: bool) -> None:
        loop, pool = asyncio.get_running_loop(), self._pool
        began, time = loop.time(), WITHIN * pool.unloaded(shape) * self.hurry.get(name, 1.0)
        place: Place | None = None
        admitted, what = began, "good"
        limit: int | None = shape[1]
        if pool.unlike:
            limit, shape = (
                None,
                (shape[0], math.ceil(self._chance.lognormvariate(math.log(shape[1]), pool.unlike))),
            )
        try:
            with self.clock.within(time if asks else 3600.0):
                place = await self.admission.enter(
                    self._clients[name],
                    RequestDemand(shape[0], 1, limit),
                    began + time if asks else None,
                )
                admitted = loop.time()
                await self.engines.serve(shape)
        except TimeoutError:
            what = "504"
        except PdproxyError as error:
            what = str(error.reason and error.reason.value)
        finally:
            if place is not None:
                made = shape[1] if what == "good" else None
                seconds = loop.time() - admitted
                place.leave(seconds, shape[0], made, late=what == "504", answered=what == "good")
        if what == "good" and loop.time() - began > time:
            what = "late"
        found[what] += 1
        if what == "good":
            found[f"good of {name}"] += 1


def in_virtual_time(run: Callable[[], Coroutine[Any, Any, Found]]) -> Found:
    """Run something in a virtual loop of its own."""
    loop = VirtualLoop(VirtualNetwork())
    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()
