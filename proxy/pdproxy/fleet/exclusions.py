"""Compares engines with their peers at intervals, and excludes outliers (`scheduling.outliers`)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.description import NODE, Label, Samples, counter
from pdproxy.observe.events import NodeChanged, Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.outliers import Exclusion, Outliers
from pdproxy.settings.health import OutlierSettings

REASONS = ("errors", "latency")
EXCLUSIONS = counter(
    "pdproxy_exclusions_total",
    "exclusions",
    "How often an engine was excluded as an outlier (outliers)",
    NODE,
    Label(
        "reason",
        (
            ("errors", "it failed more often than its peers"),
            ("latency", "it was slower than its peers"),
        ),
    ),
)


class Exclusions:
    """Excludes the outliers of a pool, at the interval of `settings`; 0: never. A watcher of the
    registry.
    """

    def __init__(
        self,
        engines: EngineRegistry,
        ledger: Ledger,
        outliers: Outliers,
        observers: Observers,
        tasks: TaskOwner,
        now: Callable[[], float],
        settings: OutlierSettings,
    ) -> None:
        self._engines = engines
        self._ledger = ledger
        self._outliers = outliers
        self._observers = observers
        self._tasks = tasks
        self._now = now
        self._settings = settings
        self._counts: dict[str, Counter[str]] = {}
        engines.watch(self)
        observers.show(EXCLUSIONS, self._shown)

    def start(self) -> None:
        """Compare engines from now on, unless the settings have turned it off. Needs a running
        event loop.
        """
        if self._settings.interval:
            self._tasks.keep(self.run, "outliers")

    def added(self, engine: Engine) -> None:
        """Count its exclusions from now on."""
        self._counts[engine.url] = Counter()

    def removed(self, engine: Engine) -> None:
        """Forget an engine."""
        self._counts.pop(engine.url, None)
        self._outliers.forget(engine.url)

    async def run(self) -> None:
        """Compare engines until cancelled."""
        while True:
            await asyncio.sleep(self._settings.interval)
            await self.compare()

    async def compare(self) -> None:
        """Compare engines once, and exclude outliers."""
        groups: dict[Role, list[str]] = {}
        for url, engine in self._engines.items():
            if engine.in_ledger.available:
                groups.setdefault(engine.in_ledger.role, []).append(url)
        now = self._now()
        steps = self._outliers.judging(now, groups.values())
        while True:
            try:
                next(steps)
            except StopIteration as over:
                outliers: list[Exclusion] = over.value
                break
            await asyncio.sleep(0)
        for found in outliers:
            if self._engines.get(found.url) is None:  # it was removed meanwhile
                self._outliers.forget(found.url)
            elif self._ledger.exclude(found.url, found.why, now + found.seconds, now):
                self._counts[found.url][found.reason] += 1
                role = self._engines[found.url].in_ledger.role.value
                reason = f"{found.why}: excluded for {found.seconds:g} s"
                self._observers.notify(
                    NodeChanged(found.url, role, up=False, reason=reason, state="excluded")
                )

    def _shown(self) -> Samples:
        return [
            ((url, reason), counts[reason])
            for url, counts in self._counts.items()
            for reason in REASONS
        ]
