"""KV that does not move: whose fault it is follows from pairs; it is named, avoided, and tried
again with one prompt.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdproxy.fleet.entries import EngineEntries, PoolEngines
from pdproxy.observe.events import LegFailed, NodeChanged, TransferFaultSeen
from tests.fakes import answers, scripts, several
from tests.fakes.clock import ManualClock
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.scripts import streams
from tests.fakes.world import (
    CHAT,
    CHAT_TEXT,
    COMPLETIONS,
    TEXT,
    World,
    chat,
    completion,
    until,
    world,
)

INTERNAL = answers.INTERNAL_500
ASKS: dict[str, tuple[str, dict[str, Any], str]] = {
    "completion": (COMPLETIONS, completion(), TEXT),
    "streamed completion": (COMPLETIONS, completion(stream=True), TEXT),
    "chat": (CHAT, chat(), CHAT_TEXT),
    "streamed chat": (CHAT, chat(stream=True), CHAT_TEXT),
}


def loads_nothing(
    of: Callable[[str], bool] = lambda _: True, *, event: bool = False
) -> Callable[[Reply], Any]:
    """A decode engine that can't load the KV of the prefill engines with these engine ids: it fails
    fast.
    """

    async def script(reply: Reply) -> None:
        kv = reply.request.kv or {}
        if not kv.get("do_remote_prefill") or not of(str(kv["remote_engine_id"])):
            await reply.serve()
        elif event and b'"stream":true' in reply.request.body:
            await streams(answers.error_event(), answers.DONE)(reply)
        else:
            await reply.whole(INTERNAL, 500)

    return script


def id_of(engine: FakeEngine) -> str:
    """By what handles name a prefill engine."""
    return engine.sim.engine.facts.engine_id or engine.sim.engine.engine_id


@asynccontextmanager
async def pool(
    prefill: int = 2, decode: int = 2, **options: Any
) -> AsyncIterator[tuple[World, ManualClock]]:
    clock = ManualClock()
    async with world(prefill, decode, clock=clock, **options) as w:
        yield w, clock


async def several_asked(w: World, ask: str, count: int = 12) -> None:
    """Each of these requests is answered, whoever fails."""
    path, body, text = ASKS[ask]
    for _ in range(count):
        answer = await w.ask(path, body)
        assert (answer.status, answer.text) == (200, text)
    await w.told()


def faults(w: World) -> set[tuple[str, str]]:
    return set(w.proxy.ledger.transfers.faults)


def legs(engine: FakeEngine) -> int:
    return len([one for one in engine.requests if (one.kv or {}).get("do_remote_prefill")])


async def details(w: World) -> str:
    return " | ".join(json.loads((await w.get("/ready")).body)["details"])


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("event", [False, True])
async def test_a_decode_engine_that_loads_nothing(ask: str, event: bool) -> None:
    """It is named everywhere, gets nothing more but one prompt at a time, and all again once one
    was loaded.
    """
    async with pool() as (w, clock):
        good, bad = w.decode
        bad.default = loads_nothing(event=event)
        await several_asked(w, ask)
        assert faults(w) == {("", bad.url)}
        assert legs(bad) <= 4
        before = legs(bad)
        await several_asked(w, ask)
        assert legs(bad) == before
        assert (
            f"decode {bad.url}: KV does not move: the KV of 3 prompts in a row could not be loaded"
            in await details(w)
        )
        engine = w.proxy.engines[bad.url].in_ledger
        assert engine.state(clock.now()) == "kv_failing"
        assert w.metric("pdproxy_node_state", node=bad.url, state="kv_failing") == 1
        assert w.metric("pdproxy_kv_faults", kind="decode") == 1
        assert w.metric("pdproxy_kv_faults_found_total", kind="decode") == 1
        (seen,) = w.events(TransferFaultSeen)
        assert (seen.kind, seen.prefill, seen.decode, seen.over) == ("decode", None, bad.url, False)
        assert not w.events(NodeChanged)[len(w.engines) :], "it is not down"
        await clock.advance(11)
        await several_asked(w, ask, 6)
        assert legs(bad) == before + 1
        bad.default = good.default
        await clock.advance(11)
        await several_asked(w, ask, 6)
        assert not faults(w)
        assert w.events(TransferFaultSeen)[-1].over
        assert engine.state(clock.now()) == "up"
        assert await details(w) == ""


@pytest.mark.parametrize("ask", ASKS)
async def test_a_prefill_engine_from_which_nobody_loads(ask: str) -> None:
    async with pool() as (w, clock):
        bad = w.prefill[1]
        for engine in w.decode:
            engine.default = loads_nothing(lambda ident: ident == id_of(bad))
        await several_asked(w, ask)
        assert faults(w) == {(bad.url, "")}
        before = len(bad.requests)
        await several_asked(w, ask)
        assert len(bad.requests) == before
        assert f"prefill {bad.url}: KV does not move: no decode engine could" in await details(w)
        assert w.proxy.engines[bad.url].in_ledger.state(clock.now()) == "kv_failing"
        assert all(
            w.proxy.engines[engine.url].in_ledger.state(clock.now()) == "up" for engine in w.decode
        )


@pytest.mark.parametrize("ask", ASKS)
async def test_a_link_between_two_that_work_with_others(ask: str) -> None:
    async with pool() as (w, clock):
        p, d = w.prefill[1], w.decode[1]
        d.default = loads_nothing(lambda ident: ident == id_of(p))
        await several_asked(w, ask)
        assert faults(w) == {(p.url, d.url)}
        assert f"prefill {p.url} and decode {d.url}: KV does not move: " in await details(w)
        assert all(
            w.proxy.engines[engine.url].in_ledger.state(clock.now()) == "up" for engine in w.engines
        )
        before = w.metric("pdproxy_leg_failures_total")
        await several_asked(w, ask)
        assert w.metric("pdproxy_leg_failures_total") == before


@pytest.mark.parametrize("ask", ASKS)
async def test_kv_that_moves_nowhere_fails_no_request(ask: str) -> None:
    """One engine serves the last try of a prompt alone; later ones are not split in vain, and
    `/ready` says so.
    """
    async with pool(2, 4) as (w, _):
        for engine in w.decode:
            engine.default = loads_nothing()
        await several_asked(w, ask, 20)
        before = sum(len(engine.requests) for engine in w.prefill)
        await several_asked(w, ask, 10)
        assert sum(len(engine.requests) for engine in w.prefill) == before
        assert w.metric("pdproxy_alone_total", reason="kv_failed") >= 1
        ready = json.loads((await w.get("/ready")).body)
        assert ready["state"] == "degraded"


async def test_a_bad_request_is_no_engines_fault() -> None:
    """One that every engine fails at, with KV and without, names nobody while others are served."""

    async def fails_at_one(reply: Reply) -> None:
        if b"poison" in reply.request.body:
            await reply.whole(INTERNAL, 500)
        else:
            await reply.serve()

    async with pool(2, 3) as (w, _):
        for engine in w.decode:
            engine.default = fails_at_one
        poison = completion(prompt="poison " * 40)
        for _ in range(10):
            assert (await w.ask(COMPLETIONS, poison)).status == 500
            await several_asked(w, "completion", 3)
        assert not faults(w)


async def test_a_prefill_engine_works_whose_kv_another_engine_loads_later() -> None:
    """The failure counts from the time at which it was, and not from the answer on."""
    async with pool() as (w, clock):
        asked: list[FakeEngine] = []

        async def script(reply: Reply) -> None:
            asked.append(reply.engine)
            if len(asked) == 1:
                await reply.whole(INTERNAL, 500)
            else:
                await clock.advance(1)
                await reply.serve()

        for engine in w.decode:
            engine.default = script
        assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        await w.told()
        bad, _ = asked
        (used,) = [engine for engine in w.prefill if engine.requests]
        assert w.proxy.ledger.left_out(used.url, bad.url, []) == used.url, "to try the other one"


async def test_a_decode_engine_that_fails_in_its_streams_opens_its_breaker() -> None:
    """Behind its first data it has the KV: an error is its own."""
    async with pool(1, 2, limits={"continuations": 0}) as (w, clock):
        bad = w.decode[1]

        async def fails_behind_data(reply: Reply) -> None:
            await reply.start()
            await reply.piece(scripts.WORD)
            await until(lambda: w.books.endings["loaded"] > 0)
            await asyncio.sleep(0.05)
            await reply.pieces(answers.error_event())
            await reply.finish()

        bad.default = fails_behind_data
        for _ in range(12):
            await w.ask(COMPLETIONS, completion(stream=True))
        assert w.proxy.engines[bad.url].in_ledger.state(clock.now()) == "excluded"
        assert not faults(w)
        down = [event for event in w.events(NodeChanged) if not event.up]
        assert [(event.node, event.state) for event in down] == [(bad.url, "excluded")]


async def test_a_prefill_engine_that_gives_no_handle() -> None:
    """What it computes is of no use."""

    async def without_handle(reply: Reply) -> None:
        body = {
            "id": "x",
            "object": "text_completion",
            "created": 1,
            "model": "tiny",
            "usage": answers.usage(9, 1),
        }
        choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}
        await reply.whole(answers.compact({**body, "choices": [choice]}))

    async with pool() as (w, clock):
        bad = w.prefill[1]
        bad.default = without_handle
        await several_asked(w, "completion")
        assert faults(w) == {(bad.url, "")}
        before = len(bad.requests)
        await several_asked(w, "completion")
        assert len(bad.requests) == before
        assert w.proxy.engines[bad.url].in_ledger.state(clock.now()) == "kv_failing"
        assert "it gave no KV that can be used" in await details(w)


async def test_entries_show_faults() -> None:
    """As the admin API and `pdproxy engines list` do: the engine with its reason, a link with its
    pair.
    """
    async with pool() as (w, _):
        bad, p = w.decode[1], w.prefill[1]
        bad.default = loads_nothing(lambda ident: ident == id_of(p))
        await several_asked(w, "completion")
        made = EngineEntries(
            [
                PoolEngines(
                    "pool 0",
                    w.proxy.membership,
                    w.proxy.engines,
                    w.proxy.pools[0].resources.shares,
                    w.proxy.pools[0].slow,
                    w.proxy.ledger.revisions,
                )
            ],
            w.proxy.stalls._clock.now,
        )
        entry = made.entry(bad.url)
        assert entry.health.state == "up"
        assert entry.pairs is not None
        assert [(one.url, one.why[:20]) for one in entry.pairs.not_paired] == [
            (p.url, "the KV of 3 prompts ")
        ]
        bad.default = loads_nothing()
        w.mark_down(p, "else turns may never bring the other one together with it")
        await several_asked(w, "completion")
        entry = made.entry(bad.url)
        assert entry.health.state == "kv_failing"
        assert entry.health.reason is not None
        assert "no prompt is split with this engine" in entry.health.reason


async def test_workers_tell_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one has found the others avoid, and what one has seen to work all use again."""
    monkeypatch.setattr(several, "WORKERS", 3)
    clock = ManualClock()
    async with world(2, 2, leaves=True, clock=clock) as w:
        bad = w.decode[1]
        for _ in range(3):
            w.workers[1].service.resources.scheduler.kv_failed(
                w.prefill[0].url, bad.url, clock.now()
            )
            w.workers[1].service.resources.scheduler.kv_failed(
                w.prefill[1].url, bad.url, clock.now()
            )
        await w.told()
        for _ in range(20):
            await asyncio.sleep(0)
        assert [set(one.ledger.transfers.faults) for one in w.workers] == [{("", bad.url)}] * 3
        assert len(w.events(TransferFaultSeen)) == 1
        assert w.metric("pdproxy_kv_faults_found_total", kind="decode") == 1
        w.workers[2].service.resources.scheduler.kv_loaded(
            w.prefill[0].url, bad.url, clock.now() + 1
        )
        await w.told()
        for _ in range(20):
            await asyncio.sleep(0)
        assert [set(one.ledger.transfers.faults) for one in w.workers] == [set()] * 3


async def test_a_failed_leg_is_reported_as_ever() -> None:
    async with pool(1, 2) as (w, _):
        w.decode[1].default = loads_nothing()
        await several_asked(w, "completion", 2)
        failed = w.events(LegFailed)
        assert {(event.node, event.phase, event.status) for event in failed} == {
            (w.decode[1].url, "decode", 500)
        }
