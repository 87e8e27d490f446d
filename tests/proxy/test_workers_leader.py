"""The worker process that probes is killed, or stopped: another one goes on, and what it finds
holds for all.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.process import PATIENCE, Served, served
from tests.fakes.world import COMPLETIONS, completion, until


class Probes:
    """Counts the questions for an engine's health."""

    def __init__(self, engine: FakeEngine) -> None:
        self.count = 0
        engine.admin["/health"] = self._health

    async def _health(self, reply: Reply) -> None:
        self.count += 1
        await reply.whole(b"")


async def _down_for_all(proxy: Served, engine: FakeEngine) -> None:
    """Wait until every worker has heard that an engine is down."""
    async with asyncio.timeout(PATIENCE):
        while await proxy.metric("pdproxy_node_up", node=engine.url) != 0:
            await asyncio.sleep(0.05)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that stands still meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _by_lead(proxy: Served) -> tuple[int, int]:
    """The worker that follows, and the one that probes: it alone has connections to an engine that
    serves nobody yet.
    """
    (leads,) = proxy.connected(proxy.decode.port, is_theirs=False)
    (follows,) = set(proxy.workers()) - {leads}
    return follows, leads


async def test_a_killed_worker_leaves_its_probes_to_another(tmp_path: Path) -> None:
    """First the one that follows, then the one that leads. A successor knows all engines without a
    probe of its own.
    """
    with (tmp_path / "log").open("wb") as log:
        async with served(log, workers=2, interval=0.2) as proxy:
            for pid in _by_lead(proxy):
                probes = Probes(proxy.decode)
                os.kill(pid, signal.SIGKILL)
                await until(lambda: probes.count >= 2, PATIENCE)  # noqa: B023
                await until(
                    lambda: len(proxy.workers()) == 2 and pid not in proxy.workers(),  # noqa: B023
                    PATIENCE,
                )
                async with asyncio.timeout(PATIENCE):
                    while await proxy.metric("pdproxy_workers") != 2:
                        await asyncio.sleep(0.05)
                for _ in range(8):
                    assert (await proxy.ask("POST", COMPLETIONS, completion())).status == 200
            proxy.decode.stop()
            await _down_for_all(proxy, proxy.decode)


async def test_a_stopped_worker_leaves_its_probes_to_another(tmp_path: Path) -> None:
    """Each stands still for a while, first the one that follows. When it goes on, it hears what was
    found meanwhile.
    """
    with (tmp_path / "log").open("wb") as log:
        async with served(log, workers=2, interval=0.2) as proxy:
            pids = _by_lead(proxy)
            for pid in pids:
                with stopped(pid):
                    probes = Probes(proxy.prefill)
                    await until(lambda: probes.count >= 2, PATIENCE)  # noqa: B023
                    proxy.decode.stop()
                    other = Probes(proxy.prefill)
                    await until(lambda: other.count >= 2, PATIENCE)  # noqa: B023
                await _down_for_all(proxy, proxy.decode)
                await proxy.decode.listen()
                async with asyncio.timeout(PATIENCE):
                    while await proxy.metric("pdproxy_node_up", node=proxy.decode.url) != 1:
                        await asyncio.sleep(0.05)
            assert sorted(proxy.workers()) == sorted(pids)
