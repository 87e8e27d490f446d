"""More work than there is room for: what is refused, why, before which cost, and when to ask
again.
"""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdproxy.observe.events import NodeChanged
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.upstream.metrics_page import Scrape
from tests.fakes import scripts
from tests.fakes.admitted import admission_of
from tests.fakes.clock import ManualClock
from tests.fakes.engine import prefill
from tests.fakes.passed import everyone
from tests.fakes.scripts import WORD
from tests.fakes.world import CHAT, COMPLETIONS, World, chat, completion, until, world

EMBEDDINGS = "/v1/embeddings"


def within(seconds: str) -> list[tuple[str, str]]:
    return [("x-request-timeout", seconds)]


def nobody_was_asked(w: World) -> bool:
    return not any(engine.requests for engine in (*w.prefill, *w.decode, *w.aggregated))


# -- X-Request-Timeout


@pytest.mark.parametrize(
    "text", ["", "-1", "1e3", "nan", "inf", "5 s", "30s", "0x10", "1" * 19, ".5", "5,5", "\xb2"]
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, EMBEDDINGS])
async def test_a_timeout_that_is_no_number_is_ignored(
    text: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM reads no such header, and other servers read it otherwise. The log says so, without its
    text.
    """
    caplog.set_level(logging.INFO)
    async with world(0, 0, 1) as w:
        answer = await w.ask(path, chat() if path == CHAT else completion(), within(text))
        assert b"X-Request-Timeout" not in answer.body
        assert len(w.aggregated[0].requests) == (path != EMBEDDINGS)
    assert (
        "X-Request-Timeout is ignored: it is not a number of seconds, such as 30 or 0.5"
        in caplog.messages
    )


@pytest.mark.parametrize("text", ["5", " 30.5 ", "0.9", "7.", "999999999999999999"])
async def test_an_answer_in_time_is_as_without_the_header(text: str) -> None:
    """Engines don't get the header."""
    async with world() as w:
        answer = await w.ask(COMPLETIONS, completion(), within(text))
        assert answer.status == 200
        for engine in (w.prefill[0], w.decode[0]):
            assert "x-request-timeout" not in {
                name.lower() for name, _ in engine.requests[0].headers
            }


@pytest.mark.parametrize("text", ["0", "0.05", "0.000001"])
@pytest.mark.parametrize("path", [COMPLETIONS, EMBEDDINGS])
async def test_what_cannot_be_done_in_time_costs_no_engine_anything(text: str, path: str) -> None:
    async with world(0, 0, 1) as w:
        answer = await w.ask(path, completion(), within(text))
        assert (answer.status, answer.json["error"]["reason"]) == (503, "deadline")
        assert answer.header("retry-after") == "1"
        assert nobody_was_asked(w)
        assert w.metric("pdproxy_refusals_total", reason="deadline", status="503") == 1
        assert w.metric("pdproxy_deadline_total") == 0


async def test_a_request_leaves_the_queue_at_its_own_deadline() -> None:
    """Before the queue's; the one behind it waits on, and no engine has seen it."""
    clock = ManualClock()
    async with world(deadlines={"queue": 30}, limits={"max_inflight": 1}, clock=clock) as w:
        go = asyncio.Event()
        w.prefill[0].script(scripts.gate(go, prefill))
        first, hurried, patient = [await w.client() for _ in range(3)]
        first.post(COMPLETIONS, completion())
        await until(lambda: w.inflight == 1)
        hurried.post(COMPLETIONS, completion(), within("5"))
        patient.post(COMPLETIONS, completion())
        await until(lambda: w.waiting == 2)
        await clock.advance(4.8)
        assert w.waiting == 2
        await clock.advance(0.3)
        answer = await hurried.answer()
        assert (answer.status, answer.json["error"]["reason"]) == (503, "deadline")
        assert w.waiting == 1
        assert w.metric("pdproxy_deadline_total", wait="queue") == 1
        go.set()
        assert [(await client.answer()).status for client in (first, patient)] == [200, 200]
        assert len(w.prefill[0].requests) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_served_ends_at_its_deadline(stream: bool) -> None:
    """As at `deadlines.total`: 504 before data, an error event after; engines are closed, and
    nothing is held.
    """
    clock = ManualClock()
    async with world(clock=clock) as w:
        w.decode[0].script(scripts.streams(WORD, then="stall") if stream else scripts.stall)
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=stream), within("3"))
        await w.decode[0].asked()
        head = await client.head() if stream else None
        await clock.advance(3.1)
        answer = await (client.rest(head) if head else client.answer())
        assert answer.status == (200 if stream else 504)
        assert b"the request took longer than 3 s" in answer.body
        assert w.metric("pdproxy_deadline_total", wait="total") == 1


async def test_a_route_of_one_engine_ends_at_its_deadline() -> None:
    clock = ManualClock()
    async with world(0, 0, 1, clock=clock) as w:
        seen = everyone(w, EMBEDDINGS, scripts.stall)
        client = await w.client()
        client.post(EMBEDDINGS, completion(), within("3"))
        await until(lambda: bool(seen))
        await clock.advance(3.1)
        assert (await client.answer()).status == 504


@pytest.mark.parametrize("most", [10**400, -(10**400)])
async def test_a_limit_beyond_all_numbers_is_the_engines_to_refuse(most: int) -> None:
    """The time that its answer would take is not computed with it."""
    async with world() as w:
        answer = await w.ask(
            COMPLETIONS, completion(max_tokens=most), [("x-request-timeout", "30")]
        )
        assert answer.status == 400


async def test_total_is_the_most_that_a_client_can_ask_for() -> None:
    clock = ManualClock()
    async with world(deadlines={"total": 7}, clock=clock) as w:
        w.decode[0].script(scripts.stall)
        client = await w.client()
        client.post(COMPLETIONS, completion(), within("86400"))
        await w.decode[0].asked()
        await clock.reach(7)
        answer = await client.answer()
        assert answer.status == 504
        assert b"longer than 7 s" in answer.body


async def test_a_wait_that_is_predicted_to_be_too_long_is_refused_at_once() -> None:
    """By the requests that have ended before. A client that has longer waits."""
    clock = ManualClock()
    async with world(limits={"max_inflight": 1}, clock=clock) as w:
        gates = [asyncio.Event() for _ in range(3)]
        w.prefill[0].script(*[scripts.gate(one, prefill) for one in gates])
        clients = []
        for _ in range(3):
            clients.append(await w.client())
            clients[-1].post(COMPLETIONS, completion())
            await until(lambda: w.inflight + w.waiting == len(clients))
        await clock.advance(8.0)
        gates[0].set()
        assert (await clients[0].answer()).status == 200
        refused = await w.ask(COMPLETIONS, completion(), within("1"))
        assert (refused.status, refused.json["error"]["reason"]) == (503, "deadline")
        assert 1 < int(refused.header("retry-after") or 0) <= 60
        for gate in gates:
            gate.set()
        patient = w.ask(COMPLETIONS, completion(), within("30"))
        assert [
            (await one).status for one in (patient, clients[1].answer(), clients[2].answer())
        ] == [200] * 3


# -- when to ask again


async def test_a_full_queue_says_when_there_may_be_room() -> None:
    """After the work that waits now, as fast as requests have ended lately."""
    clock = ManualClock()
    async with world(limits={"max_inflight": 1, "max_queue": 1}, clock=clock) as w:
        gates = [asyncio.Event() for _ in range(3)]
        w.prefill[0].script(*[scripts.gate(one, prefill) for one in gates])
        first, second = await w.client(), await w.client()
        first.post(COMPLETIONS, completion())
        await until(lambda: w.inflight == 1)
        await clock.advance(5.0)
        gates[0].set()
        await first.answer()
        first.post(COMPLETIONS, completion())
        await until(lambda: w.inflight == 1)
        second.post(COMPLETIONS, completion())
        await until(lambda: w.waiting == 1)
        refused = await w.ask(COMPLETIONS, completion())
        assert (refused.status, refused.json["error"]["reason"]) == (503, "queue_full")
        assert 2 <= int(refused.header("retry-after") or 0) <= 20
        for gate in gates:
            gate.set()
        assert [(await client.answer()).status for client in (first, second)] == [200, 200]
        assert w.metric("pdproxy_refusals_total", reason="queue_full") == 1


# -- tokens in flight


async def test_prompts_that_are_too_much_together_wait() -> None:
    """One alone is served, however long it is."""
    async with world(limits={"max_inflight_tokens": 3000}) as w:
        go = asyncio.Event()
        w.prefill[0].script(*[scripts.gate(go, prefill)] * 2)
        long = completion(prompt="word " * 2000, max_tokens=5)
        clients = [await w.client() for _ in range(3)]
        for client in clients:
            client.post(COMPLETIONS, long)
        await until(lambda: (w.inflight, w.waiting) == (1, 2))
        assert w.metric("pdproxy_tokens_in_flight") == 2505
        go.set()
        assert [(await client.answer()).status for client in clients] == [200] * 3
        huge = await w.ask(COMPLETIONS, completion(prompt="word " * 4000, max_tokens=5))
        assert huge.status == 200
        await w.told()
        assert w.metric("pdproxy_tokens_in_flight") == 0


async def test_tokens_per_engine() -> None:
    """Each engine that answers clients adds its part."""
    async with world(1, 2, limits={"engine_tokens": 1500, "max_inflight_tokens": 4000}) as w:
        assert admission_of(w.proxy)._queue.max_size == 3000
        go = asyncio.Event()
        w.prefill[0].script(*[scripts.gate(go, prefill)] * 2)
        clients = [await w.client() for _ in range(2)]
        for client in clients:
            client.post(COMPLETIONS, completion(prompt="word " * 2000, max_tokens=5))
        await until(lambda: (w.inflight, w.waiting) == (1, 1))
        go.set()
        assert [(await client.answer()).status for client in clients] == [200] * 2
        w.proxy.setup.remove(w.decode[1].url)
        assert admission_of(w.proxy)._queue.max_size == 1500


# -- what engines can take


def report(
    w: World, index: int, waiting: float, usage: float = 0.1, queued: float | None = None
) -> None:
    """A decode engine's metrics are read."""
    engine = w.proxy.engines.known[w.decode[index].url]
    w.proxy.prober._auditor.scraped(engine, Scrape(1.0, 16, 1.0, waiting, usage, {}, queued=queued))


def places(w: World) -> int:
    return admission_of(w.proxy)._queue.places


async def test_a_number_of_requests_per_engine() -> None:
    """The sum of the engines that are up and answer clients; an engine that goes down takes its
    part with it.
    """
    async with world(1, 2, limits={"engine_requests": 3}) as w:
        assert places(w) == 6
        now = w.proxy.service.resources.now()
        w.mark_down(w.decode[1], "gone", now)
        w.proxy.observers.notify(NodeChanged(w.decode[1].url, "decode", up=False, reason="gone"))
        assert places(w) == 3
        await w.probe()
        assert places(w) == 6
        w.proxy.stalls.stalled(w.proxy.engines.known[w.decode[1].url], "stands still")
        assert places(w) == 3
        w.proxy.setup.remove(w.decode[0].url)
        assert places(w) == 1024, "without any engine requests are refused at once, for that reason"
        assert w.metric("pdproxy_capacity", node=w.decode[1].url) == 3


async def test_engines_get_what_they_run_without_a_queue() -> None:
    """Once all have been seen to be full; others wait here, in their tenants' turns."""
    async with world(1, 2, limits={"engine_requests": "auto"}) as w:
        go = asyncio.Event()
        for engine in w.decode:
            engine.default = scripts.gate(go, engine.default)
        clients = [await w.client() for _ in range(8)]
        for number, client in enumerate(clients, 1):
            # one by one: several workers at once may choose the same engine
            client.post(COMPLETIONS, completion())
            await until(
                lambda number=number: sum(len(engine.requests) for engine in w.decode) == number  # type: ignore[misc]
            )
        assert [len(engine.requests) for engine in w.decode] == [4, 4]
        for _ in range(3):
            for index in (0, 1):
                report(w, index, 3.0, queued=0.0)  # they wait for KV, and would at any load
        for index in (0, 1, 0):
            report(w, index, 3.0)
        assert places(w) == 1024
        report(w, 1, 3.0)
        assert places(w) == 4
        await until(lambda: w.metric("pdproxy_capacity", node=w.decode[0].url) == 2)
        late = await w.client()
        late.post(COMPLETIONS, completion())
        await until(lambda: w.waiting == 1)
        go.set()
        assert [(await client.answer()).status for client in (*clients, late)] == [200] * 9
        for one in w.workers:
            one.setup.remove(w.decode[0].url)
        assert w.metric("pdproxy_capacity", node=w.decode[0].url) == 0


async def test_an_engine_that_refuses_by_its_queue_gets_no_more() -> None:
    """Its 503 is no failure of the engine, and another one answers. One that has few requests is
    believed by its metrics only.
    """
    async with world(1, 2, limits={"engine_requests": "auto"}) as w:
        refusal = scripts.whole(
            b'{"error":{"message":"full","type":"ServiceUnavailableError","code":503}}', 503
        )
        go = asyncio.Event()
        for engine in w.decode:
            engine.script(refusal)
        assert (await w.ask(COMPLETIONS, completion())).status == 200
        assert places(w) == 1024
        for engine in w.decode:
            engine.default = scripts.gate(go, engine.default)
        clients = [await w.client() for _ in range(21)]
        for client in clients[:20]:
            client.post(COMPLETIONS, completion())
        await until(lambda: sum(len(engine.requests) for engine in w.decode) == 23)
        assert places(w) == 1024
        for engine in w.decode:
            engine.script(refusal)
        clients[20].post(COMPLETIONS, completion())
        await until(lambda: sum(len(engine.requests) for engine in w.decode) == 26)
        await until(lambda: 20 <= places(w) <= 24)  # at once in the worker that was refused
        assert all(
            engine.in_ledger.window
            for engine in w.proxy.engines.values()
            if engine.in_ledger.role is Role.DECODE
        )
        go.set()
        assert [(await client.answer()).status for client in clients] == [200] * 21
