"""A worker that sends the scheduler process what is no message, asks for too much, or reads
nothing: neither its streams nor another worker's end, and it serves on once it behaves.
"""

# PDPROXY_TEST_FLOODS: how many times, with the bounds of the product. Without it they are smaller.

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.fakes import answers, scripts
from tests.fakes.books import Books
from tests.fakes.client import Answer, Client
from tests.fakes.engine import FakeEngine
from tests.fakes.flooding import FLOODS
from tests.fakes.process import PATIENCE
from tests.fakes.served_workers import SERVE, nodes, served, serving
from tests.fakes.world import COMPLETIONS, completion, until

STREAMS = 50
TIMES = int(os.environ.get("PDPROXY_TEST_FLOODS", "0"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("flood", FLOODS)
async def test_a_worker_that_floods_is_nobody_elses_trouble(tmp_path: Path, flood: str) -> None:
    books = Books()
    engines = [FakeEngine(role, books) for role in ("prefill", "decode")]
    part = 1 if TIMES else 8
    code = f"from tests.fakes.flooding import install\ninstall({flood!r}, {part})\n{SERVE}"

    def settings(port: int, _: int) -> str:
        return (
            f"listen: {{port: {port}, workers: 2}}\ndeadlines: {{drain: 5, between_tokens: 600}}\n"
            f"pools:\n- connector: nixl\n{nodes(engines)}"
        )

    def refused() -> int:
        """How often the scheduler process has stopped listening to a worker."""
        return (tmp_path / "log").read_text().count("a worker asks for no more engines: ")

    async with serving(tmp_path, engines, settings, code=code) as run:
        pids = run.proxy.workers()
        go = asyncio.Event()
        clients = await run.clients(STREAMS + 8)
        every = [one for each in clients.values() for one in each]
        bad, good = pids
        asking = {pid: [clients[pid].pop() for _ in range(4)] for pid in pids}
        engines[1].script(*[scripts.after_word(go, scripts.one_more_word)] * STREAMS)
        streams: list[tuple[Client, Answer]] = []
        for client in [*clients[bad], *clients[good]]:
            client.post(COMPLETIONS, completion(stream=True))
            streams.append((client, await client.head()))
        for times in range(1, max(TIMES, 1) + 1):
            os.kill(bad, signal.SIGUSR1)
            while refused() < times:
                await asyncio.gather(*map(served, asking[good]))
            if flood == "deaf":
                os.kill(bad, signal.SIGUSR2)
            await asyncio.gather(*map(served, [*asking[bad], *asking[good]]))
            # what it has is known again, as it is behind a restart of the scheduler process
            await run.leases(STREAMS)
        go.set()
        for client, head in streams:
            answer = await client.rest(head)
            assert answer.ended
            assert answer.body.endswith(answers.DONE)
        await run.leases(0)
        await until(lambda: not books.held(), PATIENCE)
        assert run.proxy.workers() == pids
        assert await run.proxy.metric("pdproxy_scheduler_restarts_total") == 0
        assert await run.proxy.metric("pdproxy_worker_restarts_total") == 0
        for client in every:
            client.close()
