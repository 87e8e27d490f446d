"""The first requests after the start: they wait for the first probes."""

from __future__ import annotations

import asyncio
import contextlib
import os

import pytest

from tests.fakes.books import Books
from tests.fakes.client import Client
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.forked import start
from tests.fakes.ports import free_port
from tests.fakes.process import PATIENCE, SERVE
from tests.fakes.world import COMPLETIONS, completion


async def _slow(reply: Reply) -> None:
    await asyncio.sleep(0.3)
    await reply.whole(b"")


@pytest.mark.parametrize("workers", [1, 2])
async def test_who_connects_as_soon_as_that_is_possible_is_served(workers: int) -> None:
    """Probes take a while. A request that came before their answers was refused, with all engines
    up.
    """
    books = Books()
    engines = [FakeEngine(role, books) for role in ("prefill", "decode")]
    for engine in engines:
        await engine.listen()
        engine.admin = {"/health": _slow}
    port = free_port()
    given = [str(port), *(one.url for one in engines), "text", "4096", str(workers), "2", "0", ""]
    process = start(SERVE, given, os.environ, asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(OSError):
                    client = await Client.connect(port)
                    break
                await asyncio.sleep(0.01)
            client.post(COMPLETIONS, completion())
            assert (await client.answer()).status == 200
            client.close()
    finally:
        process.kill()
        await process.wait()
        for engine in engines:
            engine.stop()
