"""Faults that make requests slow and fail none: `/ready`, the admin API, `pdproxy engines` and the
metric behind the alert name the one that is there, and no other.
"""

# The engines take time of a manual clock.

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec import structs

from pdproxy.app.heartbeat import Heartbeat
from pdproxy.cli.engines_table import wrong
from pdproxy.engine_model.hardware import Hardware
from pdproxy.observe import slow
from pdproxy.observe.held_loop import PART, PARTS
from pdproxy.observe.slow_clients import MANY, WINDOW
from pdproxy.settings.pools import PoolPolicy
from pdproxy.settings.schema import Settings
from tests.fakes import scripts
from tests.fakes.admin import admin
from tests.fakes.client import Client, exchange, request
from tests.fakes.clock import ManualClock
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.world import COMPLETIONS, PROMPT, World, completion, until, world
from tests.proxy.test_kv_faults import id_of, loads_nothing
from tests.proxy.test_slow_readers import EVENT

ROUNDS = 16
BUSY = Hardware(decode_step_s=0.02)
"""Of a decode engine that has an answer's tokens to make for a minute."""


def by_auto(settings: Settings) -> Settings:
    """Settings with the placement `auto`, which splits what it can: it would not split these."""
    (chosen,) = settings.pools
    policy = PoolPolicy(placement="auto")
    chosen = structs.replace(
        chosen, policy=policy, profile="h200-8b", tokenize="off", alone="never"
    )
    return structs.replace(settings, pools=(chosen,))


def taking(clock: ManualClock, seconds: float) -> Callable[[Reply], Awaitable[None]]:
    """An engine that takes so long before it answers."""

    async def script(reply: Reply) -> None:
        await clock.advance(seconds)
        await reply.serve()

    return script


async def asked(w: World, count: int = ROUNDS, **fields: Any) -> None:
    for _ in range(count):
        assert (await w.ask(COMPLETIONS, completion(**fields))).status == 200
    await w.told()


async def waiting(w: World, tokens: int = 3000) -> Client:
    """A client that has asked for a stream."""
    client = await w.client()
    client.send(request("POST", COMPLETIONS, completion(stream=True, max_tokens=tokens)))
    return client


def queued(engine: FakeEngine) -> int:
    stats = engine.sim.engine.stats
    return stats.waiting - stats.deferred


async def details(w: World) -> list[str]:
    found: list[str] = json.loads((await w.get("/ready")).body)["details"]
    return found


async def named(w: World) -> dict[str, float]:
    """The causes that are named, with their numbers. All that shows them says the same."""
    found = {
        one.name: count
        for one in slow.CAUSES
        if (count := w.metric("pdproxy_problems", cause=one.name))
    }
    text = await details(w)
    for one in slow.CAUSES:
        assert sum(one.words in line for line in text) == found.get(one.name, 0)
    assert len(text) == sum(found.values())
    return found


async def shown_of(w: World, url: str) -> str:
    """What `pdproxy engines list` and the page say of an engine, from the admin API."""
    async with admin(w) as api:
        entries = (await api.get("/engines"))["engines"]
    return " | ".join(line for line in wrong(entries) if line.startswith(url))


async def test_a_slow_prefill_engine() -> None:
    clock = ManualClock()
    async with world(2, 1, clock=clock) as w:
        bad, good = w.prefill
        bad.default = good.default = taking(clock, 0.5)
        await asked(w)
        assert await named(w) == {}
        bad.default = taking(clock, 4)
        await asked(w)
        assert await named(w) == {"slow_prefill": 1}
        assert f"prefill {bad.url}: slow prefill engine: a prompt takes" in (await details(w))[0]
        assert "slow prefill engine: a prompt takes" in await shown_of(w, bad.url)
        assert await shown_of(w, good.url) == ""
        assert (await w.get("/ready")).status == 200
        bad.default = taking(clock, 1.2)  # below the bound, and not clearly
        await asked(w, 4 * ROUNDS)
        assert await named(w) == {"slow_prefill": 1}
        bad.default = taking(clock, 0.5)
        await asked(w, 8 * ROUNDS)
        assert await named(w) == {}


async def test_a_slow_prefill_engine_by_what_a_placement_predicts() -> None:
    """Both of two are slower than predicted; one that gets no prompts any more stays named."""
    clock = ManualClock()
    prompt = [1] * 6000
    async with world(0, 0, anything=2, clock=clock, adjust=by_auto) as w:
        bad, good = w.anything

        async def measured(engine: FakeEngine, other: FakeEngine, seconds: float) -> None:
            engine.default = taking(clock, seconds)
            w.proxy.membership.drain(other.url, "test")
            for number in range(3 * ROUNDS):
                await asked(w, 1, prompt=[number, *prompt], stream=True)
            w.proxy.membership.undrain(other.url, "test")

        await measured(good, bad, 0.3)
        await measured(bad, good, 0.3)
        assert await named(w) == {}
        await measured(bad, good, 2)
        assert await named(w) == {"slow_prefill": 1}
        found = "slow prefill engine: a prompt takes"
        (text,) = await details(w)
        assert text.startswith(f"any {bad.url}: {found}")
        assert "times as long there as predicted" in text
        assert found in await shown_of(w, bad.url)
        assert await shown_of(w, good.url) == ""
        await clock.advance(60)
        assert await named(w) == {"slow_prefill": 1}
        await measured(bad, good, 0.3)
        assert await named(w) == {}


@pytest.mark.parametrize("adjust", [lambda settings: settings, by_auto], ids=["split", "auto"])
async def test_a_slow_link(adjust: Callable[[Settings], Settings]) -> None:
    """From one prefill engine to one decode engine: the other three links are as before."""
    clock = ManualClock()
    async with world(2, 2, clock=clock, adjust=adjust) as w:
        p, d = w.prefill[0], w.decode[0]

        async def loading(reply: Reply) -> None:
            kv = reply.request.kv or {}
            is_slow = slow_now and reply.engine is d and kv.get("remote_engine_id") == id_of(p)
            await clock.advance(2.5 if is_slow else 0.1)
            await reply.serve()

        slow_now = False
        for engine in w.decode:
            engine.default = loading
        await w.probe()
        await asked(w, 4 * ROUNDS, stream=True)
        assert await named(w) == {}
        slow_now = True
        await asked(w, 4 * ROUNDS, stream=True)
        assert await named(w) == {"slow_link": 1}
        found = f"slow KV transfer: with KV from {p.url} the first data takes"
        assert f"decode {d.url}: {found}" in (await details(w))[0]
        assert found in await shown_of(w, d.url)
        slow_now = False
        await clock.advance(60)
        assert await named(w) == {}


async def test_a_slow_link_between_the_only_two_engines() -> None:
    clock = ManualClock()
    async with world(clock=clock) as w:
        (d,) = w.decode
        d.default = taking(clock, 2.5)
        page = (await exchange(d.port, request("GET", "/metrics", b""))).body
        lines = [line for line in page.splitlines(keepends=True) if b"by_reason" not in line]
        d.admin["/metrics"] = scripts.whole(b"".join(lines))
        await w.probe()
        await asked(w, stream=True)
        assert await named(w) == {}, "it is not known whether requests wait for a place"
        d.admin = {}
        await w.probe()
        assert await named(w) == {"slow_link": 1}


async def test_a_queue_at_the_decode_engine() -> None:
    """A report of it is not enough: a queue may come and go with each burst."""
    facts = {"max_num_seqs": 1, "hardware": BUSY}
    async with world(facts_of=lambda role: facts if role == "decode" else {}, leaves=True) as w:
        (d,) = w.decode
        clients = [await waiting(w) for _ in range(3)]
        await until(lambda: queued(d) == 2)
        await w.probe()
        await w.probe()
        assert await named(w) == {}
        await w.probe()
        assert await named(w) == {"decode_queue": 1}
        found = "queue at the decode engine: requests wait there for a place (2)"
        assert await details(w) == [f"decode {d.url}: {found}"]
        assert found in await shown_of(w, d.url)
        for client in clients:
            client.close()
        await until(lambda: queued(d) == 0)
        await w.probe()
        await w.probe()
        assert await named(w) == {"decode_queue": 1}
        async with asyncio.timeout(60):
            while await named(w):  # the first report may be of the step before
                await w.probe()


async def test_full_kv_at_the_decode_engine() -> None:
    """Its batch has places."""
    facts = {"num_gpu_blocks": 20, "max_model_len": 300, "hardware": BUSY}
    async with world(facts_of=lambda role: facts if role == "decode" else {}, leaves=True) as w:
        (d,) = w.decode
        engine = d.sim.engine
        clients = [await waiting(w, 200) for _ in range(6)]
        await until(lambda: queued(d) > 0 and engine.stats.kv_cache_usage > 0.95)
        engine.freeze()  # it reports the same until then
        for _ in range(3):
            await w.probe()
        assert await named(w) == {"decode_full": 1}
        found = "full KV at the decode engine: "
        assert (await details(w))[0].startswith(f"decode {d.url}: {found}")
        assert found in await shown_of(w, d.url)
        engine.thaw()
        for client in clients:
            client.close()
        await until(lambda: queued(d) == 0)
        for _ in range(3):
            await w.probe()
        assert await named(w) == {}


async def test_slow_clients() -> None:
    """One is nothing that an operator must know."""
    clock = ManualClock()
    async with world(clock=clock, deadlines={"client_write": 1.0}, leaves=True) as w:
        w.decode[0].default = scripts.streams(*[EVENT * 1000] * 40, then="stall")

        async def are_dropped(count: int) -> None:
            left = w.metric("pdproxy_deadline_total", wait="client_write")
            for _ in range(count):
                client = await w.client(receive_buffer=4096)
                client.writer.transport.pause_reading()  # type: ignore[attr-defined]
                client.send(request("POST", COMPLETIONS, completion(stream=True)))
            await until(
                lambda: (
                    sum(one.transport.get_write_buffer_size() > 0 for one in w.connections) == count
                )
            )
            await clock.advance(2)
            await until(
                lambda: w.metric("pdproxy_deadline_total", wait="client_write") == left + count
            )

        await are_dropped(1)
        assert await named(w) == {}
        await are_dropped(MANY)
        assert await named(w) == {"slow_clients": 1}
        assert "slow clients: 11 connections or more were closed" in (await details(w))[0]
        await clock.advance(WINDOW)
        assert await named(w) == {}


class LateLoop:
    """Calls the heartbeat's timer when it is due, or later."""

    def __init__(self) -> None:
        self._now = self._due = 0.0

    def time(self) -> float:
        return self._now

    def call_at(self, due: float, *_: object) -> LateLoop:
        self._due = due
        return self

    def cancel(self) -> None:
        """Nothing would be called."""

    def beats(self, heartbeat: Heartbeat, late: Callable[[int], float]) -> None:
        """Let the window pass, in which each beat is so late."""
        for number in range(PART * PARTS):
            self._now = self._due + late(number)
            heartbeat._beat(self)  # type: ignore[arg-type]


async def test_an_event_loop_that_is_held() -> None:
    async with world() as w:
        heartbeat, loop = w.proxy.heartbeat, LateLoop()
        heartbeat.stop()
        heartbeat._due = 0.0
        loop.beats(heartbeat, lambda _: 0.01)
        assert await named(w) == {}
        loop.beats(heartbeat, lambda number: 0.06 if number % 50 == 0 else 0.0)
        assert await named(w) == {"loop_held": 1}
        assert await details(w) == [
            "event loop held: 2.0% of its timers were late by 50 ms or more in the last 5 minutes"
        ]
        loop.beats(heartbeat, lambda number: 0.06 if number % 150 == 0 else 0.0)
        assert await named(w) == {"loop_held": 1}
        loop.beats(heartbeat, lambda number: 0.06 if number % 300 == 0 else 0.0)
        assert await named(w) == {}


async def test_a_decode_engine_that_computes_prompts_again() -> None:
    """Its answers are right: only its own counters show it."""
    async with world(decode=2) as w:
        bad, good = w.decode

        async def served(name: str) -> None:
            for number in range(4):
                await w.ask(COMPLETIONS, completion(prompt=f"{name} {number} {PROMPT}"))
            await w.quiet()
            for _ in range(3):
                await w.probe()

        await w.probe()
        await served("all load")
        assert await named(w) == {}
        bad.moves_kv = False
        await served("one does not")
        assert await named(w) == {"recomputed": 1}
        assert (await details(w))[0].startswith(f"decode {bad.url}: prompts computed again: ")
        assert "prompts computed again" in await shown_of(w, bad.url)
        assert await shown_of(w, good.url) == ""
        bad.moves_kv = True
        bad.started += 1
        for _ in range(3):
            await w.probe()
        assert await named(w) == {}


async def test_a_decode_engine_whose_loads_all_fail() -> None:
    """Each of its prompts is answered by others."""
    clock = ManualClock()
    async with world(2, 2, clock=clock) as w:
        bad, good = w.decode
        await asked(w)
        assert await named(w) == {}
        bad.default = loads_nothing()
        await asked(w)
        assert await named(w) == {"kv_does_not_move": 1}
        assert (await details(w))[0].startswith(f"decode {bad.url}: KV does not move: ")
        assert "KV does not move" in await shown_of(w, bad.url)
        assert await shown_of(w, good.url) == ""
        bad.default = good.default
        await clock.advance(11)
        await asked(w)
        assert await named(w) == {}
