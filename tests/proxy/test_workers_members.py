"""Members of a pool with two workers, as processes: the scheduler process alone decides who is one,
and its successor goes on with what it has decided.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from pdproxy.fleet.entries import engine_id
from tests.fakes import answers, scripts
from tests.fakes.books import Books
from tests.fakes.client import Client
from tests.fakes.engine import FakeEngine
from tests.fakes.name_server import name_server
from tests.fakes.process import PATIENCE
from tests.fakes.scripts import WORD
from tests.fakes.served_workers import nodes, serving
from tests.fakes.world import COMPLETIONS, TEXT, completion, until
from tests.proxy.test_dns import SERVICE, URL, has
from tests.proxy.test_workers_admin import running, states


async def test_one_process_asks_dns_for_all(tmp_path: Path) -> None:
    """Its successor serves with the last answer while no server answers."""
    books = Books()
    engines = [FakeEngine(role, books) for role in ("prefill", "decode", "decode")]
    async with name_server() as server:

        def settings(port: int, admin: int) -> str:
            return (
                f"listen: {{port: {port}, workers: 2, admin: '127.0.0.1:{admin}'}}\n"
                f"dns: {{servers: ['{server.address}'], min_ttl: 0.2, max_ttl: 0.2}}\n"
                "deadlines: {drain: 5}\nprobes: {interval: 0.2}\npools:\n- connector: nixl\n"
                f"{nodes(engines[:1])}  - {{url: '{URL}', role: decode}}\n"
            )

        first, second = engines[1:]
        await second.listen()
        await first.listen()
        has(server, first)
        async with serving(tmp_path, engines, settings) as run:
            for _ in range(8):
                assert (await run.proxy.ask("POST", COMPLETIONS, completion())).text == TEXT
            loop = asyncio.get_running_loop()
            began, asked = loop.time(), len(server.asked)
            await asyncio.sleep(2.0)
            # once in 0.1 s at most: half of the time to live, at random
            assert len(server.asked) - asked <= 12 * (loop.time() - began)
            server.fault = "silent"
            await run.kill_scheduler()
            for _ in range(8):
                assert (await run.proxy.ask("POST", COMPLETIONS, completion())).text == TEXT
            assert states((await run.ask("GET", "/engines")).json).keys() == {
                engines[0].url,
                first.url,
            }
            server.fault = ""
            has(server, second)
            await run.all_say("/engines", lambda shown: first.url not in states(shown))
            assert len(second.requests) == 0
            for _ in range(8):
                assert (await run.proxy.ask("POST", COMPLETIONS, completion())).text == TEXT
            assert len(second.requests) == 8
            assert (SERVICE, "SRV") in server.asked
            assert await run.proxy.metric("pdproxy_dns_engines") == 1


async def test_no_worker_takes_requests_before_the_engines_are_known(tmp_path: Path) -> None:
    """The scheduler process alone asks DNS, and tells them."""
    engine = FakeEngine("aggregated", Books())
    async with name_server() as server:

        def settings(port: int, admin: int) -> str:
            return (
                f"listen: {{port: {port}, workers: 2, admin: '127.0.0.1:{admin}'}}\n"
                f"dns: {{servers: ['{server.address}'], min_ttl: 0.2, max_ttl: 0.2}}\n"
                "deadlines: {drain: 5}\n"
                f"pools: [{{nodes: [{{url: '{URL}', role: aggregated}}]}}]\n"
            )

        shown = [engine, engine]
        async with serving(tmp_path, [engine], settings, shown, state="not_ready") as run:

            async def reasons() -> set[str | None]:
                answers = [await run.proxy.ask("GET", "/ready/proxy") for _ in range(8)]
                return {answer.json["reason"] for answer in answers}

            assert await reasons() == {f"starting: {URL} has not been answered yet"}
            has(server, engine)
            await run.all_say("/engines", lambda shown: engine.url in states(shown))
            assert await reasons() == {None}


async def test_an_engine_that_drains_is_drained_by_the_successor(tmp_path: Path) -> None:
    """Until its last stream has ended, and for as long as it was given at first."""
    go = asyncio.Event()
    async with running(tmp_path) as run:
        (new,), proxy = run.spare, run.proxy
        assert (await run.ask("POST", "/engines", {"url": new.url, "role": "decode"})).status == 201
        path = f"/engines/{engine_id(new.url)}"
        await run.all_say(path, lambda one: one["state"] in ("warming", "serving"))
        old = f"/engines/{engine_id(proxy.decode.url)}"
        assert (await run.ask("POST", f"{old}/drain")).status == 202
        new.script(scripts.after_word(go, scripts.one_more_word))
        client = await Client.connect(proxy.port)
        client.post(COMPLETIONS, completion(stream=True))
        head = await client.head()
        assert (await run.ask("DELETE", f"{path}?seconds=60")).status == 202
        for _ in range(2):
            await run.kill_scheduler()
            shown = await run.all_say(path, lambda one: one["drain"] is not None)
            drain = shown["drain"]
            assert (shown["state"], drain["removes"], drain["by"]) == ("draining", True, "admin")
            assert drain["since_s"] + drain["left_s"] <= 60.2
        go.set()
        assert (await client.rest(head)).body == WORD + WORD + answers.end()
        client.close()
        async with asyncio.timeout(PATIENCE):
            while (await run.ask("GET", path)).status != 404:
                await asyncio.sleep(0.02)
        assert states((await run.ask("GET", "/engines")).json)[proxy.decode.url] == "drained"


async def test_a_worker_that_is_stopped_holds_up_no_change(tmp_path: Path) -> None:
    """It has all engines as they are once it goes on, and an engine that drains waits for its
    answer.
    """
    async with running(tmp_path) as run:
        (new,), proxy = run.spare, run.proxy
        still, _ = proxy.workers()
        path = f"/engines/{engine_id(new.url)}"
        fields = {"url": new.url, "role": "decode"}
        os.kill(still, signal.SIGSTOP)
        for _ in range(20):
            assert (await run.ask("POST", "/engines", fields)).status == 201
            assert (await run.ask("DELETE", f"{path}?at_once=true")).status == 200
        assert (await run.ask("POST", "/engines", fields)).status == 201
        assert (await run.ask("DELETE", f"{path}?seconds=60")).status == 202
        await asyncio.sleep(1.5)
        assert (await run.ask("GET", path)).json["state"] == "draining", "it may have KV there"
        os.kill(still, signal.SIGCONT)
        async with asyncio.timeout(PATIENCE):
            while (await run.ask("GET", path)).status != 404:
                await asyncio.sleep(0.02)
        assert still in proxy.workers()
        await until(lambda: len(proxy.workers()) == 2)
