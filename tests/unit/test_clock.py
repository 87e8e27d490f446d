"""Deadlines on one timer: never early, soon after, gone when cancelled, and not reached because the
loop was held up.
"""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from pdproxy.kit.clock import TICK, Clock
from tests.fakes.clock import ManualClock, later_turns
from tests.fakes.garbage import left_to_the_collector
from tests.fakes.world import until


async def test_a_deadline_interrupts_what_takes_longer() -> None:
    """A block is ended by TimeoutError, not before its time."""
    clock, loop = Clock(), asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(TimeoutError), clock.within(0.12):
        await asyncio.Event().wait()
    assert loop.time() - started >= 0.12


async def test_what_is_done_in_time_goes_on() -> None:
    """A block that is left leaves no timer behind, and its task is not interrupted later."""
    clock = Clock()
    with clock.within(TICK):
        pass
    await asyncio.sleep(4 * TICK)
    assert repr(clock) == "<Clock 0 timers>"
    assert clock._next is None, "nothing to wait for: no timer of the loop"


async def test_a_deadline_that_is_disarmed_interrupts_nothing() -> None:
    """From then on the block takes as long as it takes; again, or behind the block, that changes
    nothing.
    """
    clock = ManualClock()
    within = clock.within(3)
    within.disarm()
    with within:
        await clock.advance(1)
        within.disarm()
        within.disarm()
        await clock.advance(9)
    within.disarm()
    assert not clock.pending()


async def test_a_cancellation_from_elsewhere_is_no_deadline() -> None:
    """Whoever cancels the task sees it cancelled, also where the deadline passes at the same
    moment.
    """
    clock = Clock()

    async def work() -> None:
        with clock.within(0.01):
            await asyncio.Event().wait()

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    clock._slots[next(iter(clock._slots))].popitem()[0].then()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_task_that_is_cancelled_behind_a_deadline_leaves_no_garbage() -> None:
    """It keeps its CancelledError, and with it the TimeoutError that it was handling."""
    clock = ManualClock()

    async def waits() -> None:
        try:
            with clock.within(1.0):
                await asyncio.Event().wait()
        except TimeoutError:
            await asyncio.Event().wait()

    with left_to_the_collector() as found:
        task = asyncio.create_task(waits())
        await later_turns()
        await clock.advance(1.5)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        del task
        await later_turns()
    assert not found


async def test_blocks_within_blocks() -> None:
    """The deadline that passes ends its own block, inner or outer."""
    clock = Clock()
    for outer, inner, ended in ((0.05, 100.0, "outer"), (100.0, 0.05, "inner")):
        seen = ""
        try:
            with clock.within(outer):
                try:
                    with clock.within(inner):
                        await asyncio.Event().wait()
                except TimeoutError:
                    seen = "inner"
        except TimeoutError:
            seen = "outer"
        assert seen == ended
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_an_error_is_not_hidden() -> None:
    """What a block raises comes out, and its return value is its own."""
    with pytest.raises(KeyError), Clock().within(1):
        raise KeyError


async def test_a_loop_that_was_held_up_reads_before_it_judges() -> None:
    """Data that came in time is not late because nobody could look."""
    clock = Clock()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        with clock.within(0.1):
            waiting = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(ours, 1))
            await asyncio.sleep(0)
            theirs.send(b"x")
            time.sleep(0.4)  # the machine stalls
            assert await waiting == b"x"


async def test_a_loop_that_is_held_up_again_and_again_reads_before_it_judges() -> None:
    """One hold-up follows another, each longer than the deadline: what comes between them is still
    in time.
    """
    clock = Clock()
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)

        def hold_up(times: int) -> None:
            time.sleep(0.25)
            if times:
                loop.call_soon(hold_up, times - 1)
            else:
                theirs.send(b"x")

        with clock.within(0.1):
            loop.call_soon(hold_up, 4)
            assert await loop.sock_recv(ours, 1) == b"x"


async def test_a_loop_that_is_always_held_up_still_reaches_its_deadlines() -> None:
    """Each turn of the loop takes longer than a tick: timers are called late, and are called."""
    clock, loop, busy = Clock(), asyncio.get_running_loop(), True

    def hold_up() -> None:
        time.sleep(3 * TICK)
        if busy:
            loop.call_soon(hold_up)

    loop.call_soon(hold_up)

    async def wait() -> None:
        with clock.within(2 * TICK):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wait(), 60)
    busy = False


async def test_many_timers_come_all_come() -> None:
    """Timers far apart, most of them cancelled, are called once each."""
    clock, seen = Clock(), list[int]()
    timers = [
        clock.after(0.01 * number, lambda number=number: seen.append(number))  # type: ignore[misc]
        for number in range(40)
    ]
    far = [clock.after(3600 + number, lambda: seen.append(-1)) for number in range(300)]
    for timer in (*timers[::2], *far):
        timer.cancel()
    await until(lambda: not clock._slots)
    assert sorted(seen) == list(range(1, 40, 2))


async def test_a_manual_clock_calls_timers_in_order_and_lets_the_loop_run() -> None:
    """Time stands still until it is advanced; what a timer wakes up goes on before the next one,
    and may set another.
    """
    clock, seen = ManualClock(), list[str]()
    begun = clock.now()

    async def sleeper(seconds: float) -> None:
        try:
            with clock.within(seconds):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append(f"{clock.now() - begun:.0f}")
            clock.after(1, lambda: seen.append("and 1"))

    tasks = [asyncio.create_task(sleeper(seconds)) for seconds in (5, 3)]
    cancelled = clock.after(4, lambda: seen.append("cancelled"))
    await asyncio.sleep(2 * TICK)
    cancelled.cancel()
    assert (seen, clock.pending()) == ([], [3, 5])
    await clock.advance(2.9)
    assert seen == []
    await clock.advance(7)
    assert seen == ["3", "and 1", "5", "and 1"]
    assert clock.now() - begun == pytest.approx(9.9)
    await asyncio.gather(*tasks)


async def test_a_manual_clock_reaches_one_wait_by_its_seconds() -> None:
    """`reach` waits until the timer is set; later ones stay. `through` finds by itself what has to
    end.
    """
    clock, seen = ManualClock(), list[int]()
    asyncio.get_running_loop().call_later(TICK, lambda: clock.after(7, lambda: seen.append(7)))
    clock.after(9, lambda: seen.append(9))
    await clock.reach(7)
    assert seen == [7]

    async def wait() -> str:
        with pytest.raises(TimeoutError), clock.within(50):
            await asyncio.Event().wait()
        return "over"

    assert await clock.through(wait()) == "over"
    assert seen == [7, 9]
