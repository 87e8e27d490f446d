"""Engines that are added and removed while requests are served."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdproxy.fleet import prober
from pdproxy.settings.schema import Node
from tests.fakes import answers, scripts
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.scripts import WORD
from tests.fakes.world import COMPLETIONS, TEXT, World, completion, until, world


async def add(w: World, role: str = "decode") -> FakeEngine:
    """Start one more engine, add it, and wait until it is up."""
    engine = FakeEngine(role, w.books)
    await engine.listen()
    w.engines.append(engine)
    (w.prefill if role == "prefill" else w.decode).append(engine)
    for prefill in w.prefill:
        for other in w.decode:
            other.meet(prefill)
    w.proxy.setup.add(Node(url=engine.url, role=role))  # type: ignore[arg-type]
    await up(w, engine)
    return engine


async def up(w: World, engine: FakeEngine) -> None:
    """Wait until an engine is up."""
    await until(lambda: w.proxy.engines[engine.url].node.up)


async def _rest(reply: Reply) -> None:
    await reply.pieces(WORD, answers.DONE)
    await reply.finish()


async def test_a_decode_engine_comes_and_goes(caplog: pytest.LogCaptureFixture) -> None:
    """It gets requests once it has been probed; removed, it gets none, and the stream that flows from it ends well."""
    caplog.set_level(logging.DEBUG, "pdproxy")
    async with world() as w:
        (first,) = w.decode
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        second = await add(w)
        for _ in range(4):
            assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert len(second.requests) == 2
        assert len(w.prefill[0].requests) == 5
        assert (await w.get("/ready")).json == {"ready": True, "reason": None, "details": []}
        assert w.metric("pdproxy_node_up", node=second.url, role="decode") == 1

        go = asyncio.Event()
        for engine in w.decode:
            engine.script(scripts.after_word(go, _rest))
        clients = [await w.client(), await w.client()]
        for client in clients:
            client.post(COMPLETIONS, completion(stream=True))
        heads = [await client.head() for client in clients]
        assert [await client.piece() for client in clients] == [WORD] * 2
        removed = w.proxy.setup.remove(second.url)
        assert removed.node.requests == 1, "its stream flows"
        for _ in range(4):
            assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert len(second.requests) == 3
        page = w.proxy.metrics.page().decode()
        assert second.url not in page
        assert first.url in page
        go.set()
        for client, head in zip(clients, heads, strict=True):
            assert (await client.rest(head)).body == WORD + answers.DONE
        await w.quiet()
        assert (removed.node.requests, removed.node.prompt_bytes) == (0, 0)
        await until(lambda: not removed.client._all)
        assert (await w.get("/ready")).json == {"ready": True, "reason": None, "details": []}
        assert not [task for task in asyncio.all_tasks() if second.url in task.get_name()]
        assert {(await w.ended(count)).outcome for count in range(1, 12)} == {"ok"}
    assert not [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]


async def test_removed_between_prefill_and_decode(caplog: pytest.LogCaptureFixture) -> None:
    """The request has its lease on the decode engine already, and is served there."""
    async with world(decode=2) as w:
        go = asyncio.Event()
        w.prefill[0].script(scripts.gate(go, w.prefill[0].default))
        client = await w.client()
        client.post(COMPLETIONS, completion())
        await w.prefill[0].asked()
        (chosen,) = [engine for engine in w.decode if w.proxy.engines[engine.url].node.requests]
        for _ in range(3):  # what is removed and idle is forgotten at the next change, what has a lease is not
            w.proxy.setup.remove(chosen.url)
            other = await add(w)
            w.proxy.setup.remove(other.url)
            w.proxy.setup.add(Node(url=chosen.url, role="decode"))
        w.proxy.setup.remove(chosen.url)
        go.set()
        assert (await client.answer()).text == TEXT
        assert len(chosen.requests) == 1
        assert (await w.ended()).legs[0].decode == chosen.url
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


async def test_removed_and_gone_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its leg fails as any other, another engine serves the request, and the KV on the removed prefill engine is released."""
    async with world(prefill=2, decode=2) as w:
        go = asyncio.Event()
        for engine in w.decode:
            engine.script(scripts.gate(go, scripts.reset))
        client = await w.client()
        client.post(COMPLETIONS, completion())
        await until(lambda: any(engine.requests for engine in w.decode))
        first = next(engine for engine in w.decode if engine.requests)
        prefill = next(engine for engine in w.prefill if engine.requests)
        other = next(engine for engine in w.decode if engine is not first)
        other.scripts.clear()
        w.proxy.setup.remove(first.url)
        w.proxy.setup.remove(prefill.url)
        first.refuse()
        go.set()
        assert (await client.answer()).text == TEXT
        await w.quiet()
        assert w.metric("pdproxy_leg_failures_total", node=first.url) == 1
        assert w.books.endings == {"released": 1, "loaded": 1}
        assert first.url not in repr((await w.get("/ready")).json)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


async def test_one_that_is_added_again_is_probed_again() -> None:
    """Nothing of its past counts: what was learned of it before may be wrong by now."""
    async with world(decode=2) as w:
        engine = w.decode[0]
        before = w.proxy.ledger.run_of(engine.url)
        old = w.proxy.setup.remove(engine.url)
        assert w.proxy.ledger.run_of(engine.url) == before, "handles that are still open ask for it"
        with pytest.raises(KeyError):
            w.proxy.setup.remove(engine.url)
        new = w.proxy.setup.add(Node(url=engine.url, role="decode"))
        with pytest.raises(ValueError, match="is there already"):
            w.proxy.setup.add(Node(url=engine.url, role="decode"))
        assert new is not old
        assert w.proxy.ledger.run_of(engine.url) != before
        assert not new.node.up
        await up(w, engine)
        w.proxy.setup.remove(w.decode[1].url)
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert len(engine.requests) == 1


async def test_a_removed_engine_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its probes end, also one that is under way, and its connections close."""
    monkeypatch.setattr(prober, "MIN_GAP", 0.01)
    async with world(decode=2) as w:
        engine = w.decode[0]
        while not engine.requests:
            await w.ask(COMPLETIONS, completion())
        removed = w.proxy.engines[engine.url]
        assert removed.client._idle
        engine.admin["/health"] = scripts.stall
        w.proxy.prober.soon(removed)
        await until(lambda: any(one.path == "/health" and not one.over for one in engine.sim.journal.others))
        w.proxy.setup.remove(engine.url)
        w.proxy.prober.soon(removed)
        await until(lambda: not removed.client._all)
        count = len(engine.sim.journal.others)
        await asyncio.sleep(0.1)
        assert len(engine.sim.journal.others) == count
        assert engine.url not in w.proxy.metrics.page().decode()


async def test_the_last_decode_engine_is_removed() -> None:
    """Then it is not ready, until one is added."""
    async with world() as w:
        w.proxy.setup.remove(w.decode[0].url)
        ready = await w.get("/ready")
        assert ready.status == 503
        assert "no decode or aggregated engine is up" in ready.json["reason"]
        assert (await w.ask(COMPLETIONS, completion())).status == 503
        await add(w)
        assert (await w.get("/ready")).status == 200
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
