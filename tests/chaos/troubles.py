"""Carries out the faults of a schedule: on engines, on links, on the pool. Each one ends what it
began.
"""

from __future__ import annotations

import asyncio
import contextlib

from pdproxy.fleet.member import MembershipError
from pdproxy.fleet.membership import SETTINGS
from tests.chaos.schedule import Fault
from tests.chaos.setup import PROXY
from tests.chaos.soundness import Soundness
from tests.chaos.virtual.transport import Link
from tests.chaos.world import ChaosEngine, World

_SLOW = 0.4
"""Seconds that a slow link takes more, and that a slow connect takes."""


class Troubles:
    """Makes faults happen in a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._engines = {engine.name: engine for engine in world.engines}
        self.soundness = Soundness(self._engines)

    async def happen(self, fault: Fault) -> None:
        """Let one happen, and end it."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            await self._happen(fault, self._engines[fault.engine])
        finally:
            for name in (fault.engine, fault.other):
                if name in self._engines:
                    self.soundness.disturbed(name, begun, loop.time())

    async def _happen(self, fault: Fault, engine: ChaosEngine) -> None:
        match fault.what:
            case "arm":
                number = engine.sim.faults.add(fault.spec)
                await asyncio.sleep(max(fault.seconds, 2.0))
                engine.sim.faults.remove(number)
                await self._back(engine, 0.0)
            case "restart":
                await engine.run(engine.sim.restart(min(fault.seconds, 1.0)))
            case "kill":
                await engine.run(engine.sim.kill())
                await self._back(engine, fault.seconds)
            case "terminate":
                await engine.run(engine.sim.terminate())
                await self._back(engine, fault.seconds)
            case "dead_core":
                engine.sim.engine.kill_core()
                await self._back(engine, fault.seconds)
            case "freeze":
                engine.sim.freeze_now(0.0)
                await asyncio.sleep(fault.seconds)
                await engine.run(engine.sim.thaw())
            case "core_freeze":
                await engine.run(engine.sim.freeze_core())
                await asyncio.sleep(fault.seconds)
                await engine.run(engine.sim.thaw_core())
            case "cut" | "half_cut" | "slow_link":
                await self._disturb(fault, engine)
            case "api_restart":
                await engine.run(
                    engine.sim.restart_api(min(fault.seconds, 1.0) if fault.number % 2 else 0.0)
                )
            case "slow_connect":
                self._world.network.connects[engine.host] = _SLOW
                await asyncio.sleep(fault.seconds)
                self._world.network.connects.pop(engine.host, None)
            case "remove":
                await self._remove(engine, fault)

    async def _back(self, engine: ChaosEngine, seconds: float) -> None:
        """Start an engine again after some seconds, as its supervisor would, unless something else
        did.
        """
        await asyncio.sleep(seconds)
        if engine.sim.life in ("down", "terminated") or engine.sim.engine.dead:
            await engine.run(engine.sim.restart())

    async def _disturb(self, fault: Fault, engine: ChaosEngine) -> None:
        other = PROXY if fault.other == "proxy" else self._engines[fault.other].host
        network = self._world.network
        links: list[Link] = [network.link(other, engine.host)]
        if fault.what != "half_cut":
            links.append(network.link(engine.host, other))
        for link in links:
            if fault.what == "slow_link":
                link.latency += _SLOW
            else:
                link.cut()
        await asyncio.sleep(fault.seconds)
        for link in links:
            if fault.what == "slow_link":
                link.latency -= _SLOW
            else:
                link.up(asyncio.get_running_loop())

    async def _remove(self, engine: ChaosEngine, fault: Fault) -> None:
        """Take an engine out of the pool, and put it back: every second time it is drained first,
        for half of the time.
        """
        await self._world.in_proxy(
            self._take_out(engine, fault.seconds / 2, at_once=fault.number % 2 == 0)
        )
        await asyncio.sleep(fault.seconds)
        await self._world.in_proxy(self._add(engine))

    async def _take_out(self, engine: ChaosEngine, seconds: float, *, at_once: bool) -> None:
        with contextlib.suppress(MembershipError):  # another fault has removed it
            self._world.proxy.membership.remove(
                engine.url, SETTINGS, at_once=at_once, seconds=seconds
            )

    async def _add(self, engine: ChaosEngine) -> None:
        self._world.proxy.membership.add(self._world.nodes[engine.name], SETTINGS)
