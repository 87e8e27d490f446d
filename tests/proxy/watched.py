"""A pool whose engines are watched for standing still, by a clock that a test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pdproxy_lab.sim.server import SimServer
from tests.fakes.client import Answer
from tests.fakes.clock import ManualClock
from tests.fakes.pool import Pair, pool
from tests.fakes.world import COMPLETIONS, until
from tests.proxy.test_both_legs import known

AFTER, LOOK = 8.0, 1.0
"""`health.stalled_after`, and the time between two looks."""


class Watched:
    """A pool whose engines are watched, and its clock."""

    def __init__(self, pair: Pair, clock: ManualClock) -> None:
        self.pair = pair
        self.clock = clock
        self.world = pair.world

    @property
    def sims(self) -> list[SimServer]:
        return [self.pair.p, self.pair.d, *self.pair.more]

    @property
    def stalled(self) -> list[str]:
        return [
            engine.url for engine in self.world.proxy.ledger.engines if engine.stalled is not None
        ]

    async def pass_(self, seconds: float) -> None:
        """Let time pass look by look. Engines that can answer what they are asked do so in
        between.
        """
        for _ in range(round(seconds / LOOK)):
            await self.clock.advance(LOOK)
            for _ in range(200):
                await asyncio.sleep(0.002)
                if not self._asked():
                    break

    def _asked(self) -> list[str]:
        """What engines were asked and can answer."""
        silent = {sim.url for sim in self.sims if sim.frozen}
        cores = {sim.url for sim in self.sims if sim.engine.stops.any}
        return [
            name
            for url, watch in self.world.proxy.stalls._watches.items()
            if watch._enquiry is not None and url not in silent
            for name, task in watch._enquiry._running.items()
            if not task.done() and not (url in cores and name.startswith("canary"))
        ]

    async def frozen_by(
        self, role: str, moment: str, body: dict[str, Any]
    ) -> tuple[SimServer, asyncio.Future[Answer]]:
        """Have a request's engine of a role stop at a moment. Return that engine and the
        request.
        """
        fault = f"core_freeze@{moment}"
        mine = [sim for sim in self.sims if sim.facts.role == role]
        for sim in mine:
            sim.faults.add(fault)
        asked = asyncio.ensure_future(self.pair.ask(COMPLETIONS, body))
        await until(lambda: any(sim.engine.stops.any for sim in mine))
        for sim in mine:
            sim.faults.clear()
        (frozen,) = [sim for sim in mine if sim.engine.stops.any]
        return frozen, asked


@asynccontextmanager
async def watched(
    connector: str = "nixl", canary_timeout: float = 60.0, **more: Any
) -> AsyncIterator[Watched]:
    """Run one. `more`: as of `pool`. At the end engines that stand still go on."""
    clock = ManualClock()
    health = {"stalled_after": AFTER, "canary_timeout": canary_timeout}
    async with pool(connector, clock=clock, health=health, **more) as pair:
        await known(pair)
        try:
            yield Watched(pair, clock)
        finally:
            for sim in (pair.p, pair.d, *pair.more):
                await sim.thaw_core()
                await sim.thaw()
