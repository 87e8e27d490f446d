"""The scheduler process is killed: workers serve on, and its successor chooses."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tests.fakes import scripts
from tests.fakes.books import Books
from tests.fakes.client import Client
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.process import PATIENCE, Served, served
from tests.fakes.served_workers import nodes, serving
from tests.fakes.world import COMPLETIONS, TEXT, completion, until


class Probes:
    """Counts the questions for an engine's health."""

    def __init__(self, engine: FakeEngine) -> None:
        self.count = 0
        engine.admin["/health"] = self._health

    async def _health(self, reply: Reply) -> None:
        self.count += 1
        await reply.whole(b"")


async def _shows(proxy: Served, value: float, name: str, **labels: str) -> None:
    """Wait until a metric has this value."""
    async with asyncio.timeout(PATIENCE):
        while await proxy.metric(name, **labels) != value:
            await asyncio.sleep(0.05)


async def test_it_alone_probes_and_workers_hear_it(tmp_path: Path) -> None:
    """It is no worker: it takes no connections of clients, and has a metric of its own."""
    with (tmp_path / "log").open("wb") as log:
        async with served(log, workers=2, interval=0.2) as proxy:
            scheduler = proxy.scheduler()
            assert proxy.connected(proxy.decode.port, is_theirs=False) == [scheduler]
            assert await proxy.metric("pdproxy_workers") == 2
            assert await proxy.metric("pdproxy_scheduler") == 1
            proxy.decode.stop()
            await _shows(proxy, 0, "pdproxy_node_up", node=proxy.decode.url)
            await proxy.decode.listen()
            await _shows(proxy, 1, "pdproxy_node_up", node=proxy.decode.url)
    lines = (tmp_path / "log").read_text()
    assert "process=scheduler" in lines
    assert "worker=2" not in lines
    assert lines.count(" listens on ") == 2


async def test_killed_it_is_started_again_and_streams_go_on(tmp_path: Path) -> None:
    """A stream that began before goes on behind it. What its successor finds, workers hear; and a
    worker that is started then knows all engines.
    """
    with (tmp_path / "log").open("wb") as log:
        async with served(log, workers=2, interval=0.2) as proxy:
            for number in range(2):
                go = asyncio.Event()
                proxy.decode.script(scripts.after_word(go, scripts.one_more_word))
                client = await Client.connect(proxy.port)
                client.post(COMPLETIONS, completion(stream=True))
                head = await client.head()
                probes = Probes(proxy.decode)
                killed = proxy.scheduler()
                assert killed is not None
                os.kill(killed, signal.SIGKILL)
                await until(lambda: proxy.scheduler() not in (None, killed), PATIENCE)  # noqa: B023
                await until(lambda: probes.count >= 2, PATIENCE)  # noqa: B023
                go.set()
                assert (await client.rest(head)).ended
                client.close()
                await _shows(proxy, number + 1, "pdproxy_scheduler_restarts_total")
                await _shows(proxy, 1, "pdproxy_scheduler")
                assert await proxy.metric("pdproxy_worker_restarts_total") == number
                worker = proxy.workers()[0]
                os.kill(worker, signal.SIGKILL)
                await until(
                    lambda: len(proxy.workers()) == 2 and worker not in proxy.workers(),  # noqa: B023
                    PATIENCE,
                )
                await _shows(proxy, 2, "pdproxy_workers")
                for _ in range(4):
                    answer = await proxy.ask("POST", COMPLETIONS, completion())
                    assert (answer.status, answer.text) == (200, TEXT)
                assert (await proxy.ask("GET", "/ready")).json["state"] == "ok"
            proxy.decode.stop()
            await _shows(proxy, 0, "pdproxy_node_up", node=proxy.decode.url)
            proxy.process.send_signal(signal.SIGTERM)
            assert await proxy.process.wait() == 0


async def test_it_ends_behind_the_workers(tmp_path: Path) -> None:
    """SIGTERM for all processes: it probes for as long as a worker drains."""
    with (tmp_path / "log").open("wb") as log:
        async with served(log, workers=2, interval=0.2) as proxy:
            go = asyncio.Event()
            proxy.decode.script(scripts.after_word(go, scripts.one_more_word))
            client = await Client.connect(proxy.port)
            client.post(COMPLETIONS, completion(stream=True))
            head = await client.head()
            scheduler = proxy.scheduler()
            assert scheduler is not None
            for pid in (scheduler, *proxy.workers(), proxy.process.pid):
                os.kill(pid, signal.SIGTERM)
            await until(lambda: len(proxy.workers()) == 1, PATIENCE)
            probes = Probes(proxy.decode)
            await until(lambda: probes.count >= 2, PATIENCE)
            go.set()
            assert (await client.rest(head)).ended
            client.close()
            assert await proxy.process.wait() == 0


async def test_a_successor_asks_no_engine_for_its_connector(tmp_path: Path) -> None:
    """Requests wait for it: what the first processes have found it knows."""
    books = Books()
    engines = [FakeEngine(role, books) for role in ("prefill", "decode")]

    def settings(port: int, admin: int) -> str:
        return (
            f"listen: {{port: {port}, workers: 2}}\nprobes: {{interval: 0.2}}\n"
            f"pools:\n- connector: auto\n{nodes(engines)}"
        )

    async with serving(tmp_path, engines, settings) as run:
        await run.whole()
        asked = len(engines[0].requests)
        assert asked > 0
        killed = run.proxy.scheduler()
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        await run.kill(run.proxy.workers()[0])
        await _shows(run.proxy, 1, "pdproxy_scheduler")
        for number in range(4):
            assert (await run.proxy.ask("POST", COMPLETIONS, completion())).status == 200
            assert len(engines[0].requests) == asked + number + 1
    lines = (tmp_path / "log").read_text()
    assert lines.count("asking 2 engines which one they run") == 3
