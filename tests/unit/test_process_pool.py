"""Worker processes: how many there are, who waits for one, and what ends one."""

from __future__ import annotations

import asyncio
import os
import sys
import weakref
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import OverloadedError
from pdproxy.kit.process_pool import NoMemoryError, ProcessLostError, ProcessPool
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.serving.access.clients import Client
from pdproxy.serving.request.body_reader import BodyReader
from pdproxy.settings.limits import Deadlines, Limits, MediaSettings
from pdproxy.wire.body_bounds import LARGE
from pdproxy.wire.route import Route
from tests.fakes.clock import ManualClock
from tests.fakes.recorder import Recorder
from tests.fakes.world import until

MEMORY = 512 << 20
SECONDS = 100.0
"""The callers' deadline, which no test reaches that does not mean to."""


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have worker processes find the tests."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


@asynccontextmanager
async def workers(**options: Any) -> AsyncIterator[ProcessPool]:
    given = {
        "max_processes": 1,
        "waiting": 4,
        "memory": MEMORY,
        "idle": 60.0,
        "clock": Clock(),
        **options,
    }
    made = ProcessPool("tests.fakes.slow_worker", **given)
    try:
        yield made
    finally:
        await made.close()
        assert (made.busy, made.idle, made.waiting) == (0, 0, 0)


def ask(
    w: ProcessPool, question: bytes, data: bytes = b"", client: str = "me"
) -> asyncio.Task[bytes | memoryview]:
    return asyncio.ensure_future(w.ask(client, question, data, w._clock.now() + SECONDS))


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("size", [0, 10, 3 << 20])
async def test_data_goes_there_and_back(size: int) -> None:
    """Of any size, by one process for all."""
    async with workers() as w:
        data = os.urandom(size)
        assert [bytes(await ask(w, b"", data)) for _ in range(3)] == [data] * 3
        assert (w.busy, w.idle) == (0, 1)


async def test_no_more_processes_than_allowed() -> None:
    """Others wait for their turn; all are answered."""
    async with workers(max_processes=2, waiting=20) as w:
        answers = await asyncio.gather(*(ask(w, b"who") for _ in range(12)))
        assert len({bytes(one) for one in answers}) <= 2


async def test_one_more_than_may_wait_is_refused() -> None:
    """At once, and the others keep their places; a place that was given up is free."""
    async with workers(waiting=2) as w:
        first = ask(w, b"sleep")
        await until(lambda: w.busy)
        others = [ask(w, b"", b"x") for _ in range(2)]
        await until(lambda: w.waiting == 2)
        with pytest.raises(OverloadedError):
            await ask(w, b"", b"y")
        others.pop().cancel()
        await until(lambda: w.waiting == 1)
        await w.close()
        assert await others[0] == b"x"
        with pytest.raises(ProcessLostError):
            await first


async def test_who_stops_waiting_leaves_the_process_to_the_next(tmp_path: Path) -> None:
    """It ends the work that it has, and is not killed: the next caller needs no other one. Until
    then the place is taken.
    """
    async with workers() as w:
        pid = int(await ask(w, b"who"))
        go = tmp_path / "go"
        for n in range(3):
            asked = ask(w, b"until", str(go).encode())
            await until(lambda: w.busy)
            asked.cancel()
            await asyncio.wait([asked])
            assert asked.cancelled()
            following = ask(w, b"who")
            await until(lambda: w.waiting == 1)
            go.touch()
            assert int(await following) == pid, n
            assert (w.busy, w.idle, w._turns.taken) == (0, 1, 0)
            go.unlink()


async def test_data_of_a_caller_that_has_left_is_not_kept(tmp_path: Path) -> None:
    """Only until the process has it: nobody counts these bytes any more."""

    class Data(bytearray):
        pass

    async with workers() as w:
        go = tmp_path / "go"
        data = Data(str(go).encode() + b" " * (4 << 20))
        seen = weakref.ref(data)
        asked = asyncio.ensure_future(w.ask("me", b"until", data, w._clock.now() + SECONDS))
        await until(lambda: w.busy)
        asked.cancel()
        await asyncio.wait([asked])
        del data, asked  # a task that was cancelled keeps its frames
        await until(lambda: seen() is None)
        assert w.busy == 1
        go.touch()
        await until(lambda: w.idle == 1)


async def test_work_that_nobody_awaits_has_a_deadline() -> None:
    """That of its caller. Then the process is killed, and the place free; it is counted."""
    late: list[None] = []
    clock = ManualClock()
    async with workers(clock=clock, overdue=lambda: late.append(None)) as w:
        pid = int(await ask(w, b"who"))
        asked = ask(w, b"sleep")
        await until(lambda: w.busy)
        await clock.advance(SECONDS / 2)
        asked.cancel()
        await asyncio.wait([asked])
        await clock.advance(SECONDS / 2 - 1)
        assert (w.busy, late, gone(pid)) == (1, [], False)
        await clock.advance(1)
        assert (w.busy, late) == (0, [None])
        await until(lambda: gone(pid))
        assert int(await ask(w, b"who")) != pid


async def test_work_that_has_missed_its_deadline_is_ended_at_once() -> None:
    """Its caller has waited for as long as it may."""
    clock = ManualClock()
    async with workers(clock=clock) as w:
        pid = int(await ask(w, b"who"))
        asked = ask(w, b"sleep")
        await until(lambda: w.busy)
        await clock.advance(SECONDS)
        asked.cancel()
        await asyncio.wait([asked])
        assert w.busy == 0
        await until(lambda: gone(pid))


async def test_who_stops_waiting_while_a_process_starts_leaves_it_to_the_next() -> None:
    """A client that comes and goes starts one process, not one each time."""
    async with workers() as w:
        for _ in range(5):
            asked = ask(w, b"who")
            await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait([asked])
        await until(lambda: w.idle)
        assert await ask(w, b"", b"x") == b"x"
        await until(lambda: w.busy == 0)
        assert w.idle == 1


@pytest.mark.parametrize(
    ("question", "error"), [(b"die", ProcessLostError), (b"grow", NoMemoryError)]
)
async def test_a_process_that_ends_is_replaced(question: bytes, error: type[Exception]) -> None:
    """Its caller gets an error, the next one an answer."""
    async with workers() as w:
        with pytest.raises(error):
            await ask(w, question, b"x" * 100_000)
        assert await ask(w, b"", b"x") == b"x"


async def test_memory_is_bounded() -> None:
    """Data that doesn't fit is refused, not kept."""
    async with workers(memory=128 << 20) as w:
        with pytest.raises(NoMemoryError):
            await ask(w, b"", bytes(160 << 20))


@pytest.mark.parametrize("state", ["idle", "at work", "starting"])
async def test_another_bound_of_memory(state: str) -> None:
    """No question is lost, and the next ones get a process with the new bound."""
    async with workers() as w:
        before = int(await ask(w, b"who")) if state == "idle" else 0
        asked = [] if state == "idle" else [ask(w, b"who")]
        if state == "starting":
            for _ in range(3):  # to the wait for its pipes
                await asyncio.sleep(0)
            assert w.busy == 0
        elif asked:
            await until(lambda: w.busy)
        w.resize(1, 2 * MEMORY)
        before = before or int(await asked[0])
        await until(lambda: gone(before))
        assert int(await ask(w, b"who")) != before
        assert (w.busy, w.idle) == (0, 1)


async def test_another_number_of_processes() -> None:
    """More of them serve those that wait; with fewer of them nothing that is at work ends."""
    async with workers() as w:
        asked = [ask(w, b"sleep") for _ in range(2)]
        await until(lambda: (w.busy, w.waiting) == (1, 1))
        w.resize(2, MEMORY)
        await until(lambda: (w.busy, w.waiting) == (2, 0))
        w.resize(1, MEMORY)
        next_one = ask(w, b"", b"x")
        await until(lambda: w.waiting == 1)
        next(iter(w._all)).kill()
        await until(lambda: w.busy == 1)
        assert w.waiting == 1
        next(iter(w._all)).kill()
        assert await next_one == b"x"
        await asyncio.wait(asked)


async def test_an_idle_process_ends() -> None:
    """After its time, and another is started when needed."""
    async with workers(idle=0.05) as w:
        pid = int(await ask(w, b"who"))
        await until(lambda: gone(pid))
        assert (w.busy, w.idle) == (0, 0)
        assert int(await ask(w, b"who")) != pid


async def test_a_process_that_was_killed_while_idle_is_not_asked() -> None:
    """By an operator, or for want of memory."""
    async with workers() as w:
        pid = int(await ask(w, b"who"))
        os.kill(pid, 9)
        await until(lambda: next(iter(w._all)).returncode is not None)
        assert int(await ask(w, b"who")) != pid


async def test_what_a_process_is_told() -> None:
    """Nothing of our settings, which hold keys; and it stands back."""
    os.environ["PDPROXY_AUTH__API_KEYS"] = "secret"
    try:
        async with workers() as w:
            assert b"PDPROXY" not in bytes(await ask(w, b"environment"))
            assert int(await ask(w, b"nice")) >= 10
    finally:
        del os.environ["PDPROXY_AUTH__API_KEYS"]


async def test_reading_a_body_has_a_deadline() -> None:
    """The request is refused for now, the process killed, the wait counted."""
    heard = Recorder()

    class Asleep(ProcessPool):
        async def ask(
            self, asker: Hashable, question: bytes, data: bytes | bytearray, end: float
        ) -> bytes | memoryview:
            return await super().ask(asker, b"sleep", data, end)

    clock = Clock()
    asleep = Asleep(
        "tests.fakes.slow_worker", max_processes=1, waiting=1, memory=MEMORY, idle=60, clock=clock
    )
    bodies = BodyReader(
        Limits(), Deadlines(read_body=0.3), MediaSettings(), clock, Observers([heard]), asleep
    )
    with pytest.raises(OverloadedError, match=r"not read in 0\.3 s"):
        await bodies.request(Route.CHAT, b" " * (LARGE + 1), Client("a client"))
    assert heard.events == [DeadlinePassed("read_body")]
    assert (asleep.busy, asleep.idle) == (0, 0)
    await asleep.close()
