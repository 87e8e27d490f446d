"""The retry budget: shares, turns, deadlines, and that no place is lost whoever leaves at which
moment.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from pdproxy.deciding.retry_budget import RetryBudget, RetrySlot
from pdproxy.settings.limits import Deadlines, Limits
from tests.fakes.clock import ManualClock

SECONDS = 5.0


class Made:
    """A budget, and how many requests are in flight."""

    def __init__(self, share: float = 0.2, least: int = 2, most: int = 1000) -> None:
        self.clock = ManualClock()
        self.inflight = 0
        limits = Limits(retry_share=share, min_retries=least, max_inflight=most)
        self.budget = RetryBudget(
            limits, Deadlines(retry=SECONDS), lambda: self.inflight, self.clock
        )

    def enter(self) -> asyncio.Task[RetrySlot | None]:
        return asyncio.ensure_future(self.budget.enter())


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_share_of_the_requests_in_flight_and_some_in_any_case() -> None:
    """A small proxy has few requests: some of them may be tried again whatever the share is."""
    made = Made()
    assert made.budget.limit == 2
    made.inflight = 100
    assert made.budget.limit == 20
    slots = [await made.budget.enter() for _ in range(20)]
    assert all(slots)
    assert made.budget.running == 20
    late = made.enter()
    await turns()
    assert (late.done(), made.budget.waiting) == (False, 1)
    made.inflight = 110
    assert await made.budget.enter() is not None
    assert await late is not None, "who waits longer is first"


async def test_turns_are_taken_in_order() -> None:
    """First come, first served; a place that is left twice is left once."""
    made = Made(least=1)
    first = await made.budget.enter()
    assert first is not None
    waiting = [made.enter() for _ in range(3)]
    await turns()
    for n, one in enumerate(waiting):
        first.leave()
        first.leave()
        await turns()
        assert [task.done() for task in waiting] == [True] * (n + 1) + [False] * (2 - n)
        slot = one.result()
        assert slot is not None
        first = slot
    first.leave()
    assert (made.budget.running, made.budget.waiting) == (0, 0)


async def test_who_waits_too_long_gets_none() -> None:
    """Then the client gets the error of its last attempt. Nor does one wait behind too many."""
    made = Made(least=1, most=2)
    slot = await made.budget.enter()
    waiting = [made.enter() for _ in range(2)]
    await turns()
    assert await made.budget.enter() is None
    await made.clock.advance(SECONDS)
    assert [await one for one in waiting] == [None, None]
    assert (made.budget.refused, made.budget.waiting, made.budget.running) == (3, 0, 1)
    assert slot is not None
    slot.leave()
    assert await made.budget.enter() is not None


@pytest.mark.parametrize("granted", [False, True])
async def test_a_client_that_leaves_gives_its_place_to_the_next(granted: bool) -> None:
    """Also at the very moment at which its turn has come."""
    made = Made(least=1)
    slot = await made.budget.enter()
    assert slot is not None
    leaves, stays = made.enter(), made.enter()
    await turns()
    if granted:
        slot.leave()
    leaves.cancel()
    await turns()
    if not granted:
        slot.leave()
    assert await stays is not None
    assert (made.budget.running, made.budget.waiting) == (1, 0)


async def test_no_order_of_calls_loses_a_place() -> None:
    """A thousand requests that come, leave, are cancelled and time out."""
    chance = random.Random(7)
    made = Made(least=3, share=0.1)
    tasks: list[asyncio.Task[RetrySlot | None]] = []
    slots: list[RetrySlot] = []
    for _ in range(1000):
        made.inflight = chance.randrange(80)
        match chance.randrange(6):
            case 0 | 1:
                tasks.append(made.enter())
            case 2 if tasks:
                tasks.pop(chance.randrange(len(tasks))).cancel()
            case 3 | 4 if slots:
                slots.pop(chance.randrange(len(slots))).leave()
            case 5:
                await made.clock.advance(chance.random() * SECONDS / 3)
        if chance.random() < 0.7:
            await turns(2)
        for task in [one for one in tasks if one.done()]:
            tasks.remove(task)
            if not task.cancelled() and (slot := task.result()) is not None:
                slots.append(slot)
        assert made.budget.running <= max(8, len(slots) + len(tasks) + 8)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    slots += [
        slot for task in tasks if not task.cancelled() and (slot := task.result()) is not None
    ]
    for slot in slots:
        slot.leave()
    assert (made.budget.running, made.budget.waiting, len(made.budget._waiting)) == (0, 0, 0)


async def test_half_of_a_thousand_requests_are_tried_again_within_the_share() -> None:
    """All of them end, and never more than the share at once."""
    made = Made(least=10)
    made.inflight = 1000
    most = 0

    async def retry() -> bool:
        nonlocal most
        slot = await made.budget.enter()
        if slot is None:
            return False
        most = max(most, made.budget.running)
        await turns(3)
        slot.leave()
        return True

    assert all(await asyncio.gather(*(retry() for _ in range(500))))
    assert most == 200
    assert (made.budget.running, made.budget.refused) == (0, 0)


async def test_a_turn_that_comes_with_the_deadline_is_taken() -> None:
    """At the very moment at which the wait is over: the place is the request's, and is lost to
    nobody.
    """
    made = Made(least=1)
    slot = await made.budget.enter()
    assert slot is not None
    late = made.enter()
    await turns()
    ((timer,),) = made.clock._slots.values()
    slot.leave()
    timer.then()
    taken = await late
    assert taken is not None
    assert (made.budget.running, made.budget.refused, made.budget.waiting) == (1, 0, 0)
    taken.leave()
    assert made.budget.running == 0
