"""The audit of several workers: the scheduler process compares, and expects what the requests of
all have moved.
"""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.engine import AuditAccount, Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import KvCounted, KvShortfall, Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import EngineSpec, Role
from pdproxy.upstream.metrics_page import Scrape
from pdproxy.workers import audit, legs_of_all, links
from pdproxy.workers.audit import AuditorOfAll, WorkerAuditor
from pdproxy.workers.legs_of_all import LegsOfAll
from pdproxy.workers.legs_of_worker import LegsAtWorker
from pdproxy.workers.own_legs import OwnLegs
from pdproxy.workers.scheduler_links import SchedulerLinks
from tests.fakes.recorder import Recorder
from tests.fakes.registry import registry, unused_client

D = "http://d:1"


class Process(Recorder):
    """What a process has of one decode engine."""

    def __init__(self) -> None:
        super().__init__()
        self.engines, self.ledger = registry()
        self.engine: Engine = self.engines.add(EngineSpec(D, Role.DECODE), unused_client(D))

    def audited(self) -> tuple[EngineRegistry, Ledger, Observers]:
        return self.engines, self.ledger, Observers([self])


class Worker(Process):
    """A worker's audit."""

    def __init__(self) -> None:
        super().__init__()
        self.audit = WorkerAuditor(*self.audited())
        self.links = SchedulerLinks(chooses=False, workers=2)
        self.links.start()
        self.legs = OwnLegs(self.links.link, 0, self.engines, self.audit, lambda: 1.0)
        self.legs.added(self.engine)

    def moves(self, tokens: int) -> None:
        """A leg whose KV arrives."""
        self.audit.asked(self.engine, tokens)
        self.audit.over(self.engine, tokens, loaded=True)


class Asked:
    """A stopped worker's legs: they tell nothing."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def tell_legs(self, number: int, *, legs: bool) -> None:
        self.numbers.append(number)

    def end(self, *_: object) -> None:
        """No leg is ended."""


class Schedules(Process):
    """The scheduler process with its workers."""

    def __init__(self, workers: int = 2) -> None:
        super().__init__()
        self.links = SchedulerLinks(chooses=True, workers=workers)
        self.tasks = TaskOwner("audit")
        self.legs = LegsOfAll(self.links, 0, self.engines, self.tasks)
        self.audit: Auditor = AuditorOfAll(*self.audited(), self.legs, self.tasks)
        self.workers = [Worker() for _ in range(workers)]
        self.links.start()
        self.links.choose()
        for worker in self.workers:
            self.connect(worker)

    def connect(self, worker: Worker) -> None:
        mine, its = links.pair()
        self.links.connect(mine)
        worker.links.connect(its)

    async def scraped(self, external: float, started: float = 1.0) -> None:
        by_source = {"external_kv_transfer": external}
        self.audit.scraped(self.engine, _page(started, by_source))
        while self.tasks._tasks:
            await asyncio.sleep(0)

    async def scraped_often(self, external: float) -> None:
        for _ in range(4):
            await self.scraped(external)

    @property
    def missing(self) -> int:
        return sum(one.tokens for one in self.events if isinstance(one, KvShortfall))

    def close(self) -> None:
        for worker in self.workers:
            worker.links.stop()
        self.links.stop()


def _page(started: float, by_source: dict[str, float]) -> Scrape:
    return Scrape(started, 16, 0.0, None, 0.0, by_source)


@pytest.fixture
async def both(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit, "GATHERED", 0.0)
    made = Schedules()
    await made.legs.hear()
    for _ in range(20):
        await asyncio.sleep(0)
    yield made
    made.close()


async def test_kv_of_all_workers_requests_is_expected(both: Schedules) -> None:
    """Without it, what one has moved would be a surplus that hides another one's shortfall."""
    await both.scraped(0)
    both.workers[0].moves(100)
    both.workers[1].moves(300)
    await both.scraped_often(300)  # 100 tokens of the 400 never came
    assert both.missing == 100
    assert sum(one.moved for one in both.events if isinstance(one, KvCounted)) == 300
    assert both.workers[0].events == both.workers[1].events == []


async def test_no_alarm_while_everything_arrives(both: Schedules) -> None:
    await both.scraped(50)
    worker = both.workers[1]
    worker.audit.asked(worker.engine, 200)  # its engine may count it before it sends data
    await both.scraped(250)
    await both.scraped(250)
    worker.audit.over(worker.engine, 200, loaded=True)
    await both.scraped_often(250)
    assert both.missing == 0


async def test_what_a_worker_that_ends_has_moved_was_moved(both: Schedules) -> None:
    """Its prompts that were loading will not arrive, and their engine may count them, or not."""
    await both.scraped(0)
    both.workers[0].moves(100)
    both.workers[0].audit.asked(both.workers[0].engine, 500)
    await both.scraped(100)
    account = both.engine.audit.account
    assert account is not None
    assert (account.expected, account.loading) == (100, 500)
    both.workers[0].links.stop()
    both.workers[1].moves(40)
    await both.scraped_often(140)
    assert (account.expected, account.loading, both.missing) == (140, 0, 0)


async def test_an_engine_that_is_gone_is_forgotten(both: Schedules) -> None:
    """By the worker and by the scheduler process, which has no reason to ask for it any more."""
    await both.scraped(0)
    worker = both.workers[0]
    worker.audit.asked(worker.engine, 100)
    await both.scraped(0)
    assert both.legs.loading(D) == 100
    worker.audit.over(worker.engine, 100, loaded=True)
    worker.engines.remove(D)
    for _ in range(20):
        await asyncio.sleep(0)
    assert (worker.audit._moved, both.legs.loading(D)) == ({}, 0)
    account = both.engine.audit.account
    assert account is not None
    assert (account.expected, account.loading) == (100, 0)


async def test_another_scheduler_process_goes_on_with_the_account(both: Schedules) -> None:
    """What was missing stays so. Workers tell again what is loading, and nothing twice."""
    await both.scraped(0)
    worker = both.workers[0]
    worker.moves(160)
    worker.audit.asked(worker.engine, 500)
    await both.scraped_often(60)
    assert both.missing == 100
    known = both.engine.audit.account
    both.links.stop()
    again = Schedules(0)
    again.audit.follow(again.engine, known, blind=False)
    again.connect(worker)
    for _ in range(20):
        await asyncio.sleep(0)
    assert again.audit.missing() == {D: 100}
    worker.moves(40)
    await again.scraped_often(100)
    assert again.missing == 0
    account = again.engine.audit.account
    assert account is not None
    assert (account.expected, account.loading) == (200, 500)
    again.close()


async def test_a_restart_begins_anew(both: Schedules) -> None:
    await both.scraped(0)
    both.workers[1].moves(300)
    for _ in range(5):
        await both.scraped(0, started=2.0)
    assert both.missing == 0


async def test_a_worker_that_is_stopped_is_waited_for_once(
    both: Schedules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compared meanwhile: what it has moved, and not told, is no surplus."""
    monkeypatch.setattr(legs_of_all, "WITHIN", 0.01)
    await both.scraped(0)
    stopped, other = both.workers
    asked = Asked()
    stopped.links.link.serve(LegsAtWorker, asked)
    stopped.moves(100)
    other.moves(100)
    await both.scraped_often(200)
    account = both.engine.audit.account
    assert isinstance(account, AuditAccount)
    (number,) = asked.numbers
    assert account.expected == 100
    stopped.legs.tell_legs(number, legs=False)
    stopped.links.link.serve(LegsAtWorker, stopped.legs)
    await asyncio.sleep(0.01)
    assert account.expected == 200
    stopped.moves(20)
    await both.scraped_often(210)
    assert (account.expected, both.missing) == (220, 10)


def test_what_is_over_is_not_kept() -> None:
    """Engines come and go."""
    worker = Worker()
    worker.moves(100)
    for _ in range(2):
        worker.audit.changes()
    assert worker.audit._moved == {}
