"""Two workers, as processes, whose engines send notices, or register: the scheduler process has
the connections, and processes are killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.facts import LMCacheFacts, SimFacts
from pdproxy_lab.sim.server import SimServer
from tests.fakes import forked
from tests.fakes.forked import piped
from tests.fakes.ports import free_port
from tests.fakes.process import PATIENCE, Served
from tests.fakes.served_workers import ENVIRONMENT
from tests.fakes.world import COMPLETIONS, until

PROMPT = "The quick brown fox jumps over the lazy dog. " * 6
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
CHUNK = 32
REQUESTS = 12
WAIT = 2.0
"""Seconds for notices. What is lost when the scheduler process ends may cost a prompt that long."""


@asynccontextmanager
async def _sims(*facts: SimFacts) -> AsyncIterator[list[SimServer]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(SimServer(one, port=free_port(), chance=number))
            for number, one in enumerate(facts, start=1)
        ]


def _facts(connector: str, role: str, **more: Any) -> SimFacts:
    usual: dict[str, Any] = {"model": "tiny", "eos_every": 0, "hardware": Hardware(speed=0)}
    return SimFacts(**usual, connector=connector, role=role, **more)  # type: ignore[arg-type]


@asynccontextmanager
async def _serving(
    tmp_path: Path, settings: Mapping[str, Any], sims: Sequence[SimServer]
) -> AsyncIterator[Served]:
    """Run the proxy with two workers until the block ends."""
    path, port = tmp_path / "pdproxy.yaml", free_port()
    path.write_text(
        json.dumps(
            {"listen": {"port": port, "workers": 2}, "deadlines": {"kv_ready": WAIT}, **settings}
        )
    )
    with (tmp_path / "log").open("wb") as log:
        process = forked.command("serve", "--config", str(path), env=ENVIRONMENT, stderr=log)
        served = Served(process, port, [SimpleNamespace(books=None), None])  # type: ignore[list-item]
        try:
            await _is_ready(served, tmp_path)
            yield served
            process.terminate()
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _is_ready(served: Served, tmp_path: Path) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                if (await served.ask("GET", "/ready")).json["state"] == "ok":
                    return
            except OSError:
                assert served.process.returncode is None, (tmp_path / "log").read_text()
            await asyncio.sleep(0.02)


async def _statuses(served: Served) -> list[int]:
    """Ask on connections of their own, which the system spreads over the workers."""
    answers = await asyncio.gather(
        *(served.ask("POST", COMPLETIONS, BODY) for _ in range(REQUESTS))
    )
    return [answer.status for answer in answers]


async def _killed(served: Served, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)

    def is_replaced() -> bool:
        there = [*served.workers(), served.scheduler()]
        return pid not in there and None not in there and len(there) == 3

    await until(is_replaced, PATIENCE)


def _lmcache(zmq_port: int, sims: Sequence[SimServer]) -> Mapping[str, Any]:
    p, d = sims
    init, alloc = d.engine.receiver_ports
    receiver = {"init_ports": list(init), "alloc_ports": list(alloc)}
    engines = [
        {"url": p.url, "role": "prefill"},
        {"url": d.url, "role": "decode", "receiver": receiver},
    ]
    return {
        "kv_ready": {"port": zmq_port, "on_timeout": "fail"},
        "pools": [{"connector": "lmcache-pd", "lmcache": {"chunk_size": CHUNK}, "nodes": engines}],
    }


async def test_notices_find_their_worker_whatever_is_killed(tmp_path: Path) -> None:
    """They come to the scheduler process. A worker that stands still holds up no prompt of the
    other one.
    """
    zmq_port = free_port()
    sim: dict[str, Any] = {"chunk_size": CHUNK}
    d_sim = sim | {"pd_peer_init_port": 0, "pd_peer_alloc_port": 0, "skip_last_n_tokens": 1}
    p_facts = _facts(
        "lmcache-pd",
        "prefill",
        notify=f"tcp://127.0.0.1:{zmq_port}",
        lmcache=LMCacheFacts(**sim),
        enable_prefix_caching=False,
    )
    d_facts = _facts(
        "lmcache-pd", "decode", lmcache=LMCacheFacts(**d_sim), enable_prefix_caching=False
    )
    async with (
        _sims(p_facts, d_facts) as sims,
        _serving(tmp_path, _lmcache(zmq_port, sims), sims) as served,
    ):
        assert set(await _statuses(served)) == {200}
        assert served.connected(zmq_port, is_theirs=True) == [served.scheduler()]
        # of a worker that is slow to answer, a page has its last report
        async with asyncio.timeout(PATIENCE):
            while (sent := await served.metric("pdproxy_kv_notices_total")) < REQUESTS:
                await asyncio.sleep(0.1)
        assert sent == await served.metric(
            "pdproxy_kv_notices_total", event="ready", result="awaited"
        )
        for pid in (served.scheduler(), served.workers()[0]):
            assert pid is not None
            await _killed(served, pid)
            await until(
                lambda: served.connected(zmq_port, is_theirs=True) == [served.scheduler()], PATIENCE
            )
            await _is_ready(served, tmp_path)
            assert set(await _statuses(served)) == {200}
        stopped = served.workers()[0]
        os.kill(stopped, signal.SIGSTOP)
        try:
            asked = [
                asyncio.create_task(served.ask("POST", COMPLETIONS, BODY)) for _ in range(REQUESTS)
            ]
            done, late = await asyncio.wait(asked, timeout=WAIT + 1)
            assert {task.result().status for task in done} == {200}
        finally:
            os.kill(stopped, signal.SIGCONT)
        await asyncio.gather(*late)
        assert stopped in served.workers()
        assert set(await _statuses(served)) == {200}


async def test_notices_of_a_connector_that_engines_have_named(tmp_path: Path) -> None:
    """Its port is bound once it is known, and again by the next scheduler process."""
    port = free_port()
    notify = {"notify": f"tcp://127.0.0.1:{port}"}
    facts = [_facts("nixl", role, **notify) for role in ("prefill", "decode")]
    async with _sims(*facts) as sims:
        engines = [
            {"url": one.url, "role": role}
            for one, role in zip(sims, ("prefill", "decode"), strict=True)
        ]
        settings = {
            "kv_ready": {"port": port, "notifier": True},
            "pools": [{"connector": "auto", "nodes": engines}],
        }
        async with _serving(tmp_path, settings, sims) as served:
            for _ in range(2):
                before = await served.metric("pdproxy_kv_notices_total", result="known")
                async with asyncio.timeout(PATIENCE):
                    while await served.metric("pdproxy_kv_notices_total", result="known") <= before:
                        assert set(await _statuses(served)) == {200}
                        await asyncio.sleep(0.2)
                assert served.connected(port, is_theirs=True) == [served.scheduler()]
                pid = served.scheduler()
                assert pid is not None
                await _killed(served, pid)
                await _is_ready(served, tmp_path)


@pytest.mark.parametrize("is_scheduler", [True, False])
async def test_registrations_outlive_a_process(is_scheduler: bool, tmp_path: Path) -> None:
    """The scheduler process, which reads them, is killed, or a worker. Its successor knows who has
    registered when it serves.
    """
    port = free_port()
    register = {
        "register": f"tcp://127.0.0.1:{port}",
        "registration_interval": 0.3,
        "randomize_request_ids": False,
    }
    facts = [_facts("p2p-nccl", role, **register) for role in ("prefill", "decode")]
    async with _sims(*facts) as sims:
        engines = [
            {"url": one.url, "role": role}
            for one, role in zip(sims, ("prefill", "decode"), strict=True)
        ]
        registration = {"port": port, "timeout": 60}
        settings = {
            "registration": registration,
            "pools": [{"connector": "p2p-nccl", "nodes": engines}],
        }
        async with _serving(tmp_path, settings, sims) as served:
            assert set(await _statuses(served)) == {200}
            assert served.connected(port, is_theirs=True) == [served.scheduler()]
            pid = served.scheduler() if is_scheduler else served.workers()[0]
            assert pid is not None
            await _killed(served, pid)
            await _is_ready(served, tmp_path)
            assert set(await _statuses(served)) == {200}
            await until(lambda: served.connected(port, is_theirs=True), PATIENCE)
            before = await served.metric("pdproxy_registrations_total", result="known")
            async with asyncio.timeout(PATIENCE):
                while (
                    await served.metric("pdproxy_registrations_total", result="known") < before + 2
                ):
                    await asyncio.sleep(0.05)
            assert await served.metric("pdproxy_registrations_total", result="expired") == 0
            assert await served.metric("pdproxy_registrations_total", result="contested") == 0


async def test_a_port_that_is_taken_is_said_before_any_worker_begins(tmp_path: Path) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    engines = [
        {"url": f"http://127.0.0.1:{free_port()}", "role": role} for role in ("prefill", "decode")
    ]
    settings: dict[str, Any] = {
        "listen": {"port": free_port(), "workers": 2},
        "registration": {"port": port},
    }
    path = tmp_path / "pdproxy.yaml"
    path.write_text(json.dumps(settings | {"pools": [{"connector": "moriio", "nodes": engines}]}))
    process = await piped("serve", "--config", str(path), env=ENVIRONMENT)
    _, lines = await asyncio.wait_for(process.communicate(), PATIENCE)
    server.close()
    assert process.returncode == 2
    assert (
        f"can't bind registration.host:registration.port = 127.0.0.1:{port}: Address already in use"
        in lines.decode()
    )
    assert len(lines.decode().strip().split("\n")) == 1
