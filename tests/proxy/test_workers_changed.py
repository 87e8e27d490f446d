"""Engines, settings and keys change under clients of two workers, while a worker and the scheduler
process are killed in turn: no request fails but those of killed workers, and all processes have
what was changed last.
"""

# PDPROXY_TEST_CHANGES: how many changes, 200 in `.ci/full`.

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy.fleet.entries import engine_id
from tests.fakes.books import Books
from tests.fakes.client import Answer, Client, bearer, exchange, request
from tests.fakes.engine import FakeEngine
from tests.fakes.process import PATIENCE
from tests.fakes.served_workers import Run, nodes, serving
from tests.fakes.streams import LONGER, TOKENS
from tests.fakes.world import COMPLETIONS, completion, until

CHANGES = int(os.environ.get("PDPROXY_TEST_CHANGES", "12"))
CLIENTS = 50
EACH = max(CHANGES // 8, 4)
"""Changes between two kills."""


class Streams:
    """Clients that stream one answer after another. `broken`: those that have not come to their
    end.
    """

    def __init__(self, port: int) -> None:
        self.served = self.broken = 0
        self.refused: list[bytes] = []
        self._port = port
        self._over = asyncio.Event()
        self._tasks = [asyncio.create_task(self._stream()) for _ in range(CLIENTS)]

    async def _stream(self) -> None:
        while not self._over.is_set():
            try:
                answer = await self._answer()
            except (OSError, EOFError):
                self.broken += 1
                continue
            if answer.status != 200:
                self.refused.append(answer.body)
            elif not answer.ended:
                self.broken += 1
            else:
                assert answer.text == LONGER
                self.served += 1

    async def _answer(self) -> Answer:
        client = await Client.connect(self._port)
        try:
            body = completion(stream=True, max_tokens=TOKENS)
            client.post(COMPLETIONS, body, bearer("one"))
            return await client.answer()
        finally:
            client.close()

    async def more(self) -> None:
        """Wait until each client has had another answer, about."""
        wanted = self.served + CLIENTS
        await until(lambda: self.served >= wanted or self.refused, PATIENCE)

    async def end(self) -> None:
        """Wait for the last answers."""
        self._over.set()
        await asyncio.gather(*self._tasks)


class Changes:
    """What is changed, and how it is now."""

    def __init__(self, run: Run, keys: Path, text: str, chance: random.Random) -> None:
        self.places, self.has_second = 1000, False
        self._run, self._keys, self._text, self._chance = run, keys, text, chance

    async def engine(self) -> None:
        """Add, drain or remove one of the engines that the settings don't name."""
        spare, chance = self._chance.choice(self._run.spare), self._chance
        path = f"/engines/{engine_id(spare.url)}"
        found = await self._run.ask("GET", path)
        if found.status == 404:
            await self._asks("POST", "/engines", {"url": spare.url, "role": spare.role})
        elif found.json["drain"] is not None and chance.random() < 0.5:
            await self._asks("POST", f"{path}/undrain")
        elif chance.random() < 0.6:
            await self._asks("DELETE", f"{path}?at_once={chance.choice(['true', 'false'])}")
        else:
            await self._asks("POST", f"{path}/drain")

    async def _asks(self, method: str, path: str, body: object = b"") -> None:
        answer = await self._run.ask(method, path, body)
        # one that was made, and not answered by a process that was killed then, is asked for again
        assert answer.status in (200, 201, 202, 404, 409), answer.body

    async def settings(self) -> None:
        """Change a limit."""
        self.places = self._chance.randrange(500, 1000)
        self._run.config.write_text(f"{self._text}limits: {{max_inflight: {self.places}}}\n")
        self._run.proxy.process.send_signal(signal.SIGHUP)

    async def keys(self) -> None:
        """Give a second key, or take it away."""
        self.has_second = not self.has_second
        new = self._keys.with_suffix(".new")
        new.write_text("one\ntwo\n" if self.has_second else "one\n")
        new.rename(self._keys)

    async def are_made(self) -> None:
        """Wait until all processes have what was changed last."""
        expected = {spare.url for spare in self._run.spare}
        for spare in self._run.spare:
            path = f"/engines/{engine_id(spare.url)}"
            await self._asks("DELETE", f"{path}?at_once=true")
        await self._run.all_say(
            "/engines", lambda shown: not expected & {one["url"] for one in shown["engines"]}
        )
        async with asyncio.timeout(PATIENCE):
            while await self._run.proxy.metric("pdproxy_places") != self.places:
                await asyncio.sleep(0.05)
        status, good = 200 if self.has_second else 401, 0
        body = request("POST", COMPLETIONS, completion(), bearer("two"))
        async with asyncio.timeout(PATIENCE):
            while good < 16:
                answer = await exchange(self._run.proxy.port, body)
                good = good + 1 if answer.status == status else 0


@pytest.mark.timeout(180 + 2 * CHANGES)
async def test_changes_while_processes_are_killed(tmp_path: Path) -> None:
    chance = random.Random(int(os.environ.get("PDPROXY_TEST_SEED", "3")))
    books, keys = Books(), tmp_path / "keys"
    keys.write_text("one\n")
    roles = ("prefill", "decode", "prefill", "decode", "decode")
    engines = [FakeEngine(role, books, 3600.0, hardware=Hardware(speed=5)) for role in roles]
    texts: list[str] = []

    def settings(port: int, admin: int) -> str:
        texts.append(
            f"listen: {{port: {port}, workers: 2, admin: '127.0.0.1:{admin}', "
            "operator_routes: everywhere}\n"
            # the engines are in this process, which serves 50 clients
            "deadlines: {drain: 5, probe: 60}\nprobes: {interval: 0.2}\n"
            f"auth: {{api_keys_file: '{keys}'}}\npools:\n- connector: nixl\n{nodes(engines[:2])}"
        )
        return texts[0]

    async with serving(tmp_path, engines, settings, spare=engines[2:]) as run:
        changes, streams = Changes(run, keys, texts[0], chance), Streams(run.proxy.port)
        kinds, killed = [changes.engine, changes.settings, changes.keys], [0, 0]
        await streams.more()
        for number in range(CHANGES):
            if number % EACH == EACH // 2:
                what = number // EACH % 2
                killed[what] += 1
                pid = chance.choice(run.proxy.workers()) if what else run.proxy.scheduler()
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
            await kinds[number % 3]()
            if number % EACH == EACH - 1:
                await run.whole()
                await streams.more()
            await asyncio.sleep(chance.random() * 0.1)
        await changes.are_made()
        await streams.end()
        assert not streams.refused
        assert streams.broken <= CLIENTS * killed[1]
        await run.leases(0)
        assert await run.proxy.metric("pdproxy_worker_restarts_total") == killed[1] > 0
        assert await run.proxy.metric("pdproxy_scheduler_restarts_total") == killed[0] > 0
        # KV of answers that a killed worker has not read: no more than it had requests
        await until(lambda: len(books.held()) <= CLIENTS * killed[1], PATIENCE)
        assert not books.unknown
