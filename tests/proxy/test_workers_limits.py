"""Bounds per engine with several workers: one number for all of them, whoever learns it, and
whoever is killed.
"""

# Three workers in one event loop; the last test has processes.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdproxy.app.capacity import PoolCapacity
from pdproxy.app.compose import Proxy
from pdproxy.scheduling.capacity import Load
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.upstream.metrics_page import Scrape
from tests.fakes import answers, scripts, several
from tests.fakes.admitted import admission_of
from tests.fakes.books import Books
from tests.fakes.client import Client
from tests.fakes.engine import FakeEngine, Reply, serve
from tests.fakes.process import PATIENCE
from tests.fakes.scripts import WORD
from tests.fakes.served_workers import nodes, serving
from tests.fakes.world import COMPLETIONS, World, completion, leads, until, world

COUNT = 3
FULL = 4
"""Requests that an engine may have."""


@asynccontextmanager
async def workers(monkeypatch: pytest.MonkeyPatch, **options: Any) -> AsyncIterator[World]:
    """A world with three workers, of which the first one leads."""
    monkeypatch.setattr(several, "WORKERS", COUNT)
    async with world(1, 2, **options) as w:
        assert [leads(one) for one in w.workers] == [True, False, False]
        await w.told()
        yield w


def places(w: World) -> int:
    """The places of all."""
    return admission_of(w.proxy).places


def capacity(one: Proxy) -> PoolCapacity:
    """A worker's bounds of its pool's engines."""
    found = one.pools[0].capacity
    assert found is not None
    return found


def served(w: World) -> int:
    """Requests that have come to the decode engines."""
    return sum(len(engine.requests) for engine in w.decode)


def look(w: World) -> None:
    """Have each worker look at what is shared, as it does four times per second."""
    for one in w.workers:
        one.share.refresh()  # type: ignore[union-attr]


def report(w: World, index: int, waiting: float) -> None:
    """A decode engine's metrics are read, by the worker that leads."""
    (leader,) = (one for one in w.workers if leads(one))
    engine = leader.engines.known[w.decode[index].url]
    leader.prober._auditor.scraped(engine, Scrape(1.0, 16, 1.0, waiting, 0.1, {}))


async def posted(w: World, count: int, **fields: Any) -> list[Client]:
    """So many completions are asked for, each on a connection of its own."""
    clients = [await w.client() for _ in range(count)]
    for client in clients:
        client.post(COMPLETIONS, completion(**fields))
    return clients


async def test_a_number_of_requests_per_engine_is_one_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seven requests at three workers: the seventh waits, wherever it came. An engine that goes
    down takes its part from all.
    """
    async with workers(monkeypatch, limits={"engine_requests": 3}) as w:
        assert places(w) == 6
        go = asyncio.Event()
        for engine in w.decode:
            engine.default = scripts.gate(go, engine.default)
        clients = await posted(w, 9)
        await until(lambda: (w.inflight, w.waiting) == (6, 3))
        await until(lambda: served(w) == 6)
        go.set()
        assert [(await client.answer()).status for client in clients] == [200] * 9
        assert w.metric("pdproxy_capacity", node=w.decode[0].url) == 3
        w.proxy.stalls.stalled(w.proxy.engines.known[w.decode[1].url], "stands still")
        await w.told()
        assert places(w) == 3


async def test_tokens_per_engine_are_one_number_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two requests that need more than half each, one waits, also where they come to two
    workers.
    """
    async with workers(
        monkeypatch, limits={"engine_tokens": 1500, "max_inflight_tokens": 4000}
    ) as w:
        assert admission_of(w.proxy)._queue.max_size == 3000
        go = asyncio.Event()
        w.prefill[0].script(*[scripts.gate(go, serve)] * 4)
        clients = await posted(w, 4, prompt="word " * 2000, max_tokens=5)
        await until(lambda: (w.inflight, w.waiting) == (1, 3))
        go.set()
        assert [(await client.answer()).status for client in clients] == [200] * 4
        await w.told()
        assert admission_of(w.proxy)._queue.size == 0


async def test_what_one_has_learned_holds_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the requests of all; once for each report."""
    async with workers(monkeypatch, limits={"engine_requests": "auto"}) as w:
        go = asyncio.Event()
        for engine in w.decode:
            engine.default = scripts.gate(go, engine.default)
        clients = await posted(w, 8)
        await until(lambda: served(w) == 8)
        for _ in range(2):
            for index in (0, 1):
                report(w, index, 3.0)
        await w.told()
        assert places(w) == 4, (
            "four of each engine, less the three that wait, but no less than half"
        )
        late = await posted(w, 1)
        await until(lambda: w.waiting == 1)
        for index in (0, 1):
            report(w, index, 0.0)
        await w.told()
        assert places(w) == 6, "all used, nothing waits: one more at each"
        go.set()
        assert [(await client.answer()).status for client in (*clients, *late)] == [200] * 9
        w.proxy.setup.remove(w.decode[0].url)


async def test_a_refusal_that_a_worker_sees_counts_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is: an engine with many requests says that its queue is full."""
    async with workers(monkeypatch, limits={"engine_requests": "auto"}) as w:
        refusal = scripts.whole(
            b'{"error":{"message":"full","type":"ServiceUnavailableError","code":503}}', 503
        )
        go = asyncio.Event()
        for engine in w.decode:
            engine.default = scripts.gate(go, engine.default)
        clients = await posted(w, 20)
        await until(lambda: served(w) == 20)
        for engine in w.decode:
            engine.script(refusal)
        clients += await posted(w, 1)
        await until(lambda: served(w) == 23)
        await w.told()
        assert 20 <= places(w) <= 24
        decodes = [one for one in w.proxy.ledger.engines if one.role is Role.DECODE]
        assert None not in [one.window for one in decodes]
        go.set()
        assert [(await client.answer()).status for client in clients] == [200] * 21


async def test_an_engine_that_goes_down_is_forgotten_by_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes back without a window, though a worker's request has found it down."""
    async with workers(monkeypatch, limits={"engine_requests": "auto"}) as w:
        url = w.decode[0].url
        for _ in range(2):
            capacity(w.proxy)._windows.seen(Load(url, 10), 5.0, 0.1)
        look(w)
        assert w.metric("pdproxy_capacity", node=url) == 5
        finder = w.others[1].pools[0].resources.scheduler
        finder.found_gone(url, "connection refused", w.proxy.now())
        await w.told()
        assert w.metric("pdproxy_capacity", node=url) == 0


async def test_streams_of_a_draining_engine_take_no_places_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever has them: the requests that are left are counted where engines are chosen."""
    async with workers(monkeypatch, limits={"engine_requests": 4}) as w:
        go = asyncio.Event()
        for engine in w.decode:
            engine.default = scripts.gate(go, engine.default)
        clients = await posted(w, 8)
        await until(lambda: served(w) == 8)
        left = len(w.decode[0].requests)
        assert left == 8 - FULL
        for one in w.workers:
            one.ledger.mark_draining(w.decode[0].url, "is being drained")
        capacity(w.proxy)._resize()
        await w.told()
        assert places(w) == left + 4, "these are left, four may come to the other one"
        go.set()
        assert [(await client.answer()).status for client in clients] == [200] * 8
        await w.told()
        look(w)
        await w.told()
        assert places(w) == 4


async def test_no_place_is_lost_with_a_killed_worker(tmp_path: Path) -> None:
    """As processes: never more than the engine may have, and all of it once the worker with the
    streams is gone.
    """
    books = Books()
    engines = [FakeEngine(role, books) for role in ("prefill", "decode")]
    decode = engines[1]

    def settings(port: int, admin: int) -> str:
        return (
            f"listen: {{port: {port}, workers: 2}}\ndeadlines: {{drain: 5}}\nlimits: "
            f"{{engine_requests: 4}}\n"
            f"pools:\n- connector: nixl\n{nodes(engines)}"
        )

    go, at_once, most = asyncio.Event(), 0, 0
    stream = scripts.after_word(go, scripts.one_more_word)

    async def counted(reply: Reply) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        try:
            await stream(reply)
        finally:
            at_once -= 1

    async with serving(tmp_path, engines, settings) as run:
        decode.default = counted

        async def posted(count: int) -> list[Client]:
            clients = [await Client.connect(run.proxy.port) for _ in range(count)]
            for client in clients:
                client.post(COMPLETIONS, completion(stream=True))
            return clients

        async def holds(waiting: Callable[[float], bool]) -> None:
            async with asyncio.timeout(PATIENCE):
                while at_once != FULL or not waiting(await run.proxy.metric("pdproxy_queue")):
                    await asyncio.sleep(0.02)

        clients = await posted(12)
        await holds(lambda waiting: waiting >= 12 - FULL)
        assert most == FULL
        await run.kill(run.proxy.workers()[0])
        late = await posted(8)
        await holds(lambda waiting: waiting >= 8 - FULL)
        go.set()
        ends = await asyncio.gather(
            *(client.answer() for client in (*clients, *late)), return_exceptions=True
        )
        whole = [one for one in ends if not isinstance(one, BaseException) and one.ended]
        assert {one.body for one in whole} == {WORD + WORD + answers.end()}
        assert len(whole) >= 8, "at least all of the late ones"
        assert at_once == 0
