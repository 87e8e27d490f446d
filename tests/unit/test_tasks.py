"""Background tasks: those that must always run are started again, and what failed is counted, said
and logged without words.
"""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdproxy.kit.clock import TICK, Clock
from pdproxy.kit.frames import FIRST_FRAMES, LAST_FRAMES, MAX_CAUSES, frames
from pdproxy.kit.tasks import MAX_NAME, Failures, Pauses, TaskOwner
from tests.fakes.clock import later_turns
from tests.fakes.garbage import left_to_the_collector
from tests.fakes.world import until

FAST = Pauses(first=0.001, longest=0.004, well=60)
SECRET = "PROMPTSECRET"


class Runs:
    """A task whose runs the test decides on: each an exception to raise, None to return, or a wait
    until it is cancelled.
    """

    def __init__(self, *ends: BaseException | None) -> None:
        self.ends = list(ends)
        self.started = 0

    async def run(self) -> None:
        """One run."""
        self.started += 1
        if not self.ends:
            await asyncio.Event().wait()
        end = self.ends.pop(0)
        if end is not None:
            raise end


async def test_a_task_that_fails_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    """However it ends: by an exception, by returning, by the cancellation of something that it
    waited for.
    """
    owner = TaskOwner("test", FAST)
    runs = Runs(ValueError(SECRET), None, asyncio.CancelledError(), KeyError(SECRET))
    owner.keep(runs.run, "one")
    await until(lambda: runs.started == 5)
    assert dict(owner.failures()) == {"one": 4}
    (said,) = owner.shortcomings()
    assert "background task one has failed 4 times" in said
    assert "KeyError" in said
    assert await owner.settle(0) == 1
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4
    assert "ValueError at " in lines[0]
    assert "test_tasks.py" in lines[0]
    assert SECRET not in "".join(lines)


async def test_a_task_that_is_ended_leaves_nothing_to_the_collector() -> None:
    """Its CancelledError refers to its frames: they must not refer to the error."""
    owner = TaskOwner("test", FAST)
    runs = Runs()
    with left_to_the_collector() as found:
        task = owner.keep(runs.run, "one")
        await until(lambda: runs.started == 1)
        owner.end(task)
        del task
        await later_turns()
    assert not found


async def test_a_pause_ends_at_once_with_the_process() -> None:
    """A task that waits to be started again is cancelled as any other."""
    owner = TaskOwner("test", Pauses(first=1000))
    runs = Runs(ValueError())
    owner.keep(runs.run, "one")
    await until(lambda: owner.shortcomings())
    assert "it starts again in" in owner.shortcomings()[0]
    await owner.settle(0)
    assert len(owner) == 0


async def test_a_task_that_takes_its_cancellation_for_an_end_is_not_started_again() -> None:
    """Else the end of the process would wait for it for ever."""
    owner = TaskOwner("test", FAST)
    runs = 0

    async def stubborn() -> None:
        nonlocal runs
        runs += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    owner.keep(stubborn, "one")
    await asyncio.sleep(0)
    await asyncio.wait_for(owner.settle(0), 10)
    assert runs == 1


def test_pauses_grow_and_are_forgotten() -> None:
    """They double up to a minute, and begin anew once the task has run well for a minute; so does
    its count.
    """
    now = 0.0
    failures = Failures("one", Pauses(), lambda: now)
    pauses = []
    for _ in range(9):
        failures.began()
        failures.failed(ValueError(), pauses=True)
        pauses.append(failures.pause)
        now += failures.pause
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    failures.began()
    now += 59
    assert failures.shortcoming() is not None
    failures.failed(ValueError(), pauses=True)
    assert (failures.count, failures.pause) == (10, 60)
    now += 60
    failures.began()
    now += 61
    assert failures.shortcoming() is None
    failures.failed(ValueError(), pauses=True)
    assert (failures.count, failures.total, failures.pause) == (1, 11, 1)
    assert failures.shortcoming() == (
        "background task one has failed 1 times, the last time by ValueError: it starts again in "
        "1.0 s"
    )


def test_what_fails_at_each_message_of_a_stranger_is_few_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A callback that goes on logs its first failure, its second, its fourth: all are counted."""
    failures = TaskOwner("test").watch("notices")
    for _ in range(1000):
        failures.failed(ValueError(SECRET))
    assert failures.total == 1000
    assert len(caplog.records) == 10
    assert "and has continued for" in (failures.shortcoming() or "")


async def test_a_task_that_fails_once_is_logged_without_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor does a name of an engine's making become long."""

    async def fail() -> None:
        raise ValueError(SECRET)

    owner = TaskOwner("test")
    owner.spawn(fail(), "x" * 100_000)
    await until(lambda: not len(owner))
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is None
    assert SECRET not in record.getMessage()
    assert len(record.getMessage()) < MAX_NAME + 1000


async def test_one_deadline_that_fails_leaves_all_others() -> None:
    """What is to be done at a deadline may fail: the clock goes on, and reports it."""
    failed: list[Exception] = []
    clock = Clock(failed.append)
    reached: list[int] = []

    def broken() -> None:
        raise ValueError(SECRET)

    for number in range(3):
        clock.after(0.01, broken)
        clock.after(0.01 + number * TICK, lambda number=number: reached.append(number))  # type: ignore[misc]
    await until(lambda: len(reached) == 3)
    clock.after(0.01, lambda: reached.append(3))
    await until(lambda: len(reached) == 4)
    assert len(failed) == 3


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("lightkube.core", "ModuleNotFoundError (lightkube.core) at no frame"),
        ("a prompt", "ModuleNotFoundError at no frame"),
        ("a" * 101, "ModuleNotFoundError at no frame"),
        (None, "ModuleNotFoundError at no frame"),
    ],
)
def test_frames_name_the_module_that_is_missing(name: str | None, shown: str) -> None:
    """And nothing that is no such name."""
    assert frames(ModuleNotFoundError("a secret", name=name)) == shown


def test_frames_are_bounded() -> None:
    """A recursion without an end has a thousand frames, and errors may have many causes."""

    def deeper(left: int) -> None:
        if left:
            deeper(left - 1)
        raise ValueError(SECRET)

    error: BaseException | None = None
    for _ in range(20):
        try:
            try:
                raise KeyError(SECRET) from error
            except KeyError:
                deeper(200)
        except ValueError as raised:
            error = raised
    assert error is not None
    text = frames(error)
    assert SECRET not in text
    assert text.count(" deeper") == (FIRST_FRAMES + LAST_FRAMES - 1) * (MAX_CAUSES + 1) // 2
    assert "frames)" in text
