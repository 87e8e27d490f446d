"""Engines whose core stands still while their API server answers: found in time, others serve, let
in again.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy.observe.events import LegFailed
from tests.fakes.world import until
from tests.proxy.test_both_legs import PUSH, text_of
from tests.proxy.test_connectors import COMPLETIONS, completion
from tests.proxy.watched import AFTER, LOOK, watched

STEPS = {
    "hardware": Hardware(prefill_tokens_per_s=1e9, decode_step_s=0.001, transfer_latency_s=0.0)
}
four = partial(watched, prefills=2, decodes=2, everybody=STEPS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("role", "moment"),
    [
        ("prefill", "queued"),
        ("prefill", "prefilling"),
        ("prefill", "after"),
        ("decode", "queued"),
        ("decode", "prefilling"),
    ],
)
@pytest.mark.parametrize(
    ("connector", "dispatch"), [("nixl", "sequential"), (PUSH, "concurrent"), (PUSH, "sequential")]
)
async def test_a_request_without_data_is_answered_by_another_engine(
    connector: str, dispatch: Any, role: str, moment: str, stream: bool
) -> None:
    """Within the setting's seconds, rightly; only the engine that stands still is blamed, and
    nothing stays behind.
    """
    async with four(connector, dispatch=dispatch) as w:
        wanted = await text_of(w.pair)
        frozen, asked = await w.frozen_by(role, moment, completion(stream=stream))
        # it may have pushed or been read before it stopped
        if (role, moment) == ("prefill", "after"):
            await asyncio.wait({asked}, timeout=0.3)
        if not asked.done():
            await w.pass_(AFTER - 2 * LOOK)
            assert w.stalled == []
            await w.pass_(2 * LOOK)
            assert w.stalled == [frozen.url]
            if connector == PUSH and moment == "after":
                await w.pass_(4 * LOOK)  # the looks of `kv.lost_pushes`
        answer = await asyncio.wait_for(asked, 20)
        assert (answer.status, answer.text) == (200, wanted)
        failed = w.world.events(LegFailed)
        assert {event.node for event in failed} <= {frozen.url}
        assert all(event.will_retry for event in failed)
        await frozen.thaw_core()
        await w.world.quiet()


@pytest.mark.parametrize(("n", "moment"), [(1, "prefilling"), (2, "queued")])
async def test_an_answer_that_is_not_streamed_is_done_again(n: int, moment: str) -> None:
    """Its engine stands still in the middle of it; with `n` 2 one engine serves it alone."""
    async with four() as w:
        body = completion(n=n, max_tokens=40, temperature=n - 1, seed=7)
        wanted = (await w.pair.asked_plain(COMPLETIONS, body)).json
        frozen, asked = await w.frozen_by("decode", moment, body)
        await w.pass_(AFTER)
        answer = await asyncio.wait_for(asked, 20)
        assert [c["text"] for c in answer.json["choices"]] == [c["text"] for c in wanted["choices"]]
        assert w.stalled == [frozen.url]


async def test_a_stream_that_flows_goes_on_elsewhere() -> None:
    """Within the setting's seconds: the client sees one stream."""
    async with four() as w:
        body = completion(stream=True, max_tokens=40)
        wanted = (await w.pair.asked_plain(COMPLETIONS, body)).text
        frozen, asked = await w.frozen_by("decode", "mid_stream", body)
        await w.pass_(AFTER)
        answer = await asyncio.wait_for(asked, 20)
        assert (answer.text, answer.events[-1]) == (wanted, b"data: [DONE]\n\n")
        assert w.stalled == [frozen.url]
        assert (
            w.world.metric("pdproxy_continuations_total", result="continued", reason="stalled") == 1
        )
        await frozen.thaw_core()


async def test_a_stream_that_nobody_may_go_on_with_ends_with_an_error_event() -> None:
    """Well-formed, within the setting's seconds. Its engine aborts the request once it goes on."""
    async with four() as w:
        body = completion(stream=True, max_tokens=40, presence_penalty=0.5)
        frozen, asked = await w.frozen_by("decode", "mid_stream", body)
        await w.pass_(AFTER)
        answer = await asyncio.wait_for(asked, 20)
        assert answer.status == 200
        error = msgspec.json.decode(answer.events[-1].removeprefix(b"data: "))["error"]
        assert error["code"] == 504
        assert "stands still" in error["message"]
        await frozen.thaw_core()
        await until(lambda: frozen.engine.stats.finished["abort"])


async def test_a_request_of_a_passed_route_goes_to_another_engine() -> None:
    """As prompts do: an engine that serves it whole is an engine like others."""
    async with four() as w:
        wanted = await w.pair.asked_plain("/v1/responses", _response())
        mine = [sim for sim in w.sims if sim.facts.role == "decode"]
        for sim in mine:
            sim.faults.add("core_freeze@queued:path=/v1/responses")
        asked = asyncio.ensure_future(w.pair.ask("/v1/responses", _response()))
        await until(lambda: any(sim.engine.stops.any for sim in mine))
        for sim in mine:
            sim.faults.clear()
        await w.pass_(AFTER)
        answer = await asyncio.wait_for(asked, 20)
        assert answer.status == wanted.status == 200
        assert answer.json["output"][-1]["content"] == wanted.json["output"][-1]["content"]
        assert len(w.stalled) == 1


def _response() -> dict[str, Any]:
    return {"model": "tiny", "input": "import os", "max_output_tokens": 4, "temperature": 0}


async def test_a_whole_process_that_is_stopped_is_found_in_the_same_time() -> None:
    """`/health` is late then, too. Probes would find it down only after several of them."""
    async with four() as w:
        wanted = await text_of(w.pair)
        mine = [sim for sim in w.sims if sim.facts.role == "decode"]
        for sim in mine:
            sim.faults.add("freeze@queued")
        asked = asyncio.ensure_future(w.pair.ask(COMPLETIONS, completion()))
        await until(lambda: any(sim.frozen for sim in mine))
        for sim in mine:
            sim.faults.clear()
        await w.pass_(AFTER)
        assert (await asyncio.wait_for(asked, 20)).text == wanted
        assert w.stalled == [sim.url for sim in mine if sim.frozen]


async def test_an_engine_that_goes_on_gets_one_request_and_then_more() -> None:
    """Its first good one closes the breaker; the gauges show each state."""
    async with four() as w:
        frozen, asked = await w.frozen_by("decode", "queued", completion())
        await w.pass_(AFTER)
        await asyncio.wait_for(asked, 20)

        def state() -> str:
            names = ("up", "stalled", "half_open", "slow_start")
            return next(
                one
                for one in names
                if w.world.metric("pdproxy_node_state", node=frozen.url, state=one)
            )

        assert state() == "stalled"
        assert w.world.metric("pdproxy_stalls_total", node=frozen.url) == 1
        assert "stands still" in (await w.world.get("/ready")).body.decode()
        for _ in range(3):
            assert (await w.pair.ask(COMPLETIONS, completion())).status == 200
        await frozen.thaw_core()
        await w.pass_(3 * LOOK)
        await until(lambda: state() == "half_open")
        for _ in range(6):
            assert (await w.pair.ask(COMPLETIONS, completion())).status == 200
        await until(lambda: state() == "slow_start")
        await w.clock.advance(11)
        for _ in range(2):
            assert (await w.pair.ask(COMPLETIONS, completion())).status == 200
        assert state() == "up"


async def test_one_rank_of_an_engine_that_stands_still() -> None:
    """Its other rank answers. The request that it got is served elsewhere, and the engine gets no
    more.
    """
    async with four(d={"data_parallel_size": 2}) as w:
        wanted = await text_of(w.pair)
        w.pair.d.freeze_core_now(0.0, 1)
        asked = [asyncio.ensure_future(w.pair.ask(COMPLETIONS, completion())) for _ in range(4)]
        await asyncio.wait(asked, timeout=0.5)
        await w.pass_(AFTER)
        assert [answer.text for answer in await asyncio.wait_for(asyncio.gather(*asked), 20)] == [
            wanted
        ] * 4
        assert w.stalled == [w.pair.d.url]
        await w.pair.d.thaw_core()
        await w.pass_(3 * LOOK)
        assert w.stalled == []


async def test_engines_that_are_slow_and_work_are_left_alone() -> None:
    """Long prompts in their queues: they answer canaries, or their metrics move."""
    slow = {
        "hardware": Hardware(prefill_tokens_per_s=2000.0, decode_step_s=0.0, transfer_latency_s=0.0)
    }
    async with four(p=slow) as w:
        asked = [
            asyncio.ensure_future(w.pair.ask(COMPLETIONS, completion(prompt=f"{n} word " * 60)))
            for n in range(6)
        ]
        while not all(one.done() for one in asked):
            await w.pass_(LOOK)
        assert {(await one).status for one in asked} == {200}
        assert w.stalled == []
        assert w.world.metric("pdproxy_stalls_total") == 0
