"""SIGSTOP of a worker, or of the scheduler process, with streams of both workers: no request fails
and no stream ends, and nobody waits for a worker that is stopped but its own clients.
"""

# PDPROXY_TEST_STOPPED: for how many seconds, 10 in `.ci/full`.

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.fakes import answers, scripts
from tests.fakes.books import Books
from tests.fakes.client import Answer, Client
from tests.fakes.engine import FakeEngine
from tests.fakes.process import PATIENCE
from tests.fakes.served_workers import Run, nodes, served, serving
from tests.fakes.world import COMPLETIONS, completion, until

STREAMS = 50
SECONDS = float(os.environ.get("PDPROXY_TEST_STOPPED", "1.5"))
"""Behind 1 s the scheduler process is killed, and behind 20 s a worker."""


@asynccontextmanager
async def _running(tmp_path: Path) -> AsyncIterator[Run]:
    """Run two workers before a pair of engines. No KV may be left at the end."""
    books = Books()
    engines = [FakeEngine(role, books) for role in ("prefill", "decode")]

    def settings(port: int, _: int) -> str:
        return (
            f"listen: {{port: {port}, workers: 2}}\ndeadlines: {{drain: 5, between_tokens: 600}}\n"
            f"pools:\n- connector: nixl\n{nodes(engines)}"
        )

    async with serving(tmp_path, engines, settings) as run:
        yield run
        await until(lambda: not books.held(), PATIENCE)


async def _begun(client: Client) -> Answer:
    """Ask for a stream. Return its head."""
    client.post(COMPLETIONS, completion(stream=True))
    return await client.head()


async def _are_whole(streams: list[tuple[Client, Answer]]) -> None:
    """Read the rest of streams."""
    for client, head in streams:
        answer = await client.rest(head)
        assert answer.ended
        assert answer.body.endswith(answers.DONE)


@pytest.mark.timeout(180 + 2 * SECONDS)
@pytest.mark.parametrize("what", ["worker", "scheduler"])
async def test_what_is_stopped_is_nobody_elses_trouble(tmp_path: Path, what: str) -> None:
    """A scheduler process is replaced, and its successor knows all streams. A worker is not: it
    goes on with its streams.
    """
    async with _running(tmp_path) as run:
        pids, scheduler = run.proxy.workers(), run.proxy.scheduler()
        assert scheduler is not None
        go = asyncio.Event()
        clients = await run.clients(STREAMS + 8)
        every = [one for each in clients.values() for one in each]
        asking = {pid: [clients[pid].pop() for _ in range(4)] for pid in pids}
        run.proxy.decode.script(*[scripts.after_word(go, scripts.one_more_word)] * STREAMS)
        streams = [(one, await _begun(one)) for each in clients.values() for one in each]
        stopped = scheduler if what == "scheduler" else pids[0]
        others = [one for pid in pids if pid != stopped for one in asking[pid]]
        longest, began = 0.0, time.monotonic()
        os.kill(stopped, signal.SIGSTOP)
        waiting = [asyncio.create_task(served(one)) for one in asking.get(stopped, [])]
        while (now := time.monotonic()) < began + SECONDS:
            await asyncio.gather(*map(served, others))
            longest = max(longest, time.monotonic() - now)
        print(
            f"{what} stopped for {SECONDS:g} s: its others' requests took {longest:.2f} s at most"
        )
        if what == "worker":
            assert not any(one.done() for one in waiting)
            os.kill(stopped, signal.SIGCONT)
        else:
            await until(lambda: run.proxy.scheduler() not in (None, scheduler), PATIENCE)
        await asyncio.gather(*waiting)
        await run.leases(STREAMS)
        go.set()
        await _are_whole(streams)
        await run.leases(0)
        assert run.proxy.workers() == pids
        ended = await run.proxy.metric("pdproxy_scheduler_restarts_total")
        assert ended == (what == "scheduler")
        assert await run.proxy.metric("pdproxy_worker_restarts_total") == 0
        for client in every:
            client.close()
    said = "is killed: it has answered nothing for 1 s" in (tmp_path / "log").read_text()
    assert said == (what == "scheduler")


async def test_a_scheduler_waits_for_no_worker_that_is_stopped(tmp_path: Path) -> None:
    """It chooses without what that one has, which it is told once that one goes on."""
    async with _running(tmp_path) as run:
        (stopped, other), scheduler = run.proxy.workers(), run.proxy.scheduler()
        assert scheduler is not None
        go = asyncio.Event()
        clients = await run.clients(16)
        every = [one for each in clients.values() for one in each]
        asking = clients[other].pop()
        run.proxy.decode.script(*[scripts.after_word(go, scripts.one_more_word)] * 15)
        streams = [(one, await _begun(one)) for each in clients.values() for one in each]
        os.kill(stopped, signal.SIGSTOP)
        os.kill(scheduler, signal.SIGKILL)
        for _ in range(4):
            await served(asking)
        os.kill(stopped, signal.SIGCONT)
        await run.leases(len(streams))
        go.set()
        await _are_whole(streams)
        await run.leases(0)
        assert run.proxy.workers() == [stopped, other]
        for client in every:
            client.close()
