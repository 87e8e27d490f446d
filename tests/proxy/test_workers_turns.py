"""kill -9 of a worker, and of the scheduler process, while conversations hand KV back: no engine
holds KV that nobody uses or releases, and none is asked for KV that it does not have.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer
from tests.fakes.client import exchange, request
from tests.fakes.forked import start
from tests.fakes.ports import free_port
from tests.fakes.process import PATIENCE, Served
from tests.fakes.served_workers import ENVIRONMENT, SERVE
from tests.fakes.world import COMPLETIONS, until

KILLS = int(os.environ.get("PDPROXY_TEST_KILLS", "2"))
TALKS = 6
"""Conversations at the same time."""
LONGEST = 4096
"""Tokens of one: the engines take 8192."""
FACTS = SimFacts(
    model="tiny",
    eos_every=0,
    hardware=Hardware(speed=0),
    connector="nixl",
    version="0.33.0",
    bidirectional_kv_xfer=True,
    decoder_kv_blocks_ttl=3600.0,
    max_model_len=8192,
    num_gpu_blocks=20_000,
)


@asynccontextmanager
async def _running(tmp_path: Path) -> AsyncIterator[tuple[Served, SimServer]]:
    """Run two workers before a pair of simulated engines. Gives the proxy and the decode engine."""
    port, path = free_port(), tmp_path / "pdproxy.yaml"
    p = SimServer(SimFacts(**{**_fields(FACTS), "role": "prefill"}), port=free_port(), chance=1)
    d = SimServer(SimFacts(**{**_fields(FACTS), "role": "decode"}), port=free_port(), chance=2)
    async with p, d:
        path.write_text(
            f"listen: {{port: {port}, workers: 2}}\n"
            "deadlines: {drain: 5}\n"
            "kv_ready: {notifier: false}\n"
            "health: {stalled_after: 0}\n"
            "pools:\n"
            "- connector: nixl\n"
            "  turns: {bidirectional: true, min_tokens: 16, max_blocks: 100000, "
            "decoder_kv_blocks_ttl: 3600}\n"
            "  nodes:\n"
            f"  - {{url: '{p.url}', role: prefill}}\n"
            f"  - {{url: '{d.url}', role: decode}}\n"
        )
        with (tmp_path / "log").open("wb") as log:
            process = start(SERVE, [str(path), "60"], ENVIRONMENT, log)
            engines = cast("Any", [SimpleNamespace(books=None)] * 2)
            proxy = Served(process, port, engines)
            try:
                async with asyncio.timeout(PATIENCE):
                    while True:
                        with suppress(OSError):
                            if (await proxy.ask("GET", "/ready")).json["state"] == "ok":
                                break
                        assert process.returncode is None, (tmp_path / "log").read_text()
                        await asyncio.sleep(0.05)
                yield proxy, d
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()


def _fields(facts: SimFacts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in facts.__struct_fields__}


class Talk:
    """A conversation. `failed`: how many of its prompts have got no answer."""

    def __init__(self, number: int) -> None:
        self._ids = [number * 100 + at for at in range(64)]
        self.failed = self.answered = 0

    async def turn(self, port: int) -> None:
        """Ask the next turn, of another conversation once one has many."""
        if len(self._ids) > LONGEST:
            self._ids = [one + 100 * TALKS for one in self._ids[:64]]
        body = {
            "model": "tiny",
            "prompt": self._ids,
            "max_tokens": 8,
            "temperature": 0,
            "return_token_ids": True,
        }
        try:
            answer = await exchange(port, request("POST", COMPLETIONS, body))
        except (OSError, EOFError):  # of the killed worker
            self.failed += 1
            return
        if answer.status == 200 and answer.ended:
            self._ids += answer.json["choices"][0]["token_ids"]
            self._ids += [self.answered % 500 + at for at in range(100, 116)]
            self.answered += 1
        else:
            self.failed += 1


@pytest.mark.timeout(120 + 20 * KILLS)
@pytest.mark.parametrize("what", ["worker", "scheduler"])
async def test_what_is_killed_leaves_no_kv(tmp_path: Path, what: str) -> None:
    """Of a killed worker only what its requests used."""
    chance = random.Random(5)
    async with _running(tmp_path) as (proxy, d):
        talks = [Talk(number) for number in range(1, TALKS + 1)]
        go_on = True

        async def converse(talk: Talk) -> None:
            while go_on:
                await talk.turn(proxy.port)
                await asyncio.sleep(chance.random() / 20)

        tasks = [asyncio.create_task(converse(talk)) for talk in talks]
        for _ in range(KILLS):
            before = sum(talk.answered for talk in talks)
            await until(lambda: sum(one.answered for one in talks) > before + 3 * TALKS, PATIENCE)  # noqa: B023
            pid = proxy.scheduler() if what == "scheduler" else chance.choice(proxy.workers())
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda: _is_whole(proxy, pid), PATIENCE)  # noqa: B023
            before = sum(talk.answered for talk in talks)
            await until(lambda: sum(one.answered for one in talks) > before + 3 * TALKS, PATIENCE)  # noqa: B023
        go_on = False
        await asyncio.gather(*tasks)
        failed = sum(talk.failed for talk in talks)
        assert failed == 0 if what == "scheduler" else failed <= TALKS * KILLS
        async with asyncio.timeout(PATIENCE):
            while await proxy.metric("pdproxy_scheduler") != 1:
                await asyncio.sleep(0.05)
        assert await proxy.metric("pdproxy_turns_reused_total") > 0
        assert await proxy.metric("pdproxy_turns_dropped_total", reason="failed") == 0
        async with asyncio.timeout(PATIENCE):  # what was told last may be under way
            while what == "scheduler" and len(d.engine.handles) != await proxy.metric(
                "pdproxy_turns"
            ):
                await asyncio.sleep(0.05)
        kept = await proxy.metric("pdproxy_turns")
        assert kept > 0
        assert kept <= len(d.engine.handles) <= kept + TALKS * KILLS
        left = len(d.engine.handles) - kept
        proxy.process.send_signal(signal.SIGTERM)
        assert await proxy.process.wait() == 0
        await until(lambda: len(d.engine.handles) == left, PATIENCE)


def _is_whole(proxy: Served, killed: int) -> bool:
    """Whether all processes run, but for the killed one."""
    scheduler = proxy.scheduler()
    return scheduler not in (None, killed) and len({*proxy.workers()} - {killed}) == 2
