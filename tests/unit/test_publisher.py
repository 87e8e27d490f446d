"""What the scheduler process publishes arrives at all workers: the last values, in order, and no
more of them than there are keys, however little a worker reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdproxy.workers import links, publisher
from pdproxy.workers.scheduler_clients import SchedulerClient
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks
from tests.fakes.world import until
from tests.unit.test_remote_scheduler import settled

TOPIC = "numbers"


class Scheduler:
    """A scheduler process with numbers by names. `restored`: what workers had."""

    def __init__(self, **numbers: int) -> None:
        self.numbers = numbers
        self.links = SchedulerLinks(chooses=True, workers=1)
        self.made = 0
        """How often a value was made to be told."""
        self.topic = self.links.publisher.topic(TOPIC, self._value, self.numbers.keys)
        self.restored: list[tuple[str, int]] = []
        self.links.start()

    def _value(self, name: str) -> int | None:
        self.made += 1
        return self.numbers.get(name)

    def put(self, **numbers: int) -> None:
        self.numbers |= numbers
        for name in numbers:
            self.topic.changed(name)

    def drop(self, name: str) -> None:
        del self.numbers[name]
        self.topic.gone(name)

    def restores(self, early_for: float) -> None:
        self.topic.restore_by(int, lambda *one: self.restored.append(one), early_for)


class Worker:
    """A worker. `told`: what it was told."""

    def __init__(self, *, is_whole: bool = False) -> None:
        self.link = SchedulerLink()
        self.told: list[tuple[str, int | None]] = []
        self.topic = self.link.subscriber.subscribe(
            TOPIC,
            int,
            lambda *one: self.told.append(one),
            lambda name: self.told.append((name, None)),
            is_whole=is_whole,
        )
        self.topic.retained = lambda: self.topic.values

    def connect(self, scheduler: Scheduler) -> None:
        mine, its = links.pair()
        scheduler.links.connect(its)
        self.link.connect(mine)

    def taken(self) -> list[tuple[str, int | None]]:
        told, self.told = self.told, []
        return told


class Both:
    """A scheduler process and two workers, which were told all."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(a=1, b=2)
        self.workers = [Worker(), Worker()]
        self.schedulers = [self.scheduler]

    def another(self, **numbers: int) -> Scheduler:
        """Another scheduler process in place of a dead one. Nobody is connected yet."""
        self.schedulers[-1].links.stop()
        self.schedulers.append(Scheduler(**numbers))
        return self.schedulers[-1]

    def close(self) -> None:
        for worker in self.workers:
            worker.link.close()
        self.schedulers[-1].links.stop()


@pytest.fixture
async def both() -> AsyncIterator[Both]:
    made = Both()
    for worker in made.workers:
        worker.connect(made.scheduler)
    await settled()
    for worker in made.workers:
        assert worker.taken() == [("a", 1), ("b", 2)]
        assert worker.topic.has_all
    yield made
    made.close()


async def test_all_workers_are_told_what_changes_once_per_turn(both: Both) -> None:
    """In the order of the last changes. Each value is made once for all workers."""
    s, made = both.scheduler, both.scheduler.made
    for number in range(5):
        s.put(b=number, a=number)
    s.put(b=7)
    await settled()
    assert [worker.taken() for worker in both.workers] == [[("a", 4), ("b", 7)]] * 2
    assert s.made == made + 2
    s.numbers.pop("a")
    s.topic.changed("a")
    await settled()
    assert both.workers[0].taken() == [], "nothing is known of it"
    assert both.workers[0].topic.values == {"a": 4, "b": 7}
    s.drop("b")
    s.put(c=1)
    s.drop("c")
    s.put(c=2)
    await settled()
    assert both.workers[0].taken() == [("b", None), ("c", None), ("c", 2)]
    assert both.workers[0].topic.values == {"a": 4, "c": 2}


async def test_a_worker_that_does_not_read_is_told_the_last_values(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it reads. Others are told meanwhile; one that has left is told nothing more."""
    s, (first, second) = both.scheduler, both.workers
    of_first = next(iter(s.links.publisher._workers))
    behind = {of_first}
    monkeypatch.setattr(SchedulerClient, "unsent", property(lambda self: self in behind))
    for number in range(20):
        s.put(**{"ab"[number % 2]: number})
        await settled()
    s.drop("a")
    s.put(a=7)
    await settled()
    assert (first.taken(), s.links.publisher.behind) == ([], 1)
    assert len(second.taken()) == 22
    behind.clear()
    await until(lambda: first.told)
    assert first.taken() == [("b", 19), ("a", None), ("a", 7)]
    assert s.links.publisher.behind == 0
    behind.add(of_first)
    s.put(a=8)
    await settled()
    first.link.close()
    await settled()
    assert s.links.publisher.behind == 0


async def test_a_worker_is_told_all_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is never told more than it reads. It knows when it was told all."""
    monkeypatch.setattr(publisher, "PORTION", 100)
    sizes: list[int] = []
    size = 0
    publish = SchedulerClient.send

    def noted(self: SchedulerClient, item: bytes) -> None:
        nonlocal size
        if not size:
            asyncio.get_running_loop().call_soon(over)
        size += len(item)
        publish(self, item)

    def over() -> None:
        nonlocal size
        sizes.append(size)
        size = 0

    monkeypatch.setattr(SchedulerClient, "send", noted)
    scheduler, worker = Scheduler(**{f"n{at}": at for at in range(50)}), Worker()
    worker.connect(scheduler)
    await until(lambda: worker.topic.has_all)
    assert [number for _, number in worker.told] == [*range(50)]
    assert len(sizes) > 5
    assert max(sizes) < 130
    worker.link.close()
    scheduler.links.stop()


async def test_a_value_that_fails_keeps_back_no_other_one(
    both: Both, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither in the scheduler process, nor in a worker."""
    s, worker = both.scheduler, both.workers[0]
    s.put(a="no number", b=5)  # type: ignore[arg-type]
    await settled()
    assert worker.taken() == [("b", 5)]
    s.put(a=1 << 64, b=6)
    await settled()
    assert worker.taken() == [("b", 6)]
    assert [one.partition(" failed")[0].partition(" told")[0] for one in caplog.messages] == [
        "'numbers' of the scheduler process",
        "'numbers' of the scheduler process",
        "'numbers' could not be",
        "'numbers' could not be",
    ]


# -- a new scheduler process


async def test_a_new_scheduler_process_has_what_workers_have_before_it_tells(both: Both) -> None:
    """Also of keys that are there a moment later, but not long after."""
    second, worker = both.another(a=5), both.workers[0]
    second.restores(0.02)
    worker.taken()
    worker.connect(second)
    await settled()
    assert second.restored == [("a", 1)]
    assert worker.taken() == [("a", 5)]
    second.put(b=6)
    second.topic.found("b")
    await settled()
    assert second.restored == [("a", 1), ("b", 2)]
    third = both.another()
    third.restores(0.02)
    worker.connect(third)
    await asyncio.sleep(0.05)
    third.put(b=6)
    third.topic.found("b")
    await settled()
    assert third.restored == []


@pytest.mark.parametrize("is_whole", [False, True])
async def test_what_a_new_scheduler_process_does_not_tell(both: Both, is_whole: bool) -> None:
    """The key is gone, if the worker says so, but not before it was told all."""
    worker = Worker(is_whole=is_whole)
    both.workers.append(worker)
    worker.connect(both.scheduler)
    await settled()
    second = both.another(b=3, c=4)
    await settled()
    assert worker.topic.values == {"a": 1, "b": 2}
    worker.taken()
    worker.connect(second)
    await settled()
    assert worker.taken() == [("b", 3), ("c", 4), *([("a", None)] if is_whole else [])]
    assert ("a" in worker.topic.values) is not is_whole
