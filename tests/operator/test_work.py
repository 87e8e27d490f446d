"""The queue: nothing that changes is missed, no key is worked on twice at once, failures come later
and later, and a user's change comes at once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from pdproxy.upstream.kubernetes import ApiError
from pdproxy_operator import work
from pdproxy_operator.work import GoneError, Queue, Result, Work


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def due(queue: Queue[str], clock: Clock, key: str) -> float:
    """In how many seconds a key is due."""
    return queue._due[key] - clock.now


async def test_a_key_is_worked_on_once_for_many_changes_and_again_for_one_meanwhile() -> None:
    clock = Clock()
    queue = Queue[str](clock, lambda: 0.5)
    for _ in range(3):
        queue.add("a")
    queue.add("b")
    assert len(queue) == 2
    assert [await queue.next(), await queue.next()] == ["a", "b"]
    queue.add("a")
    assert len(queue) == 0, "not while it is worked on"
    queue.done("a", Result.DONE)
    queue.done("b", Result.DONE)
    assert len(queue) == 1
    assert await queue.next() == "a"
    queue.done("a", Result.DONE)
    assert due(queue, clock, "a") == work.RESYNC
    queue.add_after("a", 5)
    assert due(queue, clock, "a") == 5
    queue.add_after("a", 50)
    assert due(queue, clock, "a") == 5


async def test_failures_come_later_and_later_and_only_a_user_can_change_that() -> None:
    clock = Clock()
    queue = Queue[str](clock, lambda: 1.0)
    queue.add("a")
    pauses = []
    for _ in range(12):
        assert await queue.next() == "a"
        queue.add("a")  # by what it has written itself
        queue.done("a", Result.FAILED)
        queue.add("a")
        assert len(queue) == 0
        pauses.append(due(queue, clock, "a"))
        clock.now += pauses[-1]
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    assert await queue.next() == "a"
    queue.done("a", Result.LATE)
    queue.add("a", is_fresh=True)
    assert len(queue) == 1
    assert await queue.next() == "a"
    queue.done("a", Result.FAILED)
    assert due(queue, clock, "a") == 1
    clock.now += 1
    await queue.next()
    queue.done("a", Result.GONE)
    assert queue._due == {}
    assert queue._failures == {}


async def test_work_is_bounded_and_each_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(work, "LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(work, "DEADLINE", 0.3)
    active: Counter[int] = Counter()
    most, results = 0, Counter[Result]()
    done: Counter[int] = Counter()
    chance = random.Random(1)

    async def reconcile(key: int) -> float | None:
        nonlocal most
        active[key] += 1
        most = max(most, active.total())
        assert active[key] == 1
        try:
            await asyncio.sleep(60 if key == 99 else 0.001)
            if key == 7:
                raise ApiError("refused")
            if key == 8:
                raise RuntimeError
            if key == 9:
                raise GoneError
        finally:
            active[key] -= 1
        done[key] += 1
        return None

    made = Work(reconcile, lambda result, _: results.update([result]), chance.random)
    task = asyncio.create_task(made.run())
    try:
        for _ in range(20):
            for key in (*range(10), 99):
                made.queue.add(key)
            await asyncio.sleep(0.03)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert most == work.WORKERS
    assert min(done[key] for key in range(7)) >= 5
    assert results[Result.FAILED] >= 10
    assert results[Result.GONE] >= 5
    assert results[Result.LATE] >= 1, "one that hangs is ended, and others go on meanwhile"
