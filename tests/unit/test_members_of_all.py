"""What the scheduler process tells workers of members, what the supervisor keeps of it for its
successor, and the log level that operators set.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from pdproxy.fleet.member import Drain, Member
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.formats import make_formatter
from pdproxy.observe.lines import LineWriter
from pdproxy.observe.logs import Log, set_level
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import SettingsError
from pdproxy.workers import publisher
from pdproxy.workers.followed_members import FollowedMembers
from pdproxy.workers.kept import KEPT, Keeper, keep
from pdproxy.workers.links import Message, pair
from pdproxy.workers.log_level import LevelOfAll, follow
from pdproxy.workers.members import MembersOfAll
from pdproxy.workers.scheduler_clients import SchedulerClient
from pdproxy.workers.scheduler_links import SchedulerLinks
from tests.fakes.world import until


class Pool:
    """A membership, and its registry. `done`: what was done to it."""

    def __init__(self, *urls: str) -> None:
        self.members: dict[str, Member] = {}
        self.done: list[str] = []
        self.refused: set[str] = set()
        self.when_changed: Any = lambda _: None
        for url in urls:
            self.add(url)

    def add(self, url: str, source: str = "settings", drain: Drain | None = None) -> None:
        settings = ConfiguredEngine(url=url, role="decode")
        self.members[url] = Member(settings, source, 1.0, drain=drain)
        self.when_changed(url)

    def put(
        self,
        settings: ConfiguredEngine,
        source: str,
        heirs: Iterable[str],
        since: float,
        drain: Drain | None,
    ) -> None:
        if settings.url in self.refused:
            raise SettingsError("no key")
        self.done.append(f"put {settings.url}")
        self.members[settings.url] = Member(settings, source, since, drain=drain)
        self.when_changed(settings.url)

    def take_out(self, url: str) -> None:
        self.done.append(f"take out {url}")
        del self.members[url]
        self.when_changed(url)

    def go_on(self) -> None:
        self.done.append("go on")

    def keep_known(self, named: Any) -> None:
        self.named = named


class Supervisor:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.keeper: Keeper | None = None
        self.is_stopped = False
        self.messages = 0

    def process(self) -> Keeper:
        """Another scheduler process."""
        self.keeper = Keeper(self.send, dict(self.kept))
        return self.keeper

    def send(self, message: Message) -> None:
        if not self.is_stopped:
            self.messages += 1
            answer = keep(self.kept, message)
            assert answer.kind == KEPT
            assert self.keeper is not None
            asyncio.get_running_loop().call_soon(self.keeper.received, answer)


class Scheduler:
    """A scheduler process with one pool."""

    def __init__(self, supervisor: Supervisor, *urls: str) -> None:
        self.pool = Pool(*urls)
        self.links = SchedulerLinks(chooses=True, workers=1)
        self.keeper = supervisor.process()
        self.members = MembersOfAll(self.links, self.keeper, lambda: 0.0)
        self.members.add(self.pool, self.pool)  # type: ignore[arg-type]
        self.tasks = TaskOwner("test")

    def start(self) -> None:
        self.members.start(self.tasks)
        self.links.start()
        self.members.has_workers = True

    async def stop(self) -> None:
        self.links.stop()
        await self.tasks.settle(0)


class Worker:
    """A worker."""

    def __init__(self, *urls: str) -> None:
        self.pool = Pool(*urls)
        self.links = SchedulerLinks(chooses=False, workers=1)
        self.members = FollowedMembers(self.links.link)
        self.members.add(self.pool, self.pool)  # type: ignore[arg-type]
        self.links.start()

    def connect(self, scheduler: Scheduler) -> None:
        for links, end in zip((scheduler.links, self.links), pair(), strict=True):
            links.connect(end)


def _urls(count: int) -> list[str]:
    return [f"http://e:{number}" for number in range(1, count + 1)]


async def test_a_worker_is_told_all_members_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has and nobody tells goes once it was told all."""
    monkeypatch.setattr(publisher, "PORTION", 1000)
    urls = _urls(50)
    scheduler, worker = Scheduler(Supervisor(), *urls), Worker("http://old:1", urls[0])
    scheduler.start()
    worker.connect(scheduler)
    assert not worker.members.is_known
    await until(lambda: worker.members.is_known)
    assert list(worker.pool.members) == urls
    assert worker.pool.done == [*(f"put {url}" for url in urls), "take out http://old:1"]
    await scheduler.stop()
    worker.links.stop()


async def test_a_worker_that_does_not_read_is_told_how_members_are_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that went and came again is another engine; one that came and went is not told."""
    scheduler, worker = Scheduler(Supervisor(), *_urls(2)), Worker()
    scheduler.start()
    worker.connect(scheduler)
    await until(lambda: worker.members.is_known)
    worker.pool.done.clear()
    unsent = 1
    monkeypatch.setattr(SchedulerClient, "unsent", property(lambda _: unsent))
    for _ in range(3):
        scheduler.pool.take_out("http://e:1")
        scheduler.pool.add("http://e:1")
        scheduler.pool.add("http://e:3")
        scheduler.pool.take_out("http://e:3")
        await asyncio.sleep(0)
    await asyncio.sleep(0.1)
    assert worker.pool.done == []
    unsent = 0
    await until(lambda: worker.pool.done)
    assert worker.pool.done == ["take out http://e:1", "put http://e:1"]
    await scheduler.stop()
    worker.links.stop()


async def test_a_successor_has_the_same_members() -> None:
    """Those of the settings of the start are not all that there are. Workers keep their engines,
    but for those that it does not have.
    """
    supervisor = Supervisor()
    first, worker = Scheduler(supervisor, *_urls(2)), Worker(*_urls(2))
    first.start()
    worker.connect(first)
    first.pool.take_out("http://e:1")
    first.pool.add("http://a:1", "admin", Drain("admin", 1.0, 2.0, removes=True))
    first.pool.add("http://d:1", "dns://d:1")
    assert await first.keeper.all_kept(1.0)
    await until(lambda: len(worker.pool.members) == 3)
    await first.stop()
    worker.pool.done.clear()

    second = Scheduler(supervisor, *_urls(2))
    second.pool.refused.add("http://d:1")
    second.start()
    assert {url: one.source for url, one in second.pool.members.items()} == {
        "http://e:2": "settings",
        "http://a:1": "admin",
    }
    assert second.pool.members["http://a:1"].drain == Drain("admin", 1.0, 2.0, removes=True)
    assert second.members.shortcomings() == [
        "http://d:1, which dns://d:1 has added, can't be used: no key"
    ]
    second.pool.add("http://d:1", "dns://d:1")
    assert second.members.shortcomings() == []
    worker.connect(second)
    await until(lambda: len(worker.pool.done) == 3)
    assert not [one for one in worker.pool.done if one.startswith("take out")]
    await second.stop()
    del supervisor.kept["members 0 http://a:1"]
    third = Scheduler(supervisor, *_urls(2))
    third.start()
    worker.connect(third)
    await until(lambda: [*worker.pool.members] == [*third.pool.members])
    assert worker.pool.done[-1] == "take out http://a:1"
    await third.stop()
    worker.links.stop()


async def test_what_is_kept_in_one_turn_is_one_message() -> None:
    """And it is known whether the supervisor keeps it."""
    supervisor = Supervisor()
    keeper = supervisor.process()
    for number in range(10):
        keeper.keep("a 1", b"%d" % number)
        keeper.keep("b", b"x")
    assert await keeper.all_kept(1.0)
    assert (supervisor.messages, supervisor.kept) == (1, {"a 1": b"9", "b": b"x"})
    keeper.keep("a 1", None)
    keeper.keep("a 2", b"y")
    assert await keeper.all_kept(1.0)
    assert supervisor.process().kept_of("a") == [b"y"]
    supervisor.is_stopped = True
    keeper.keep("b", b"z")
    assert not await keeper.all_kept(0.02)
    supervisor.is_stopped = False


def _log() -> Log:
    return Log(LineWriter(io.StringIO(), str), make_formatter("text"), shows_requests=True)


@pytest.mark.parametrize(("settings", "level"), [("info", "debug"), ("warning", "warning")])
async def test_the_log_level_of_operators_is_that_of_all(settings: str, level: str) -> None:
    """Also of a successor, unless the settings have another one than then."""
    supervisor = Supervisor()
    logs = [_log() for _ in range(3)]
    try:
        scheduler, worker = Scheduler(supervisor), Worker()
        follow(worker.links.link.subscriber, logs[1])
        told = LevelOfAll(scheduler.links.publisher, scheduler.keeper, logs[0])
        told.take_over(lambda: "info")
        scheduler.start()
        worker.connect(scheduler)
        await until(lambda: worker.members.is_known)
        set_level(logs[0], "debug", by="admin")
        told.changed()
        await until(lambda: (logs[1].level, logs[1].level_set_by) == ("debug", "admin"))
        late = Worker()
        follow(late.links.link.subscriber, logs[2])
        late.connect(scheduler)
        await until(lambda: logs[2].level == "debug")
        assert await scheduler.keeper.all_kept(1.0)
        await scheduler.stop()
        set_level(logs[2], settings)
        successor = Scheduler(supervisor)
        LevelOfAll(successor.links.publisher, successor.keeper, logs[2]).take_over(lambda: settings)
        assert logs[2].level == level
        for one in (worker, late):
            one.links.stop()
    finally:
        set_level(logs[0], "info")
        for log in logs:
            log.close()


async def test_an_engine_that_drains_waits_for_a_later_answer() -> None:
    """What a worker has answered before this process had nothing left there does not count."""
    scheduler, worker = Scheduler(Supervisor(), "http://e:1"), Worker()
    in_ledger = SimpleNamespace(requests=1)
    scheduler.members._engines[0] = {  # type: ignore[call-overload]
        "http://e:1": SimpleNamespace(in_ledger=in_ledger)
    }
    needed: Any = scheduler.pool.named
    needs = {"http://e:1"}
    worker.members._needs = lambda pool, url: url in needs  # type: ignore[method-assign]
    scheduler.start()
    scheduler.pool.add("http://e:1", drain=Drain("admin", 1.0, 2.0, removes=True))
    scheduler.members.has_workers = False
    assert needed() == ["http://e:1"], "workers are to be connected yet"
    worker.connect(scheduler)
    scheduler.members.has_workers = True
    assert needed() == ["http://e:1"], "no worker has answered"
    await until(lambda: worker.members.is_known)
    (known,) = scheduler.members.workers
    needs.clear()
    for _ in range(3):
        scheduler.members._ask_workers()
        await until(lambda: known.answered == known.asked > 0)
        assert needed() == ["http://e:1"], "it still has a request here"
    in_ledger.requests = 0
    assert needed() == ["http://e:1"], "a worker may have its KV"
    needs.add("http://e:1")
    scheduler.members._ask_workers()
    await until(lambda: known.answered == known.asked)
    assert needed() == ["http://e:1"]
    needs.clear()
    scheduler.members._ask_workers()
    await until(lambda: known.answered == known.asked)
    assert needed() == []
    await scheduler.stop()
    worker.links.stop()
