"""The scheduler process is killed, or stopped: workers serve on, and its successor chooses."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tests.fakes import scripts
from tests.fakes.books import Books
from tests.fakes.client import Answer, Client, request
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.process import PATIENCE, Served, served
from tests.fakes.samples import read, total
from tests.fakes.served_workers import nodes, serving
from tests.fakes.world import COMPLETIONS, TEXT, completion, until

LEASES = "pdproxy_scheduler_leases"


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


async def test_stopped_it_is_replaced_and_no_request_fails(tmp_path: Path) -> None:
    """Those that wait for it get engines of its successor, which knows all streams."""
    with (tmp_path / "log").open("wb") as log:
        async with served(log, workers=2, interval=0.2) as proxy:
            go = asyncio.Event()
            proxy.decode.script(*[scripts.after_word(go, scripts.one_more_word)] * 8)
            streams = [await Client.connect(proxy.port) for _ in range(8)]
            for client in streams:
                client.post(COMPLETIONS, completion(stream=True))
            heads = [await client.head() for client in streams]
            scheduler = proxy.scheduler()
            assert scheduler is not None
            os.kill(scheduler, signal.SIGSTOP)
            waiting = [proxy.ask("POST", COMPLETIONS, completion()) for _ in range(16)]
            assert [one.status for one in await asyncio.gather(*waiting)] == [200] * 16
            assert proxy.scheduler() not in (None, scheduler)
            await _shows(proxy, 8, LEASES)
            go.set()
            for client, head in zip(streams, heads, strict=True):
                assert (await client.rest(head)).ended
                client.close()
            await _shows(proxy, 0, LEASES)
            assert await proxy.metric("pdproxy_scheduler_restarts_total") == 1
            assert await proxy.metric("pdproxy_worker_restarts_total") == 0
    assert "is killed: it has answered nothing for 1 s" in (tmp_path / "log").read_text()


async def test_nobody_waits_for_a_worker_that_is_stopped(tmp_path: Path) -> None:
    """The scheduler chooses for the other one, and keeps what the stopped one has."""
    with (tmp_path / "log").open("wb") as log:
        async with served(log, workers=2, interval=0.2) as proxy:
            go = asyncio.Event()
            proxy.decode.script(*[scripts.after_word(go, scripts.one_more_word)] * 16)
            clients = [await Client.connect(proxy.port) for _ in range(16)]
            by_worker: dict[int, list[tuple[Client, Answer]]] = {}
            for client in clients:
                client.post(COMPLETIONS, completion(stream=True))
                head = await client.head()
                port = client.writer.get_extra_info("sockname")[1]
                (worker,) = proxy.connected(port, is_theirs=False)
                by_worker.setdefault(worker, []).append((client, head))
            await _shows(proxy, 16, LEASES)
            stopped, other = proxy.workers()
            os.kill(stopped, signal.SIGSTOP)
            go.set()
            for client, head in by_worker[other]:
                assert (await client.rest(head)).ended
                for _ in range(4):
                    client.post(COMPLETIONS, completion())
                    assert (await client.answer()).status == 200
            client = by_worker[other][0][0]
            client.send(request("GET", "/metrics", b""))
            page = (await client.answer()).body.decode()
            leases = total(read(page, LEASES), LEASES, {})
            assert leases == len(by_worker[stopped])
            os.kill(stopped, signal.SIGCONT)
            for client, head in by_worker[stopped]:
                assert (await client.rest(head)).ended
            await _shows(proxy, 0, LEASES)
            assert proxy.workers() == [stopped, other]
            for client in clients:
                client.close()


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
