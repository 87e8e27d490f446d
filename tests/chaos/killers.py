"""Requests that make each engine disappear that begins them: how many engines each takes, and who
is served behind it.
"""

from __future__ import annotations

import asyncio
import random

from tests.chaos.clients import Visitors
from tests.chaos.finding import Finding, shortened
from tests.chaos.invariants import answered, calm
from tests.chaos.oracle import CHAT, COMPLETIONS, Body
from tests.chaos.schedule import Call
from tests.chaos.trace import Trace
from tests.chaos.world import World

MOST = 2
"""Engines that one request may take, of all roles together."""
_MARK = "makes its engine disappear"
_MOMENTS = ("queued", "mid_stream")
_BESIDE = 6
"""Other requests that come at the same time as the second one."""
_BACK = 20.0
"""Seconds until all engines are used as before."""


def killers(model: str) -> list[Body]:
    """Return the requests, without their right answers. Each has the mark also where another engine
    goes on with it.
    """
    fields = {"model": model, "temperature": 0, "max_tokens": 24, "user": _MARK}
    prompt, messages = (
        f"This {_MARK}. " * 9,
        [{"role": "user", "content": f"This one {_MARK}, too. " * 9}],
    )
    return [
        Body(COMPLETIONS, {**fields, "prompt": prompt}),
        Body(CHAT, {**fields, "messages": messages, "stream": True}),
    ]


class Killers:
    """Has them come. `visitors`: whose first bodies are those of `killers`; the others harm
    nobody.
    """

    def __init__(self, world: World, visitors: Visitors, trace: Trace) -> None:
        self._world = world
        self._visitors = visitors
        self._trace = trace

    async def run(self, seed: int, source: str) -> list[Finding]:
        """Run all, and return what was found."""
        chance = random.Random(f"{seed}/killers")
        found: list[Finding] = []
        for number, beside in enumerate((0, _BESIDE)):
            moment = "queued" if not number else chance.choice(_MOMENTS)
            for engine in self._world.engines:
                engine.sim.faults.add(f"kill@{moment}:rate=1,holds={_MARK}")
            self._trace.mark(f"request {number} kills its engines, {moment}")
            async with asyncio.TaskGroup() as group:
                for place in range(beside + 1):
                    group.create_task(
                        self._visit(
                            number if not place else 1 + place, f"killer-{number}-{place}", source
                        )
                    )
            taken = [engine.name for engine in self._world.engines if engine.sim.life == "down"]
            if len(taken) > MOST:
                found.append(
                    Finding(
                        "one request takes two engines at most", f"{', '.join(taken)}, {moment}"
                    )
                )
            await self._world.heal()
            await asyncio.sleep(_BACK)
        found += answered(self._visitors.outcomes)
        self._visitors.outcomes.clear()
        async with asyncio.TaskGroup() as group:
            for place in range(_BESIDE):
                group.create_task(self._visit(2 + place, f"behind-{place}", source))
        return shortened([*found, *calm(self._visitors.outcomes, {}, 0)])

    async def _visit(self, body: int, name: str, source: str) -> None:
        await self._visitors.visit(Call(-1, 0.0, "plain", (body,), 0.0), name, source)
