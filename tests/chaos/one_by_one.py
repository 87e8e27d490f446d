"""One stream and one engine that fails, several times: with nothing else wrong, each stream must be
complete and right.
"""

from __future__ import annotations

import asyncio
import random

from tests.chaos.clients import Visitors
from tests.chaos.continued_rules import unbroken
from tests.chaos.finding import Finding
from tests.chaos.oracle import GENERATES
from tests.chaos.schedule import Call, Fault, Trouble
from tests.chaos.trace import Trace
from tests.chaos.troubles import Troubles
from tests.chaos.world import ChaosEngine, World

TIMES = 4
"""Streams of a run."""
_KINDS: tuple[Trouble, ...] = (
    *("kill", "restart", "terminate", "dead_core", "freeze", "core_freeze", "cut", "half_cut"),
)
_SECONDS = 6.0
"""How long an engine is down, or a link is cut: longer than each single wait of a stream."""
_BACK = 20.0
"""Seconds until all engines are used as before: breakers, canaries, leases."""


class OneByOne:
    """Runs them. `visitors`: whose bodies are streams that may go on."""

    def __init__(self, world: World, visitors: Visitors, troubles: Troubles, trace: Trace) -> None:
        self._world = world
        self._visitors = visitors
        self._troubles = troubles
        self._trace = trace
        self._broken: dict[str, str] = {}

    async def run(self, seed: int, source: str) -> list[Finding]:
        """Run all, and return what was found."""
        for number in range(TIMES):
            chance = random.Random(f"{seed}/one/{number}")
            kind, after = chance.choice(_KINDS), chance.uniform(0.0, 0.8)
            for engine in self._world.engines:
                engine.sim.requests.clear()
            name = f"one-{number}"
            call = Call(-1, 0.0, "plain", (number,), 0.0)
            asking = asyncio.create_task(
                self._visitors.visit(call, name, source), name=f"chaos:{name}"
            )
            await asyncio.sleep(after)
            victim = self._victim(chance)
            if victim is not None and not asking.done():
                self._broken[f"{name}-0"] = f"{kind} of {victim.name} after {after:.3f} s"
                self._trace.mark(f"{kind} {victim.name}")
                other = "proxy" if kind in ("cut", "half_cut") else ""
                await self._troubles.happen(Fault(-1, 0.0, kind, victim.name, _SECONDS, other))
            await asking
            await self._world.heal()
            await asyncio.sleep(_BACK)
        return unbroken(self._visitors.outcomes, self._broken)

    def _victim(self, chance: random.Random) -> ChaosEngine | None:
        """Return an engine that has a part in the request, if others can do the same; None if there
        is none.
        """
        answering = self._world.answering
        able = [
            engine
            for engine in self._world.engines
            if any(request.path in GENERATES for request in engine.sim.requests)
            and (engine.name not in answering or len(answering) > 1)
        ]
        return chance.choice(able) if able else None
