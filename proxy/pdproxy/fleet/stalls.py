"""Engines that stand still although they may answer probes: finds them, takes them out of use, and
lets them in again.

Owns a watch for each engine (`fleet.stall_watch`), and the one task that looks at all of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.health_canary import Enquiry, HealthCanary
from pdproxy.fleet.open_legs import OpenLeg
from pdproxy.fleet.stall_watch import LOOKS, StallWatch
from pdproxy.kit.clock import Clock
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.description import NODE, Label, counter
from pdproxy.observe.events import NodeChanged, Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.settings.health import Health
from pdproxy.settings.limits import Deadlines
from pdproxy.upstream.metrics_page import Scrape

STALLS = counter(
    "pdproxy_stalls_total", "stalls", "How often an engine was found to stand still", NODE
)
CANARIES = counter(
    "pdproxy_canaries_total",
    "requests",
    "Requests for one token by which engines that were silent were asked whether they work",
    NODE,
    Label(
        "result",
        (
            ("answered", "the engine works"),
            ("failed", "no answer in health.canary_timeout, or an error of the engine"),
            (
                "refused",
                "the engine serves no such requests, or has no place for one: this shows nothing",
            ),
        ),
    ),
)


class Stalls:
    """Watches every engine of a pool. A watcher of the registry. `hear`: awaited before each look,
    so that what legs have shown is known then.
    """

    def __init__(
        self,
        engines: EngineRegistry,
        ledger: Ledger,
        canary: HealthCanary,
        scrape: Callable[[str], Awaitable[Scrape]],
        observers: Observers,
        tasks: TaskOwner,
        clock: Clock,
        health: Health,
        deadlines: Deadlines,
        hear: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._hear = hear
        self.health, self.deadlines = health, deadlines
        self._engines = engines
        self._ledger = ledger
        self._canary = canary
        self._scrape = scrape
        self._observers = observers
        self._tasks = tasks
        self._clock = clock
        self._watches: dict[str, StallWatch] = {}
        self._suspected: list[StallWatch] = []
        engines.watch(self)
        observers.show(STALLS, self.stalls)
        observers.show(CANARIES, self.canaries)

    def start(self) -> None:
        """Look at all engines from now on, unless the settings have turned it off. Needs a running
        event loop.
        """
        if self.health.stalled_after:
            self._tasks.keep(self.run, "engines that stand still")

    def added(self, engine: Engine) -> None:
        """Watch one more engine."""
        self._watches[engine.url] = StallWatch(engine, self, self._clock.now())

    def removed(self, engine: Engine) -> None:
        """Watch an engine no more. Legs to it have their deadlines."""
        if (watch := self._watches.pop(engine.url, None)) is not None:
            watch.close()

    async def run(self) -> None:
        """Look at all engines at intervals, until cancelled."""
        last = self._clock.now()
        while True:
            interval = self.health.stalled_after / LOOKS
            await self._after(interval)
            if self._hear is not None:
                await self._hear()
            now = self._clock.now()
            held_up = now - last > 3 * interval
            last = now
            self.look(now, held_up=held_up)

    async def _after(self, seconds: float) -> None:
        over = asyncio.get_running_loop().create_future()
        timer = self._clock.after(seconds, lambda: None if over.done() else over.set_result(None))
        try:
            await over
        finally:
            timer.cancel()

    def look(self, now: float, *, held_up: bool = False) -> None:
        """Look at all engines once. `held_up`: the proxy itself stood still before, so that it
        could not see any sign.
        """
        for watch in list(self._watches.values()):
            if held_up:
                watch.excuse(now)
            watch.look(now)
        suspected, self._suspected = self._suspected, []
        for watch in suspected:
            watch.look(now)

    def stalls(self) -> list[tuple[tuple[str, ...], float]]:
        """Return how often each engine stood still."""
        return [((url,), watch.stalls) for url, watch in self._watches.items()]

    def canaries(self) -> list[tuple[tuple[str, ...], float]]:
        """Return how many canaries each engine got, by their result."""
        results = CANARIES.labels[1].known
        return [
            ((url, one), watch.canaries[one])
            for url, watch in self._watches.items()
            for one in results
        ]

    # -- for the watches

    def can_ask(self, engine: Engine) -> bool:
        """Return whether an engine may be asked for a token."""
        return self._canary.may_ask(engine)

    def enquire(self, engine: Engine, results: Counter[str]) -> Enquiry:
        """Begin to ask an engine."""
        return Enquiry(
            engine, self._canary, self._scrape, self._tasks.spawn, self._clock.now, results
        )

    def suspect(self, url: str, since: float) -> None:
        """Legs at other engines wait for an engine's KV, in silence since then."""
        if (watch := self._watches.get(url)) is not None:
            watch.suspect(since)
            self._suspected.append(watch)

    def is_last(self, engine: Engine) -> bool:
        """Return whether no other engine of its role can get requests."""
        engines = (other.in_ledger for other in self._engines.values() if other is not engine)
        return not any(
            ledger_engine.available
            for ledger_engine in engines
            if ledger_engine.role is engine.in_ledger.role
        )

    def stalled(self, engine: Engine, why: str) -> bool:
        """Take an engine out of use. Return whether it was in use."""
        if not self._ledger.mark_stalled(engine.url, why):
            return False
        self._observers.notify(
            NodeChanged(
                engine.url, engine.in_ledger.role.value, up=False, reason=why, state="stalled"
            )
        )
        return True

    def let_in(self, engine: Engine) -> None:
        """Let an engine show by one request that it works again."""
        if self._ledger.let_in(engine.url, self._clock.now()):
            reason = "it has shown a sign, and gets one request at first"
            self._observers.notify(
                NodeChanged(engine.url, engine.in_ledger.role.value, up=True, reason=reason)
            )

    def legs_waiting_for(self, url: str) -> Iterator[OpenLeg]:
        """Return the legs at other engines that wait for KV of this one."""
        for engine in list(self._engines.known.values()):
            for leg in list(engine.open_legs.legs):
                if leg.waits_for == url:
                    yield leg
