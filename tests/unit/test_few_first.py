"""Few requests are tried again at first, then more and more; a permit is given back once, however
its wait has ended.
"""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.deciding.few_first import MOMENT, SINGLY, FewFirst, Permit
from tests.fakes.clock import ManualClock


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Tried:
    """Requests that come all at once; the test ends those that run."""

    def __init__(self, first: FewFirst, count: int) -> None:
        self.running: list[Permit] = []
        self.refused = 0
        self._first = first
        self._tasks = [asyncio.ensure_future(self._one()) for _ in range(count)]

    async def _one(self) -> None:
        permit = await self._first.enter(5.0)
        if permit is None:
            self.refused += 1
        else:
            self.running.append(permit)

    async def steps(self) -> list[int]:
        """End those that run, step by step; return how many ran in each."""
        found: list[int] = []
        while True:
            await turns()
            running, self.running = self.running, []
            if not running:
                return found
            found.append(len(running))
            for permit in running:
                permit.leave()
                permit.leave()


async def test_one_after_the_other_then_twice_as_many() -> None:
    clock = ManualClock()
    first = FewFirst(clock)
    assert await Tried(first, SINGLY + 16).steps() == [1] * SINGLY + [2, 4, 8, 2]
    assert (first.running, clock.timers) == (0, 0)


async def test_behind_another_loss_it_begins_again() -> None:
    first = FewFirst(ManualClock())
    tried = Tried(first, SINGLY + 4)
    for _ in range(SINGLY):
        await turns()
        tried.running.pop().leave()
    first.again()
    await turns()
    for permit in tried.running[:]:
        permit.leave()
    tried.running.clear()
    assert await tried.steps() == [1, 1]


async def test_once_none_is_left_the_next_loss_begins_with_one() -> None:
    first = FewFirst(ManualClock())
    assert (await Tried(first, SINGLY + 4).steps())[-1] > 1
    assert await Tried(first, 3).steps() == [1] * 3


async def test_each_has_a_moment() -> None:
    """The next one begins although the one before has neither data nor an end; that one leaves
    later, which changes nothing.
    """
    clock = ManualClock()
    first = FewFirst(clock)
    tried = Tried(first, 3)
    await turns()
    for count in (1, 2, 3):
        assert len(tried.running) == count
        await clock.reach(MOMENT)
        await turns()
    for permit in tried.running:
        permit.leave()
    assert first.running == 0


async def test_without_a_moment_each_has_all_the_time_it_needs() -> None:
    """Until one is answered: then all begin."""
    clock = ManualClock()
    first = FewFirst(clock, singly=1, moment=None)
    tried = Tried(first, SINGLY * 2)
    await turns()
    await clock.advance(2 * MOMENT)
    assert len(tried.running) == 1
    first.open()
    await turns()
    assert len(tried.running) == SINGLY * 2


async def test_behind_one_that_did_no_harm_twice_as_many_begin() -> None:
    """80 of them within seven moments. Others that have ended say nothing."""
    clock = ManualClock()
    first = FewFirst(clock, singly=1, moment=None)
    tried = Tried(first, 80 + 10)
    for _ in range(10):
        await turns()
        (permit,) = tried.running
        tried.running.clear()
        permit.leave(harmless=False)
    found = []
    while True:
        await turns()
        running, tried.running = tried.running, []
        if not running:
            break
        found.append(len(running))
        for permit in running:
            permit.leave_in(MOMENT)
        await clock.advance(MOMENT)
    assert found == [1, 2, 4, 8, 16, 32, 17]
    assert (first.running, clock.timers) == (0, 0)


async def test_those_that_began_before_a_loss_say_nothing_behind_it() -> None:
    clock = ManualClock()
    first = FewFirst(clock, singly=1, moment=None)
    tried = Tried(first, 8)
    for count in (1, 2):
        await turns()
        assert len(tried.running) == count
        while tried.running:
            tried.running.pop().leave()
    await turns()
    assert len(tried.running) == 4
    first.again()
    while tried.running:
        tried.running.pop().leave()
    await turns()
    assert len(tried.running) == 1


async def test_a_permit_is_left_later() -> None:
    """It has places in two orders, which are left together, once; what is said last counts."""
    clock = ManualClock()
    of_client, alike = (FewFirst(clock, singly=1, moment=None) for _ in range(2))
    permit = await of_client.enter(5.0)
    assert permit is not None
    assert await alike.enter(5.0, permit) is permit
    assert await alike.enter(5.0, waits=False) is None
    permit.leave_in(1.0)
    await clock.advance(0.5)
    permit.leave_in(1.0, harmless=False)
    await clock.advance(0.9)
    assert (of_client.running, alike.running) == (1, 1)
    await clock.advance(0.2)
    permit.leave_in(1.0)
    permit.leave()
    assert (of_client.running, alike.running, of_client.limit, alike.limit, clock.timers) == (
        0,
        0,
        1,
        1,
        0,
    )


async def test_who_waits_too_long_or_leaves_takes_no_permit() -> None:
    clock = ManualClock()
    first = FewFirst(clock, singly=1, moment=None)
    permit = await first.enter(5.0)
    assert permit is not None
    tried = Tried(first, 2)
    await turns()
    tried._tasks[0].cancel()
    await clock.advance(6.0)
    await turns()
    assert tried.refused == 1
    permit.leave()
    assert first.running == 0


@pytest.mark.parametrize("cancels", [True, False])
async def test_a_permit_that_comes_as_its_wait_ends_is_not_lost(cancels: bool) -> None:
    first = FewFirst(ManualClock(), singly=1, moment=None)
    permit = await first.enter(5.0)
    assert permit is not None
    tried = Tried(first, 2)
    await turns()
    permit.leave(harmless=False)  # the next one has it, and does not know it yet
    if cancels:
        tried._tasks[0].cancel()
    await turns()
    assert len(tried.running) == 1
    assert first.running == 1
