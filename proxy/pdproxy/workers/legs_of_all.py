"""What the legs of all workers show of engines, in the scheduler process.

It asks all workers at once, when an engine's own numbers have just been read, or are to be read.
Their answers come behind all that they have told before. A worker that does not answer in time is
not waited for until it answers again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.engine import AuditAccount, Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.upstream.metrics_page import Scrape
from pdproxy.workers.leg_messages import Ask, EngineLegs, decode_of_worker, encode, topic
from pdproxy.workers.scheduler_clients import SchedulerClient
from pdproxy.workers.scheduler_links import SchedulerLinks

WITHIN = 0.25
"""Seconds for which workers' answers are waited for."""
GATHERED = 0.05
"""Seconds for which engines' reports are gathered: one question serves all of them."""


class LegsOfAll:
    """Those of the pool with number `pool`."""

    def __init__(self, links: SchedulerLinks, pool: int) -> None:
        self._topic = topic(pool)
        self._asked: dict[SchedulerClient, dict[str, int]] = {}
        """The workers that are asked, with the prompt tokens whose KV is loading for them, by
        engines.
        """
        self._late: set[SchedulerClient] = set()
        """Those of them that have not answered in time."""
        self._number = 0
        self._waiting: dict[int, tuple[set[SchedulerClient], asyncio.Future[None]]] = {}
        """Who has still to answer, by the numbers of the questions."""
        self.moved: Callable[[str, int, int], None] = lambda url, loading, arrived: None
        """Takes an engine's URL, and what has changed in prompt tokens: those whose KV is loading,
        and how many have arrived.
        """
        links.hears[self._topic] = self._heard
        links.leaves.append(self._left)

    def __repr__(self) -> str:
        return f"<LegsOfAll of {len(self._asked)} workers, {len(self._late)} of them late>"

    async def hear(self) -> bool:
        """Wait until all workers have told what their legs have shown, for some time at most.
        Return whether they have.
        """
        self._number += 1
        number, body = self._number, encode(Ask(self._number))
        asked = {one for one in self._asked if one not in self._late}
        if not asked:
            return not self._late
        over = asyncio.get_running_loop().create_future()
        self._waiting[number] = asked, over
        for client in asked:
            client.say(self._topic, body)
        try:
            async with asyncio.timeout(WITHIN):
                await over
        except TimeoutError:
            self._late |= asked
        finally:
            del self._waiting[number]
        return not self._late

    def loading(self, url: str) -> int:
        """Return the prompt tokens whose KV is loading at an engine, as workers have told."""
        return sum(loading.get(url, 0) for loading in self._asked.values())

    def _heard(self, client: SchedulerClient, body: bytes) -> None:
        told = decode_of_worker(body)
        loading = self._asked.setdefault(client, {})
        for one in told.engines:
            self._take(loading, one)
        self._late.discard(client)
        self._answered(client, told.number)

    def _take(self, loading: dict[str, int], one: EngineLegs) -> None:
        left = loading.pop(one.url, 0) + one.loading
        if left:
            loading[one.url] = left
        self.moved(one.url, one.loading, one.arrived)

    def _left(self, client: SchedulerClient) -> None:
        """A worker says no more: its legs have ended."""
        for url, tokens in self._asked.pop(client, {}).items():
            self.moved(url, -tokens, 0)
        self._late.discard(client)
        for number in list(self._waiting):
            self._answered(client, number)

    def _answered(self, client: SchedulerClient, number: int) -> None:
        asked, over = self._waiting.get(number, (set(), None))
        asked.discard(client)
        if over is not None and not asked and not over.done():
            over.set_result(None)


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
        if await self._legs.hear():
            for engine, scrape in reports.items():
                super().scraped(engine, scrape)
