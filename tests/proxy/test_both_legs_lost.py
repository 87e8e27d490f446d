"""A prefill engine is lost while decode engines may wait for its push: which decode legs are ended,
and what they leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy.observe.events import DeadlinePassed, HandleEnded, LegFailed
from pdproxy.serving.kv.lost_pushes import GRACE, LOOKS, LostPushes
from pdproxy.settings.limits import Deadlines
from pdproxy.upstream.metrics_page import Scrape, read_metrics
from pdproxy_lab.sim.faults.book import PlannedFault
from pdproxy_lab.sim.server import SimServer
from tests.fakes.client import Answer
from tests.fakes.clock import ManualClock
from tests.fakes.pool import Pair, pool
from tests.fakes.world import until
from tests.proxy.test_both_legs import PUSH, Gate, known, text_of
from tests.proxy.test_connectors import COMPLETIONS, completion

SLOW = {"hardware": Hardware(prefill_tokens_per_s=1e9, decode_step_s=0.05, transfer_latency_s=0.0)}
"""A decode engine whose answers take some time."""
LONG = {"max_tokens": 30}
_T = TypeVar("_T")


async def looked(clock: ManualClock, looks: int = LOOKS) -> None:
    """Let the proxy look so many times."""
    for _ in range(looks):
        await clock.reach(GRACE)


async def answered(pair: Pair, legs: int = 1) -> None:
    """Wait until the prefill engine has answered so many legs of those that the decode engine
    has.
    """
    live = pair.world.proxy.custodian.awaiting_push
    await until(lambda: len(live()) == legs and not any(one.promised for one in live()))


def lose(pair: Pair, engine: SimServer) -> None:
    """Have a probe find an engine down."""
    proxy = pair.world.proxy
    proxy.ledger.mark_down(engine.url, "no answer", proxy.ledger._engines[engine.url].down_since)


def ends(pair: Pair) -> list[str]:
    return sorted(event.end for event in pair.world.events(HandleEnded))


def spawned(asked: Awaitable[_T]) -> asyncio.Future[_T]:
    return asyncio.ensure_future(asked)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dispatch", ["concurrent", "sequential"])
@pytest.mark.parametrize("again", [True, False])
async def test_a_prefill_engine_that_dies_between_its_answer_and_its_push(
    stream: bool, dispatch: Any, again: bool
) -> None:
    """The decode leg is ended long before its deadline, another engine prefills, and what is left
    is counted.
    """
    clock = ManualClock()
    async with pool(PUSH, prefills=2, clock=clock, dispatch=dispatch) as pair:
        await known(pair)
        for engine in (pair.p, *pair.more):
            engine.engine.fail_loads()
        asked = spawned(pair.ask(COMPLETIONS, completion(stream=stream)))
        await answered(pair)
        (lost,) = pair.world.proxy.custodian.awaiting_push()
        (engine,) = [one for one in (pair.p, *pair.more) if one.url == lost.prefill]
        (other,) = [one for one in (pair.p, *pair.more) if one is not engine]
        other.engine.fail_loads(-1)
        await (engine.restart() if again else engine.kill())
        await pair.world.probe()
        await looked(clock)
        assert (await asked).text == await text_of(pair)
        assert [
            (event.node, event.phase, event.will_retry) for event in pair.world.events(LegFailed)
        ] == [(engine.url, "prefill", True)]
        assert ends(pair) == ["loaded", "stuck"]
        assert (
            pair.world.metric("pdproxy_kv_stuck", node=pair.d.url)
            == 1
            == len(pair.d.engine.awaited)
        )
        await pair.world.quiet()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prefill_engine_that_dies_before_a_decode_engine_has_asked_it(stream: bool) -> None:
    """Mooncake: the decode engine asks for the KV, and nobody answers."""
    clock = ManualClock()
    async with pool("mooncake", prefills=2, clock=clock) as pair:
        engines = (pair.p, *pair.more)
        for engine in engines:
            engine.engine._links[0].side.freeze()
        asked = spawned(pair.ask(COMPLETIONS, completion(stream=stream)))
        await answered(pair)
        (lost,) = pair.world.proxy.custodian.awaiting_push()
        for engine in engines:
            if engine.url != lost.prefill:
                engine.engine._links[0].side.thaw()
        lose(pair, next(one for one in engines if one.url == lost.prefill))
        await looked(clock)
        assert (await asked).text == await text_of(pair)
        assert ends(pair) == ["loaded", "stuck"]
        assert pair.world.metric("pdproxy_kv_stuck", node=pair.d.url) == 1
        await pair.world.quiet()


@pytest.mark.parametrize("again", [True, False])
async def test_a_prefill_engine_that_dies_behind_its_push(again: bool) -> None:
    """The decode engine works on an answer that is not streamed: the client gets it, and nothing is
    stuck.
    """
    clock = ManualClock()
    async with pool(PUSH, d=SLOW, clock=clock) as pair:
        await known(pair)
        decodes = len(pair.d.requests)
        asked = spawned(pair.ask(COMPLETIONS, completion(**LONG)))
        await answered(pair)
        await until(lambda: pair.d.engine.stats.running)
        pair.d.engine.freeze()  # it reports its metrics, and works on when the test says so
        await (pair.p.restart() if again else pair.p.kill())
        await pair.world.probe()
        await looked(clock, 1)
        await until(
            lambda: not len(pair.world.proxy.custodian._tasks) and GRACE not in clock.pending()
        )
        pair.d.engine.thaw()
        plain = await pair.asked_plain(COMPLETIONS, completion(**LONG))
        assert (await asked).json["choices"] == plain.json["choices"]
        assert len(pair.d.requests) == decodes + 1
        assert ends(pair) == ["loaded"]
        assert pair.world.events(LegFailed) == []
        assert pair.world.metric("pdproxy_kv_stuck") == 0


@pytest.mark.parametrize("lost", [0, 1])
async def test_of_several_answers_only_those_are_ended_that_wait(lost: int) -> None:
    """As many as the decode engine says, the latest ones. Requests that wait for another prefill
    engine don't count.
    """
    clock = ManualClock()
    async with pool(PUSH, prefills=2, d=SLOW, clock=clock) as pair:
        await known(pair)
        proxy, other, gate = pair.world.proxy, pair.more[0], Gate()
        live = proxy.custodian.awaiting_push
        asked: list[asyncio.Future[Answer]] = []

        async def ask(count: int, not_by: SimServer) -> None:
            proxy.ledger.mark_kv(not_by.url, "is not used now")
            for _ in range(count):
                body = completion(prompt=f"{len(asked)} " * 60, **LONG)
                asked.append(spawned(pair.ask(COMPLETIONS, body)))
            await until(lambda: len(live()) == len(asked))
            proxy.ledger.mark_kv(not_by.url, None)

        await ask(2, not_by=other)
        await until(lambda: pair.d.engine.stats.running == 2)
        await clock.advance(0.1)
        pair.p.engine.fail_loads(lost)
        await ask(lost, not_by=other)
        await answered(pair, 2 + lost)
        other.faults.scripts.default = gate
        await ask(2, not_by=pair.p)
        await until(lambda: pair.d.engine.stats.waiting == 2 + lost)
        pair.d.engine.freeze()
        await clock.advance(2 * GRACE)
        lose(pair, pair.p)
        await looked(clock, LOOKS if lost else 1)
        await until(
            lambda: len(pair.world.events(LegFailed)) == lost and not len(proxy.custodian._tasks)
        )
        assert GRACE not in clock.pending()
        pair.d.engine.thaw()
        gate.opened.set()
        for number, one in enumerate(asked):
            plain = await pair.asked_plain(
                COMPLETIONS, completion(prompt=f"{number} " * 60, **LONG)
            )
            assert (await one).json["choices"] == plain.json["choices"]
        assert ends(pair) == ["loaded"] * (4 + lost) + ["stuck"] * lost
        assert pair.world.metric("pdproxy_kv_stuck") == lost


async def test_an_engine_that_is_lost_twice_at_once() -> None:
    """It went down, was up for a moment and went down again: what waits is ended once, and what
    works goes on.
    """
    clock = ManualClock()
    async with pool(PUSH, d=SLOW, clock=clock) as pair:
        await known(pair)
        ledger, evidence = (
            pair.world.proxy.ledger,
            pair.world.proxy.engines[pair.p.url].in_ledger.evidence,
        )
        asked = [spawned(pair.ask(COMPLETIONS, completion(prompt="works " * 60, **LONG)))]
        await until(lambda: pair.d.engine.stats.running == 1)
        await answered(pair)
        await clock.advance(0.1)
        pair.p.engine.fail_loads(1)
        asked.append(spawned(pair.ask(COMPLETIONS, completion(prompt="waits " * 60, **LONG))))
        await answered(pair, 2)
        await until(lambda: pair.d.engine.stats.waiting == 1)
        pair.d.engine.freeze()
        assert evidence is not None
        lose(pair, pair.p)
        ledger.mark_up(pair.p.url, evidence)
        lose(pair, pair.p)
        await looked(clock)
        await until(
            lambda: pair.world.events(LegFailed) and not len(pair.world.proxy.custodian._tasks)
        )
        pair.d.engine.thaw()
        for word, one in zip(("works", "waits"), asked, strict=True):
            plain = await pair.asked_plain(COMPLETIONS, completion(prompt=f"{word} " * 60, **LONG))
            assert (await one).json["choices"] == plain.json["choices"]
        assert len(pair.world.events(LegFailed)) == 1
        await pair.world.quiet()


@pytest.mark.parametrize("how", ["status", "stall"])
async def test_a_decode_engine_whose_metrics_can_not_be_read(how: str) -> None:
    """It is not known what waits: every leg is ended, and the prompt is served again."""
    clock = ManualClock()
    async with pool(PUSH, prefills=2, clock=clock) as pair:
        await known(pair)
        for one in (pair.p, *pair.more):
            one.engine.fail_loads()
        pair.d.faults.add(PlannedFault(kind=how, path="/metrics"))
        asked = spawned(pair.ask(COMPLETIONS, completion()))
        await answered(pair)
        (lost,) = pair.world.proxy.custodian.awaiting_push()
        (engine,) = [one for one in (pair.p, *pair.more) if one.url == lost.prefill]
        for one in (pair.p, *pair.more):
            if one is not engine:
                one.engine.fail_loads(-1)
        admin, usual = pair.world.proxy.admin, pair.world.proxy.admin.deadlines
        admin.deadlines = Deadlines(probe=0.05) if how == "stall" else usual
        lose(pair, engine)
        await looked(clock)
        await until(lambda: pair.world.events(LegFailed))
        admin.deadlines = usual
        pair.d.faults.clear()
        assert (await asked).status == 200
        assert [event.node for event in pair.world.events(LegFailed)] == [engine.url]
        late = [
            event.wait for event in pair.world.events(DeadlinePassed) if event.node == pair.d.url
        ]
        assert set(late) == ({"probe"} if how == "stall" else set())


async def test_a_number_of_waiting_requests_that_has_no_end() -> None:
    """Each rank's number is finite, and their sum is not."""
    page = b"".join(b'vllm:num_requests_waiting{engine="%d"} 1.7e308\n' % rank for rank in range(2))

    async def scrape(_url: str) -> Scrape:
        return read_metrics(page)

    unused: Any = None
    assert await LostPushes(list, unused, {}, scrape, ManualClock(), unused).waiting("d") is None


async def test_a_prefill_engine_that_is_lost_before_its_answer_and_comes_back() -> None:
    """It was busy with the prompt, and missed its probes: no leg is ended, since the prefill leg
    would show its end.
    """
    clock = ManualClock()
    async with pool(PUSH, clock=clock) as pair:
        await known(pair)
        gate = Gate()
        pair.p.faults.script(gate)
        asked = spawned(pair.ask(COMPLETIONS, completion()))
        await until(lambda: pair.d.engine.awaited)
        lose(pair, pair.p)
        await looked(clock, 1)
        assert GRACE not in clock.pending()
        gate.opened.set()
        assert (await asked).text == await text_of(pair)
        assert ends(pair) == ["loaded"]
        assert pair.world.events(LegFailed) == []
        assert pair.world.metric("pdproxy_kv_stuck") == 0


async def test_a_prefill_engine_that_was_only_busy() -> None:
    """It took no connection once, and the next probe finds it up in the same run: nobody's leg is
    ended.
    """
    clock = ManualClock()
    async with pool("mooncake", clock=clock) as pair:
        side = pair.p.engine._links[0].side
        side.freeze()
        asked = spawned(pair.ask(COMPLETIONS, completion()))
        await answered(pair)
        lose(pair, pair.p)
        await looked(clock, LOOKS - 1)
        await pair.world.probe()
        await looked(clock, 1)
        assert GRACE not in clock.pending()
        side.thaw()
        assert (await asked).text == await text_of(pair)
        assert ends(pair) == ["loaded"]
        assert pair.world.events(LegFailed) == []


async def test_a_removed_prefill_engine_that_goes_down() -> None:
    """Legs to it ran on."""
    clock = ManualClock()
    async with pool(PUSH, clock=clock) as pair:
        await known(pair)
        pair.p.engine.fail_loads()
        asked = spawned(pair.ask(COMPLETIONS, completion()))
        await answered(pair)
        proxy = pair.world.proxy
        engine = proxy.engines[pair.p.url].in_ledger
        proxy.engines.remove(pair.p.url)
        proxy.ledger.mark_removed(engine, "no answer", clock.now())
        await looked(clock)
        assert (await asked).text == await text_of(pair), "by one engine alone"
        assert pair.world.metric("pdproxy_kv_stuck", node=pair.d.url) == 1


async def test_where_nobody_waits_for_a_push_nothing_is_looked_at() -> None:
    """A decode engine that pulls notices the loss itself."""
    clock = ManualClock()
    async with pool("nixl", clock=clock, kv_ready={"notifier": False}) as pair:
        gate = Gate()
        pair.d.faults.script(gate)
        asked = spawned(pair.ask(COMPLETIONS, completion()))
        await until(lambda: len(pair.d.requests) == 1)
        lose(pair, pair.p)
        assert GRACE not in clock.pending()
        gate.opened.set()
        assert (await asked).text == await text_of(pair)
