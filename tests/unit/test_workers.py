"""Worker processes: how many there are, who waits for one, and what ends one."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import OverloadedError
from pdproxy.kit.workers import NoMemoryError, WorkerLostError, Workers
from pdproxy.observe.events import DeadlinePassed, Event, Observers
from pdproxy.serving.access.clients import Client
from pdproxy.serving.request.body_reader import BodyReader
from pdproxy.wire.body_bounds import LARGE, Bounds
from pdproxy.wire.request import Route
from tests.fakes.world import until

MEMORY = 512 << 20


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have worker processes find the tests."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


@asynccontextmanager
async def workers(**options: Any) -> AsyncIterator[Workers]:
    given = {"max_workers": 1, "waiting": 4, "memory": MEMORY, "idle": 60.0, **options}
    made = Workers("tests.fakes.slow_worker", **given)
    try:
        yield made
    finally:
        await made.close()
        assert (made.busy, made.idle, made.waiting) == (0, 0, 0)


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
        assert [bytes(await w.ask("me", b"", data)) for _ in range(3)] == [data] * 3
        assert (w.busy, w.idle) == (0, 1)


async def test_no_more_processes_than_allowed() -> None:
    """Others wait for their turn; all are answered."""
    async with workers(max_workers=2, waiting=20) as w:
        answers = await asyncio.gather(*(w.ask("me", b"who", b"") for _ in range(12)))
        assert len({bytes(one) for one in answers}) <= 2


async def test_one_more_than_may_wait_is_refused() -> None:
    """At once, and the others keep their places; a place that was given up is free."""
    async with workers(waiting=2) as w:
        first = asyncio.ensure_future(w.ask("me", b"sleep", b""))
        await until(lambda: w.busy)
        others = [asyncio.ensure_future(w.ask("me", b"", b"x")) for _ in range(2)]
        await until(lambda: w.waiting == 2)
        with pytest.raises(OverloadedError):
            await w.ask("me", b"", b"y")
        others.pop().cancel()
        await until(lambda: w.waiting == 1)
        first.cancel()
        assert await others[0] == b"x"
        await asyncio.wait([first])


async def test_who_stops_waiting_ends_the_work() -> None:
    """The process is killed, and the next caller gets another one."""
    async with workers() as w:
        pid = int(await w.ask("me", b"who", b""))
        asked = asyncio.ensure_future(w.ask("me", b"sleep", b""))
        await until(lambda: w.busy)
        asked.cancel()
        await asyncio.wait([asked])
        assert asked.cancelled()
        await until(lambda: gone(pid))
        assert int(await w.ask("me", b"who", b"")) != pid


async def test_who_stops_waiting_while_a_process_starts_leaves_it_to_the_next() -> None:
    """A client that comes and goes starts one process, not one each time."""
    async with workers() as w:
        for _ in range(5):
            asked = asyncio.ensure_future(w.ask("me", b"who", b""))
            await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait([asked])
        await until(lambda: w.idle)
        assert await w.ask("me", b"", b"x") == b"x"
        await until(lambda: w.busy == 0)
        assert w.idle == 1


@pytest.mark.parametrize(("question", "error"), [(b"die", WorkerLostError), (b"grow", NoMemoryError)])
async def test_a_process_that_ends_is_replaced(question: bytes, error: type[Exception]) -> None:
    """Its caller gets an error, the next one an answer."""
    async with workers() as w:
        with pytest.raises(error):
            await w.ask("me", question, b"x" * 100_000)
        assert await w.ask("me", b"", b"x") == b"x"


async def test_memory_is_bounded() -> None:
    """Data that doesn't fit is refused, not kept."""
    async with workers(memory=128 << 20) as w:
        with pytest.raises(NoMemoryError):
            await w.ask("me", b"", bytes(160 << 20))


@pytest.mark.parametrize("state", ["idle", "at work", "starting"])
async def test_another_bound_of_memory(state: str) -> None:
    """No question is lost, and the next ones get a process with the new bound."""
    async with workers() as w:
        before = int(await w.ask("me", b"who", b"")) if state == "idle" else 0
        asked = [] if state == "idle" else [asyncio.ensure_future(w.ask("me", b"who", b""))]
        if state == "starting":
            for _ in range(3):  # to the wait for its pipes
                await asyncio.sleep(0)
            assert w.busy == 0
        elif asked:
            await until(lambda: w.busy)
        w.resize(1, 2 * MEMORY)
        before = before or int(await asked[0])
        await until(lambda: gone(before))
        assert int(await w.ask("me", b"who", b"")) != before
        assert (w.busy, w.idle) == (0, 1)


async def test_another_number_of_processes() -> None:
    """More of them serve those that wait; with fewer of them nothing that is at work ends."""
    async with workers() as w:
        asked = [asyncio.ensure_future(w.ask("me", b"sleep", b"")) for _ in range(2)]
        await until(lambda: (w.busy, w.waiting) == (1, 1))
        w.resize(2, MEMORY)
        await until(lambda: (w.busy, w.waiting) == (2, 0))
        w.resize(1, MEMORY)
        next_one = asyncio.ensure_future(w.ask("me", b"", b"x"))
        await until(lambda: w.waiting == 1)
        asked[0].cancel()
        await asyncio.wait(asked[:1])
        assert (w.busy, w.waiting) == (1, 1)
        asked[1].cancel()
        assert await next_one == b"x"
        await asyncio.wait(asked)


async def test_an_idle_process_ends() -> None:
    """After its time, and another is started when needed."""
    async with workers(idle=0.05) as w:
        pid = int(await w.ask("me", b"who", b""))
        await until(lambda: gone(pid))
        assert (w.busy, w.idle) == (0, 0)
        assert int(await w.ask("me", b"who", b"")) != pid


async def test_a_process_that_was_killed_while_idle_is_not_asked() -> None:
    """By an operator, or for want of memory."""
    async with workers() as w:
        pid = int(await w.ask("me", b"who", b""))
        os.kill(pid, 9)
        await until(lambda: next(iter(w._all)).returncode is not None)
        assert int(await w.ask("me", b"who", b"")) != pid


async def test_what_a_process_is_told() -> None:
    """Nothing of our settings, which hold keys; and it stands back."""
    os.environ["PDPROXY_AUTH__API_KEYS"] = "secret"
    try:
        async with workers() as w:
            assert b"PDPROXY" not in bytes(await w.ask("me", b"environment", b""))
            assert int(await w.ask("me", b"nice", b"")) >= 10
    finally:
        del os.environ["PDPROXY_AUTH__API_KEYS"]


async def test_reading_a_body_has_a_deadline() -> None:
    """The request is refused for now, the process killed, the wait counted."""
    events: list[Event] = []

    class Hears:
        def notify(self, event: Event) -> None:
            events.append(event)

    class Asleep(Workers):
        async def ask(self, asker: Hashable, question: bytes, data: bytes | bytearray) -> bytes | memoryview:
            return await super().ask(asker, b"sleep", data)

    asleep = Asleep("tests.fakes.slow_worker", max_workers=1, waiting=1, memory=MEMORY, idle=60)
    bodies = BodyReader(asleep, Clock(), Observers([Hears()]), seconds=0.3, bounds=Bounds())
    with pytest.raises(OverloadedError, match=r"not read in 0\.3 s"):
        await bodies.request(Route.CHAT, b" " * (LARGE + 1), Client("a client"))
    assert events == [DeadlinePassed("read_body")]
    assert (asleep.busy, asleep.idle) == (0, 0)
    await asleep.close()
