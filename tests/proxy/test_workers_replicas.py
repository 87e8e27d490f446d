"""Two workers of one of two replicas, as processes: what both have at an engine stands for what the other replica has."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from urllib.parse import urlsplit

from tests.fakes import answers, scripts
from tests.fakes.books import Books
from tests.fakes.client import Answer, Client
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.name_server import name_server
from tests.fakes.ports import free_port
from tests.fakes.process import PATIENCE, Served
from tests.fakes.scripts import WORD
from tests.fakes.world import COMPLETIONS, TEXT, completion, until
from tests.proxy.test_workers_admin import ENVIRONMENT

NAME, STREAMS = "replicas.example", 24


async def _stopped(reply: Reply) -> None:
    await reply.pieces(WORD, answers.end())
    await reply.finish()


async def test_workers_know_of_other_replicas(tmp_path: Path) -> None:
    """DNS says how many there are. The requests of both workers count once more, and those of a killed one no more."""
    books, port, path = Books(), free_port(), tmp_path / "pdproxy.yaml"
    prefill, decode = engines = [FakeEngine(role, books) for role in ("prefill", "decode")]
    for engine in engines:
        await engine.listen()
    async with name_server() as server:
        server.records[NAME, "A"] = (0, ["127.0.0.1", "127.0.0.2"])
        path.write_text(
            f"listen: {{port: {port}, workers: 2}}\ndeadlines: {{drain: 5}}\nprobes: {{interval: 3600}}\n"
            f"dns: {{servers: ['{server.address}'], min_ttl: 0.05, max_ttl: 0.1}}\n"
            f"replicas: {{count: auto, name: {NAME}}}\n"
            f"pools:\n- connector: nixl\n  nodes:\n  - {{url: '{prefill.url}', role: prefill}}\n"
            f"  - {{url: '{decode.url}', role: decode}}\n"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pdproxy", "serve", "--config", str(path), env=ENVIRONMENT,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        proxy = Served(process, port, engines)

        async def holds(name: str, value: float, **labels: str) -> None:
            async with asyncio.timeout(PATIENCE):
                while True:
                    try:
                        if await proxy.metric(name, **labels) == value:
                            return
                    except OSError:
                        assert process.returncode is None
                    await asyncio.sleep(0.05)

        try:
            await holds("pdproxy_workers", 2)
            await holds("pdproxy_replicas", 2)
            # The engine says that it serves nothing: a worker that begins to probe would believe it.
            (leads,) = proxy.connected(urlsplit(decode.url).port, is_theirs=False)
            go, clients = asyncio.Event(), list[tuple[Client, Answer]]()
            for _ in range(STREAMS):
                decode.script(scripts.after_word(go, _stopped))
                client = await Client.connect(port)
                client.post(COMPLETIONS, completion(stream=True))
                clients.append((client, await client.head()))
            await holds("pdproxy_node_other_requests", STREAMS, node=decode.url)
            assert await proxy.metric("pdproxy_node_inflight", node=decode.url) == STREAMS
            (killed,) = set(proxy.workers()) - {leads}
            os.kill(killed, signal.SIGKILL)
            await until(lambda: killed not in proxy.workers() and len(proxy.workers()) == 2, PATIENCE)
            await holds("pdproxy_workers", 2)
            left = await proxy.metric("pdproxy_node_inflight", node=decode.url)
            assert left < STREAMS
            await holds("pdproxy_node_other_requests", left, node=decode.url)
            server.records[NAME, "A"] = (0, ["127.0.0.1", "127.0.0.2", "127.0.0.3"])
            await holds("pdproxy_replicas", 3)
            await holds("pdproxy_node_other_requests", 2 * left, node=decode.url)
            go.set()
            ends = await asyncio.gather(*(client.rest(head) for client, head in clients), return_exceptions=True)
            whole = [one for one in ends if isinstance(one, Answer) and one.ended]
            assert {one.body for one in whole} == {WORD + WORD + answers.end()}
            assert len(whole) == left, "all but those of the killed worker"
            await holds("pdproxy_node_other_requests", 0, node=decode.url)
            assert (await proxy.ask("POST", COMPLETIONS, completion())).text == TEXT
            process.terminate()
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            for engine in engines:
                engine.stop()
