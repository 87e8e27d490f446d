"""The end of a run: an engine is removed for good, then the proxy is asked to stop while requests
come and are served.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from pdproxy.fleet.membership import SETTINGS
from pdproxy.serving.kv.orphans import REMEMBERED
from tests.chaos.answers import UNNAMED
from tests.chaos.clients import Outcome, Visitors
from tests.chaos.finding import Finding, shortened
from tests.chaos.oracle import BODIES
from tests.chaos.schedule import Call, Client
from tests.chaos.trace import Trace
from tests.chaos.virtual.pairs import DELAYS
from tests.chaos.world import DEADLINES, World

_CALLS, _WITHIN, _TERM = 12, 1.6, 0.8
"""So many requests within so many seconds, and the second at which the proxy is asked to stop."""
_CLIENTS: tuple[Client, ...] = ("plain", "plain", "plain", "kept", "pipelines", "leaves")
_GONE = 6.0
"""Seconds in which an engine is drained, and nothing of it is left: its leases and its last
probe.
"""
_AT_ONCE = 0.001
"""Seconds within which the order of two things is not known."""
_UNANSWERED = 3 * 2 * max(DELAYS) + _AT_ONCE
"""Seconds in which a request may wait at a worker until the scheduler process has said that it is
served: it is asked about its key, its tokens and its place. What waits is refused.
"""
_LONGEST = DEADLINES.drain + DEADLINES.abandoned_prefill + 2 * DEADLINES.release + 2.0
"""Seconds in which a proxy that is asked to stop has ended."""


class Ending:
    """Ends a world. `source`: the address of its last clients."""

    def __init__(self, world: World, visitors: Visitors, trace: Trace, source: str) -> None:
        self._world = world
        self._visitors = visitors
        self._trace = trace
        self._source = source

    async def remove(self, chance: random.Random) -> list[Finding]:
        """Remove an engine for good, and look for what is left of it."""
        engine = chance.choice(self._world.engines)
        await self._world.in_proxy(self._take_out(engine.url))
        has_notices = self._world.proxy.transfer.contract.handle_from_notice is not None
        # a notice may come of a leg that is remembered
        await asyncio.sleep(_GONE + REMEMBERED * has_notices)
        pages = [proxy.metrics.page().decode() for proxy in self._world.proxies]
        return [found for page in pages for found in series_left(page, engine.url)]

    async def _take_out(self, url: str) -> None:
        self._world.proxy.membership.remove(url, SETTINGS)

    async def stop(self, chance: random.Random) -> list[Finding]:
        """Ask the proxy to stop under load; by chance one engine stands still meanwhile."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        frozen = chance.choice(self._world.engines) if chance.random() < 0.3 else None
        async with asyncio.TaskGroup() as group:
            for number in range(_CALLS):
                client = chance.choice(_CLIENTS)
                bodies = tuple(
                    chance.randrange(BODIES)
                    for _ in range({"kept": 3, "pipelines": 2}.get(client, 1))
                )
                call = Call(
                    -1, chance.uniform(0, _WITHIN), client, bodies, float(chance.choice((0, 300)))
                )
                group.create_task(
                    self._come(begun, call, f"last-{number}"), name=f"chaos:last {number}"
                )
            await asyncio.sleep(_TERM)
            if frozen is not None:
                await frozen.run(frozen.sim.freeze())
            self._trace.mark(
                f"drain, {frozen.name if frozen is not None else 'no engine'} stands still"
            )
            asked = loop.time()
            await self._world.drain()
            took = loop.time() - asked
        if frozen is not None:
            await frozen.run(frozen.sim.thaw())
        early = _AT_ONCE if self._world.options.workers == 1 else _UNANSWERED
        return stopped(self._visitors.outcomes, asked, took, alone=frozen is None, early=early)

    async def _come(self, begun: float, call: Call, name: str) -> None:
        await asyncio.sleep(begun + call.at - asyncio.get_running_loop().time())
        await self._visitors.visit(call, name, self._source)


def series_left(page: str, url: str) -> list[Finding]:
    """Return the series of the metrics that still name a removed engine."""
    return shortened(
        [
            Finding("a removed engine leaves no series", f"{sample.name} {sample.labels}")
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if url in sample.labels.values()
        ]
    )


def stopped(
    outcomes: Iterable[Outcome],
    asked: float,
    took: float,
    *,
    alone: bool,
    early: float = _AT_ONCE,
) -> list[Finding]:
    """A proxy that is asked to stop serves what it has begun with, refuses the rest with
    `draining`, and ends in time.

    `asked`: when it was asked; `took`: seconds until all was over; `alone`: nothing else was wrong;
    `early`: seconds before, in which a request comes that was not begun with.
    """
    found = [Finding("a proxy ends in time", f"{took:.1f} s")] if took > _LONGEST else []
    for one in outcomes:
        if one.how in ("right", "left"):
            continue
        refused = one.how == "error" and one.reason in ("draining", UNNAMED) and one.ended >= asked
        # the port closes, and kept connections with it
        cut = one.how in ("refused", "cut") and one.began > asked
        late = not alone and one.how == "error" and one.ended >= asked
        if (
            not (refused and (one.ready is None or one.ready >= asked - early))
            and not cut
            and not late
        ):
            text = f"request {one.ident}, sent {one.began - asked:+.3f} s: {one.how} {one.detail}"
            found.append(Finding("a proxy that stops ends what it has begun", text))
    return shortened(found)
