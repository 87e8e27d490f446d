"""A proxy with two workers, as processes, that follows the file of its settings and a name in
DNS.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.fakes import forked
from tests.fakes.books import Books
from tests.fakes.engine import FakeEngine
from tests.fakes.name_server import name_server
from tests.fakes.ports import free_port
from tests.fakes.process import PATIENCE, Served
from tests.fakes.served_workers import ENVIRONMENT
from tests.fakes.world import COMPLETIONS, TEXT, completion, until

NAME = "_vllm._tcp.example"


@asynccontextmanager
async def _serving(path: Path, port: int, engines: list[FakeEngine]) -> AsyncIterator[Served]:
    """Run `pdproxy serve` with the settings of a file. It must end with 0."""
    process = forked.command("serve", "--config", str(path), env=ENVIRONMENT)
    try:
        yield Served(process, port, engines)
    finally:
        process.terminate()
        assert await process.wait() == 0


async def _until(proxy: Served, holds: Callable[[str], bool]) -> None:
    """Wait until this holds for what `/ready` answers, several times in a row: any worker may
    answer.
    """
    async with asyncio.timeout(PATIENCE):
        good = 0
        while good < 4:
            try:
                answer = await proxy.ask("GET", "/ready")
            except OSError:
                await asyncio.sleep(0.05)  # it does not listen yet
                continue
            good = good + 1 if holds(answer.body.decode()) else 0
            await asyncio.sleep(0.02)


async def test_two_workers_follow_their_file_and_a_name(tmp_path: Path) -> None:
    """Each finds the engine that the name stands for, and the one that comes later; a changed limit
    holds for all of them.
    """
    path, port, books = tmp_path / "pdproxy.yaml", free_port(), Books()
    prefill, first, second = engines = [
        FakeEngine(role, books) for role in ("prefill", "decode", "decode")
    ]
    async with name_server() as server:

        def write(limits: str) -> None:
            path.write_text(
                f"listen: {{port: {port}, workers: {3 if limits else 2}}}\n"
                f"dns: {{servers: ['{server.address}'], min_ttl: 0.05, max_ttl: 0.1}}\n{limits}"
                f"pools:\n- connector: nixl\n  nodes:\n  - {{url: '{prefill.url}', role: "
                f"prefill}}\n"
                f"  - {{url: 'srv://{NAME}', role: decode}}\n"
            )

        def has(*found: FakeEngine) -> None:
            texts = [f"0 0 {one.url.rpartition(':')[2]} 127.0.0.1." for one in found]
            server.records[NAME, "SRV"] = (0, texts)

        for engine in engines:
            await engine.listen()
        has(first)
        write("")
        async with _serving(path, port, [prefill, first]) as proxy:
            await _until(proxy, lambda body: '"state":"ok"' in body)
            assert len(proxy.workers()) == 2
            for _ in range(8):
                assert (await proxy.ask("POST", COMPLETIONS, completion())).text == TEXT
            assert await proxy.metric("pdproxy_dns_engines") == 1
            has(second)
            second.requests.clear()
            async with asyncio.timeout(PATIENCE):
                while await proxy.metric("pdproxy_node_up", node=first.url):
                    await asyncio.sleep(0.05)
                while await proxy.metric("pdproxy_node_up", node=second.url) != 1:
                    await asyncio.sleep(0.05)
            for _ in range(8):
                assert (await proxy.ask("POST", COMPLETIONS, completion())).text == TEXT
            assert len(second.requests) == 8
            assert await proxy.metric("pdproxy_places") == 1024
            write("limits: {max_inflight: 7}\n")
            proxy.process.send_signal(signal.SIGHUP)
            await _until(
                proxy,
                lambda body: "need a restart: listen.workers" in body and '"worker ' not in body,
            )
            assert await proxy.metric("pdproxy_places") == 7
            assert await proxy.metric("pdproxy_settings_reloads_total", result="applied") == 1
            assert len(proxy.workers()) == 2
    for engine in engines:
        engine.stop()


async def test_a_process_that_starts_again_begins_with_the_settings_in_force(
    tmp_path: Path,
) -> None:
    """Not with those of the supervisor's start: an engine that was taken out gets nothing. That the
    file can't be used any more is said once, and changes nothing.
    """
    path, port, books = tmp_path / "pdproxy.yaml", free_port(), Books()
    prefill, former, present = engines = [
        FakeEngine(role, books) for role in ("prefill", "decode", "decode")
    ]
    for engine in engines:
        await engine.listen()

    def write(decode: FakeEngine) -> None:
        path.write_text(
            f"listen: {{port: {port}, workers: 2}}\n"
            f"pools:\n- connector: nixl\n  nodes:\n  - {{url: '{prefill.url}', role: prefill}}\n"
            f"  - {{url: '{decode.url}', role: decode}}\n"
        )

    async def serves() -> None:
        for _ in range(12):
            async with asyncio.timeout(PATIENCE):
                assert (await proxy.ask("POST", COMPLETIONS, completion())).text == TEXT

    write(former)
    async with _serving(path, port, [prefill, former]) as proxy:
        await _until(proxy, lambda body: '"state":"ok"' in body)
        write(present)
        proxy.process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(PATIENCE):
            while await proxy.metric("pdproxy_node_up", node=present.url) != 1:
                await asyncio.sleep(0.05)
            while await proxy.metric("pdproxy_node_up", node=former.url):
                await asyncio.sleep(0.05)
        former.requests.clear()
        before = proxy.workers()
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: before[0] not in proxy.workers())
        await serves()
        path.write_text("pools: 1\n")
        wrong = "the settings can't be read again: pools: expected a list"
        await _until(proxy, lambda body: body.count(wrong) == 1 and '"worker ' not in body)
        refused = await proxy.metric("pdproxy_settings_reloads_total", result="refused")
        assert refused == 1
        scheduler = proxy.scheduler()
        assert scheduler is not None
        for pid in (before[1], scheduler):
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: pid not in [*proxy.workers(), proxy.scheduler()])  # type: ignore[misc]
        await _until(proxy, lambda body: body.count(wrong) == 1 and "does not" not in body)
        await serves()
        assert await proxy.metric("pdproxy_workers") == 2
        write(present)
        await _until(proxy, lambda body: '"state":"ok"' in body)
        await serves()
        assert not former.requests
        assert present.requests
    for engine in engines:
        engine.stop()
