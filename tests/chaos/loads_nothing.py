"""One decode engine that can load no KV, with nothing else wrong: it fails fast, is named, and gets
almost nothing more.
"""

from __future__ import annotations

import asyncio

from pdproxy.observe.events import LegFailed
from tests.chaos.clients import Visitors
from tests.chaos.finding import Finding
from tests.chaos.oracle import BODIES
from tests.chaos.schedule import Call
from tests.chaos.trace import Trace
from tests.chaos.world import LIMITS, World

_FAULT = "load_failure@handed_over:rate=1"
_AT_ONCE, _TIMES = 4, 10
"""So many requests at once, so many times."""
_BACK = 8.0
"""Seconds until an engine that was started again is used."""
_TRIED = 30.0
"""Seconds until one whose KV moves again may be tried."""
_MOST = LIMITS.breaker_failures + _AT_ONCE + 4
"""Legs that may fail there: those that show it, those that were sent before that, and prompts that
try again.
"""


class LoadsNothing:
    """Runs it. With other connectors, an engine that can't load KV computes it, or its prefill
    engine fails.
    """

    def __init__(self, world: World, visitors: Visitors, trace: Trace) -> None:
        self._world = world
        self._visitors = visitors
        self._trace = trace

    async def run(self, source: str) -> list[Finding]:
        """Run it, and return what was found."""
        options = self._world.options
        decodes = [engine for engine in self._world.engines if engine.role == "decode"]
        if options.connector != "nixl" or len(decodes) < 2:
            return []
        bad = decodes[-1]
        await bad.run(bad.sim.restart())  # it has no prompt in its cache
        await asyncio.sleep(_BACK)
        self._trace.mark(f"{bad.name} loads nothing")
        bad.sim.faults.add(_FAULT)
        before = len(self._trace.events)
        for burst in range(_TIMES):
            async with asyncio.TaskGroup() as group:
                for place in range(_AT_ONCE):
                    number = burst * _AT_ONCE + place
                    call = Call(-1, 0.0, "plain", (number % BODIES,), 0.0)
                    group.create_task(
                        self._visitors.visit(call, f"kv-{number}", f"{source[:-1]}{place % 8 + 1}")
                    )
        named = any(bad.url in key for key in self._world.proxy.ledger.transfers.faults)
        events = self._trace.events[before:]
        failed = sum(isinstance(event, LegFailed) and event.node == bad.url for event in events)
        bad.sim.faults.clear()
        await asyncio.sleep(_TRIED)
        return loads_nothing(bad.name, failed, named=named)


def loads_nothing(name: str, failed: int, *, named: bool) -> list[Finding]:
    """An engine that can load no KV is named, and left out. `failed`: legs that failed there."""
    found = []
    if failed >= LIMITS.breaker_failures + 1 and not named:
        found.append(
            Finding("KV that does not move is named", f"{failed} legs have failed at {name}")
        )
    if failed > _MOST:
        found.append(
            Finding("KV that does not move is left out", f"{failed} legs have failed at {name}")
        )
    return found
