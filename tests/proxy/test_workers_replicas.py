"""Two workers of one of two replicas, as processes: what both have at an engine stands for what the
other replica has.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tests.fakes import answers, scripts
from tests.fakes.books import Books
from tests.fakes.client import Answer, Client
from tests.fakes.engine import FakeEngine
from tests.fakes.name_server import name_server
from tests.fakes.process import PATIENCE
from tests.fakes.scripts import WORD
from tests.fakes.served_workers import nodes, serving
from tests.fakes.world import COMPLETIONS, TEXT, completion, until

NAME, STREAMS = "replicas.example", 24


async def test_workers_know_of_other_replicas(tmp_path: Path) -> None:
    """DNS says how many there are. The requests of both workers count once more, and those of a
    killed one no more.
    """
    books = Books()
    engines = [FakeEngine(role, books) for role in ("prefill", "decode")]
    decode = engines[1]
    async with name_server() as server:
        server.records[NAME, "A"] = (0, ["127.0.0.1", "127.0.0.2"])

        def settings(port: int, admin: int) -> str:
            return (
                f"listen: {{port: {port}, workers: 2}}\ndeadlines: {{drain: 5}}\nprobes: "
                f"{{interval: 3600}}\n"
                f"dns: {{servers: ['{server.address}'], min_ttl: 0.05, max_ttl: 0.1}}\n"
                f"replicas: {{count: auto, name: {NAME}}}\n"
                f"pools:\n- connector: nixl\n{nodes(engines)}"
            )

        async with serving(tmp_path, engines, settings) as run:
            proxy = run.proxy

            async def holds(name: str, value: float, **labels: str) -> None:
                async with asyncio.timeout(PATIENCE):
                    while True:
                        try:
                            if await proxy.metric(name, **labels) == value:
                                return
                        except OSError:
                            assert proxy.process.returncode is None
                        await asyncio.sleep(0.05)

            await holds("pdproxy_workers", 2)
            await holds("pdproxy_replicas", 2)
            go, clients = asyncio.Event(), list[tuple[Client, Answer]]()
            for _ in range(STREAMS):
                decode.script(scripts.after_word(go, scripts.one_more_word))
                client = await Client.connect(proxy.port)
                client.post(COMPLETIONS, completion(stream=True))
                clients.append((client, await client.head()))
            await holds("pdproxy_node_other_requests", STREAMS, node=decode.url)
            assert await proxy.metric("pdproxy_node_inflight", node=decode.url) == STREAMS
            killed = proxy.workers()[0]
            os.kill(killed, signal.SIGKILL)
            await until(
                lambda: killed not in proxy.workers() and len(proxy.workers()) == 2, PATIENCE
            )
            await holds("pdproxy_workers", 2)
            left = await proxy.metric("pdproxy_node_inflight", node=decode.url)
            assert left < STREAMS
            await holds("pdproxy_node_other_requests", left, node=decode.url)
            server.records[NAME, "A"] = (0, ["127.0.0.1", "127.0.0.2", "127.0.0.3"])
            await holds("pdproxy_replicas", 3)
            await holds("pdproxy_node_other_requests", 2 * left, node=decode.url)
            go.set()
            ends = await asyncio.gather(
                *(client.rest(head) for client, head in clients), return_exceptions=True
            )
            whole = [one for one in ends if isinstance(one, Answer) and one.ended]
            assert {one.body for one in whole} == {WORD + WORD + answers.end()}
            assert len(whole) == left, "all but those of the killed worker"
            await holds("pdproxy_node_other_requests", 0, node=decode.url)
            assert (await proxy.ask("POST", COMPLETIONS, completion())).text == TEXT
