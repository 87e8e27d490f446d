"""The audit of several workers: each counts what its legs have moved, and the scheduler process
compares the sums with what engines report.

Owns what a worker has not told yet, and the reports that wait until all workers have told.
"""

from __future__ import annotations

import asyncio

from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.engine import AuditAccount, Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.upstream.metrics_page import Scrape
from pdproxy.workers.leg_messages import EngineLegs
from pdproxy.workers.legs_of_all import LegsOfAll

GATHERED = 0.05
"""Seconds for which engines' reports are gathered: one question serves all of them."""


class _Moved:
    """Prompt tokens of one decode engine's legs: `loading` now, and how many of them were `told`;
    `arrived` and not told yet.
    """

    __slots__ = ("arrived", "loading", "told")

    def __init__(self) -> None:
        self.loading = self.told = self.arrived = 0


class WorkerAuditor(Auditor):
    """Counts the KV of this worker's legs. The scheduler process compares it with what engines
    report; accounts here are what it has found.
    """

    def __init__(self, engines: EngineRegistry, ledger: Ledger, observers: Observers) -> None:
        super().__init__(engines, ledger, observers)
        self._moved: dict[Engine, _Moved] = {}

    def asked(self, decode: Engine, prompt_tokens: int) -> None:
        """See `Auditor`."""
        moved = self._moved.get(decode)
        if moved is None:
            moved = self._moved[decode] = _Moved()
        moved.loading += self._blocks(prompt_tokens)

    def over(self, decode: Engine, prompt_tokens: int, *, loaded: bool) -> None:
        """See `Auditor`."""
        if (moved := self._moved.get(decode)) is not None:
            tokens = self._blocks(prompt_tokens)
            moved.loading = max(0, moved.loading - tokens)
            if loaded:
                moved.arrived += tokens

    def changes(self) -> dict[str, EngineLegs]:
        """Return what has changed since the last call, by engines."""
        changes: dict[str, EngineLegs] = {}
        for engine, moved in list(self._moved.items()):
            change = moved.loading - moved.told
            if change or moved.arrived:
                changes[engine.url] = EngineLegs(engine.url, change, moved.arrived)
                moved.told, moved.arrived = moved.loading, 0
            elif not moved.loading:
                del self._moved[engine]
        return changes

    def forget(self, url: str) -> EngineLegs:
        """Forget an engine that is gone. Return what was not told of it."""
        gone = [self._moved.pop(engine) for engine in list(self._moved) if engine.url == url]
        told, arrived = sum(one.told for one in gone), sum(one.arrived for one in gone)
        return EngineLegs(url, -told, arrived)

    def tell_anew(self) -> None:
        """Begin anew: of what loads now, nothing was told."""
        for moved in self._moved.values():
            moved.told = 0


class AuditorOfAll(Auditor):
    """Compares what the legs of all workers have moved with what engines report: once all have told
    it.
    """

    def __init__(
        self,
        engines: EngineRegistry,
        ledger: Ledger,
        observers: Observers,
        legs: LegsOfAll,
        tasks: TaskOwner,
    ) -> None:
        super().__init__(engines, ledger, observers)
        self._legs = legs
        self._tasks = tasks
        self._reports: dict[Engine, Scrape] = {}
        """What engines have reported and is not compared yet."""
        self.comparing: asyncio.Task[None] | None = None
        """What compares it, or has compared what was reported last."""
        legs.moved = self.moved

    def scraped(self, engine: Engine, scrape: Scrape) -> None:
        """See `Auditor`."""
        if engine.audit.account is None:
            super().scraped(engine, scrape)  # there is nothing to compare yet
        elif Role.DECODE in engine.in_ledger.uses:
            if not self._reports:
                self.comparing = self._tasks.spawn(self._compare(), "audit")
            self._reports[engine] = scrape

    def follow(self, engine: Engine, account: AuditAccount | None, *, blind: bool) -> None:
        """See `Auditor`. What is loading, workers tell."""
        super().follow(engine, account, blind=blind)
        if account is not None:
            account.loading = self._legs.loading(engine.url)

    async def _compare(self) -> None:
        await asyncio.sleep(GATHERED)
        reports, self._reports = self._reports, {}
        # What a worker that is stopped has moved, and not told, would be written off.
        if await self._legs.hear(legs=False):
            for engine, scrape in reports.items():
                super().scraped(engine, scrape)
