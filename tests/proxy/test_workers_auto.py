"""Placement `auto` and KV events with several workers: what one knows all use, and a killed worker
takes nothing along.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdproxy.scheduling.auto.auto import Auto
from pdproxy.scheduling.auto.workers import WorkerAuto
from pdproxy.settings.pools import PoolPolicy, PoolSlo
from pdproxy.settings.schema import Settings
from pdproxy_lab.sim.server import SimServer
from tests.fakes import answers, forked, scripts, several
from tests.fakes.admin import BASE, Api
from tests.fakes.books import Books
from tests.fakes.client import request
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.ports import free_port
from tests.fakes.process import PATIENCE, Served
from tests.fakes.scripts import WORD
from tests.fakes.served_workers import ENVIRONMENT
from tests.fakes.world import COMPLETIONS, completion, until, world
from tests.proxy.kv_events import ANY, facts, prompt

ENGINES = 3


class Run:
    """A proxy with two workers, its admin API and its engines."""

    def __init__(
        self, process: forked.Forked, port: int, admin: int, sims: list[SimServer]
    ) -> None:
        # not there
        self.served = Served(
            process, port, [FakeEngine(role, Books()) for role in ("prefill", "decode")]
        )
        self.api = Api(admin)
        self.sims = sims
        self.events: int | None = None
        """The port to which engines connect with their KV events; None: they are connected to."""

    async def ask(self, number: int) -> int:
        """Send a prompt on a connection of its own. Return the number of the engine that served
        it.
        """
        before = [sim.engine.stats.prompt_tokens for sim in self.sims]
        answer = await self.served.ask(
            "POST", COMPLETIONS, completion(prompt=prompt(number), max_tokens=2)
        )
        assert answer.status == 200, answer.body
        return next(
            at for at, sim in enumerate(self.sims) if sim.engine.stats.prompt_tokens != before[at]
        )

    def replays(self) -> list[int]:
        """How many replays each engine was asked for."""
        return [sim.engine.kv_events.ranks[0].counts["replays"] for sim in self.sims]

    async def heard(self, replays: int) -> None:
        """Wait until both workers serve, and they and the scheduler process have the events of all
        engines, each of which was asked for so many replays.
        """
        async with asyncio.timeout(PATIENCE):
            while (
                await self.served.metric("pdproxy_workers") != 2
                or min(self.replays()) < replays
                or self._replaying()
            ):
                await asyncio.sleep(0.02)
            while await self.served.metric("pdproxy_kv_event_backlog_bytes"):
                await asyncio.sleep(0.02)

    def _replaying(self) -> bool:
        ends = [sim.engine.kv_events.ranks[0].config for sim in self.sims]
        try:
            asking = [
                self.served.connected(_port(end.replay_endpoint), is_theirs=False) for end in ends
            ]
            if self.events is not None:
                return any(asking) or not self.served.connected(self.events, is_theirs=True)
            listening = [
                set(self.served.connected(_port(end.endpoint), is_theirs=False)) for end in ends
            ]
        except FileNotFoundError:
            return True  # a worker has just closed a file
        every = {*self.served.workers(), self.served.scheduler()}
        return any(asking) or any(one != every for one in listening)

    async def taken(self) -> bool:
        """Whether each message was counted once, of all that engines have published."""
        sent = sum(sim.engine.kv_events.ranks[0].counts["sent"] for sim in self.sims)
        counted = [
            await self.served.metric("pdproxy_kv_event_messages_total", result=how)
            for how in ("live", "replayed")
        ]
        return sum(counted) == sent

    def replaced(self, pid: int) -> bool:
        """Whether a killed worker has a successor."""
        return pid not in self.served.workers() and len(self.served.workers()) == 2

    async def decisions(self) -> list[dict[str, Any]]:
        """Those of both workers, the newest first."""
        page = (await self.api.ask("GET", f"{BASE}/decisions")).json
        assert page["placement"] == "auto"
        found: list[dict[str, Any]] = page["decisions"]
        return found


@asynccontextmanager
async def running(tmp_path: Path, events: int | None = None) -> AsyncIterator[Run]:
    """Run `pdproxy serve`. It ends with 0. `events`: a port to which engines connect with their KV
    events.
    """
    async with AsyncExitStack() as stack:
        sims = []
        for number in range(ENGINES):
            endpoint = ANY.endpoint if events is None else f"tcp://127.0.0.1:{events}"
            config = msgspec.structs.replace(ANY, endpoint=endpoint, topic=f"engine-{number}")
            made = facts(config, enable_prompt_tokens_details=True, model="tiny")
            sims.append(await stack.enter_async_context(SimServer(made, chance=number)))
        host = "" if events is None else f", host: 127.0.0.1, port: {events}"
        port, admin = free_port(), free_port()
        path = tmp_path / "pdproxy.yaml"
        path.write_text(
            f"listen: {{port: {port}, workers: 2, admin: '127.0.0.1:{admin}'}}\ndeadlines: "
            f"{{drain: 5}}\npools:\n"
            "- policy: {placement: auto}\n  profile: h200-8b\n  kv_events: {enabled: true"
            f"{host}}}\n  nodes:\n"
            + "".join(f"  - {{url: '{sim.url}', role: aggregated}}\n" for sim in sims)
        )
        log = stack.enter_context((tmp_path / "log").open("wb"))
        process = forked.command("serve", "--config", str(path), env=ENVIRONMENT, stderr=log)
        run = Run(process, port, admin, sims)
        run.events = events
        try:
            async with asyncio.timeout(PATIENCE):
                while True:
                    try:
                        if (await run.served.ask("GET", "/ready")).json["state"] == "ok":
                            break
                    except OSError:
                        assert process.returncode is None, (tmp_path / "log").read_text()
                    await asyncio.sleep(0.05)
            await run.heard(3)
            yield run
            process.terminate()
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _port(endpoint: str | None) -> int:
    assert endpoint is not None
    return int(endpoint.rpartition(":")[2])


async def test_what_engines_have_cached_is_known_to_all_workers_and_their_successors(
    tmp_path: Path,
) -> None:
    """Each process reads the events by itself: where a worker is killed, the other goes on. Its
    successor asks for a replay.
    """
    async with running(tmp_path) as run:
        at = [await run.ask(number) for number in range(2)]
        await run.heard(3)
        pid = run.served.workers()[0]
        os.kill(pid, signal.SIGKILL)
        await until(partial(run.replaced, pid), PATIENCE)
        at.append(await run.ask(2))
        await run.heard(4)
        assert [await run.ask(number % 3) for number in range(12)] == [
            at[number % 3] for number in range(12)
        ]
        found = await run.decisions()
        assert [one["reason"] for one in found[:12]] == ["cached"] * 12
        assert [one["age_s"] for one in found] == sorted(one["age_s"] for one in found)
        assert {one["request_id"][:2] for one in found} == {"00", "01"}


async def test_engines_that_connect_to_one_worker_are_known_to_all(tmp_path: Path) -> None:
    """The worker that has connections is killed: its engines go to the other one. Each message is
    counted once.
    """
    events = free_port()
    async with running(tmp_path, events) as run:
        at = [await run.ask(number) for number in range(2)]
        async with asyncio.timeout(PATIENCE):
            while not await run.taken():
                await asyncio.sleep(0.02)
        assert [await run.ask(number % 2) for number in range(6)] == at * 3
        pid = run.served.connected(events, is_theirs=True)[0]
        os.kill(pid, signal.SIGKILL)
        await until(partial(run.replaced, pid), PATIENCE)
        at.append(await run.ask(2))
        await run.heard(4)
        assert [await run.ask(number % 3) for number in range(12)] == [
            at[number % 3] for number in range(12)
        ]
        found = await run.decisions()
        assert [one["reason"] for one in found[:12]] == ["cached"] * 12


def by_prediction(settings: Settings) -> Settings:
    """Predicted times choose engines of role any."""
    (pool,) = settings.pools
    chosen = msgspec.structs.replace(
        pool,
        policy=PoolPolicy(placement="auto"),
        profile="h200-8b",
        slo=PoolSlo(ttft=0.5, tpot=0.015),
    )
    return msgspec.structs.replace(settings, pools=(chosen,))


async def _ends(reply: Reply) -> None:
    await reply.pieces(WORD, answers.end())
    await reply.finish()


async def _spread(workers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """Have eight streams come, each on a connection of its own. Return how many each engine has, as
    all workers see it.
    """
    monkeypatch.setattr(several, "WORKERS", workers)
    async with world(0, 0, 4, adjust=by_prediction) as w:
        placements = [worker.ledger.placement for worker in w.workers]
        go = asyncio.Event()
        for engine in w.engines:
            engine.default = scripts.after_word(go, _ends)

        def has(at: int) -> int:
            return int(w.metric("pdproxy_node_inflight", node=w.engines[at].url))

        def seen() -> set[tuple[int, ...]]:
            loads = [placement._loads for placement in placements if isinstance(placement, Auto)]
            return {
                tuple(one[engine.url].expected + one[engine.url].decoding for engine in w.engines)
                for one in loads
            }

        clients = []
        for number in range(1, 9):
            clients.append(await w.client())
            clients[-1].send(
                request("POST", COMPLETIONS, completion(stream=True, prompt=prompt(number)))
            )
            await until(partial(lambda number: sum(map(has, range(4))) == number, number))
        found = has(0), has(1), has(2), has(3)
        await until(lambda: seen() == {found})
        go.set()
        for client in clients:
            assert (await client.answer()).status == 200
        await until(lambda: seen() == {(0, 0, 0, 0)})
        if workers > 1:
            assert {type(placement) for placement in placements} == {WorkerAuto}
            assert 0 < w.metric("pdproxy_placement_shared_age_seconds") < PATIENCE
        return found


async def test_streams_of_all_workers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees where all of them are, until they end. In tests/auto, with its clock, one process
    spreads them so, too.
    """
    for workers in (3, 1):
        assert sum(await _spread(workers, monkeypatch)) == 8
