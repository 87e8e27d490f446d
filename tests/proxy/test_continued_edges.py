"""Streams that go on, at their edges: what engines send beside their data, and who is asked when an
engine is silent.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdproxy.observe.events import RequestEnded
from pdproxy.settings.limits import Limits
from tests.fakes import answers, scripts
from tests.fakes.clock import STEP, ManualClock
from tests.fakes.engine import Reply
from tests.fakes.garbage import left_to_the_collector
from tests.fakes.world import CHAT, COMPLETIONS, PROMPT, chat, completion, until, world
from tests.proxy.test_continued import UNBROKEN, USAGE, results, whole
from tests.proxy.test_continued_not import RESET, _piece, broken

pytestmark = pytest.mark.timeout(120, method="thread")  # uvloop's own loop does not end by a signal


async def test_an_end_that_was_not_written_is_no_end() -> None:
    """What comes in one read with an event that is no completion never reaches the client: its
    choice has not ended.
    """
    async with world(leaves=True, limits={"continuations": 5}) as w:
        begins = scripts.streams(*[_piece(b"[1,2,3]", b"[5]")] * 3, then="reset")
        bad = _piece(b"[1,2,3,5,5,5]", b"[6]").replace(b'"index":0', b'"index":0,"x":{')
        end = answers.piece(False, "z", finish="length").replace(
            b'"token_ids":null}', b'"token_ids":[6]}'
        )
        w.decode[0].script(
            begins, scripts.streams(_piece(b"[1,2,3,5,5,5]", b"[6]"), bad + end, then="reset")
        )
        error = broken(await w.ask(COMPLETIONS, completion(stream=True, max_tokens=12)))
        assert "invalid completion event" in error["message"]


async def test_a_silent_engine_is_not_asked_where_another_can_serve_alone() -> None:
    """The only decode engine is silent, and an aggregated one is there: that goes on at once."""
    clock = ManualClock()
    async with world(
        decode=1, aggregated=1, clock=clock, leaves=True, deadlines={"between_tokens": 7}
    ) as w:
        (d,) = w.decode
        d.script(
            scripts.streams(*[_piece(b"[%b]" % b",".join([b"20"] * 60), b"[50]")] * 3, then="stall")
        )
        d.default = scripts.stall
        asking = asyncio.ensure_future(w.ask(COMPLETIONS, completion(stream=True, max_tokens=12)))
        answer = await clock.through(asking, STEP)
        assert results(w) == [("continued", "deadline")]
        assert answer.events[-1] == answers.DONE
        assert len(d.requests) == 1


@pytest.mark.parametrize("at", ["decode", "retry"])
async def test_a_request_whose_time_is_up_between_two_streams(at: str) -> None:
    """`deadlines.total` ends it with an error, and it counts as a stream that did not go on."""
    clock = ManualClock()
    async with world(decode=2, clock=clock, leaves=True, deadlines={"total": 7, "retry": 20}) as w:
        first, other = w.decode
        await w.ask(COMPLETIONS, completion(max_tokens=2))  # the other one's turn
        if not other.requests:
            first, other = other, first
        first.sim.faults.add("reset@mid_stream:events=9")
        other.default = scripts.stall
        retries = w.proxy.retries
        taken = [await retries.enter() for _ in range(retries.limit)] if at == "retry" else []
        asking = asyncio.ensure_future(w.ask(COMPLETIONS, completion(stream=True, max_tokens=12)))
        await until(lambda: retries.waiting if at == "retry" else len(other.requests) == 2)
        assert broken(await clock.through(asking, STEP))["code"] == 504
        assert w.metric("pdproxy_deadline_total", wait="total") == 1
        assert results(w) == [("refused" if at == "retry" else "failed", "deadline")]
        for slot in taken:
            assert slot is not None
            slot.leave()


async def test_a_comment_behind_an_event_in_one_read() -> None:
    """The last event of data is not the one before it: half of a letter may have come with the
    comment.
    """
    async with world(leaves=True) as w:
        half = _piece(b"null", b"[203]").replace(b'"text":"a"', b'"text":""')
        first = _piece(b"[10,11,12]", b"[105]")
        w.decode[0].script(scripts.streams(first, half + b": ping\n\n", then="reset"))
        answer = await w.ask(
            COMPLETIONS, completion(stream=True, max_tokens=12, stream_options=USAGE)
        )
        sent = [
            request.json["prompt"] for request in w.decode[0].requests if "prompt" in request.json
        ]
        assert len(sent) == 2, (results(w), answer.events)
        assert sent[1] == [10, 11, 12, 105], answer.events


@pytest.mark.parametrize("ids", [b"[4294967296]", b"[1,4294967296]", b"[12345678901]"])
async def test_ids_that_are_none(ids: bytes) -> None:
    """A stream of which an id is not known is not continued behind the others."""
    async with world(leaves=True) as w:
        w.decode[0].script(
            scripts.streams(
                _piece(b"[1,2,3]", b"[105]"),
                _piece(b"null", ids),
                _piece(b"null", b"[105]"),
                then="reset",
            )
        )
        broken(await w.ask(COMPLETIONS, completion(stream=True, max_tokens=12)))
        assert {result for result, _ in results(w)} == {"refused"}


@pytest.mark.parametrize("at", ["mid_stream:events=4", "mid_stream:events=9"])
async def test_a_forced_usage_of_a_list_whose_streams_all_go_on(at: str) -> None:
    """The engines that went on have shown that the usage is forced: the client gets the sum."""
    prompts = [PROMPT + "1", PROMPT + "22"]
    async with world(decode=1, limits=UNBROKEN, facts={"enable_force_include_usage": True}) as w:
        body = completion(stream=True, max_tokens=12, prompt=prompts)
        expected = whole(await w.ask(COMPLETIONS, body))
        for _ in prompts:
            w.decode[0].sim.faults.add(f"reset@{at}")
        found = whole(await w.ask(COMPLETIONS, body))
        assert results(w) == [("continued", "eof")] * 2
        assert sorted(found[0]) == sorted(expected[0])
        assert found[2][-1] == expected[2][-1]


@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_leaves_while_it_waits_for_a_retry(streams: bool) -> None:
    """No place, no record and no garbage stay behind."""
    async with world(decode=2, limits=UNBROKEN, leaves=True) as w:
        retries = w.proxy.retries

        async def work() -> None:
            retries.limits = Limits(min_retries=0, retry_share=0.0)
            for engine in w.decode:
                engine.sim.faults.add(RESET if streams else "reset@queued:next=4")
            client = await w.client()
            client.post(COMPLETIONS, completion(stream=True, max_tokens=12))
            await until(lambda: retries.waiting == 1)
            client.close()
            await until(lambda: retries.waiting == 0)
            await w.quiet()
            await until(lambda: retries.running == 0)
            assert w.metric("pdproxy_held_bytes", what="records") == 0
            for engine in w.decode:
                engine.sim.faults.clear()

        await work()
        with left_to_the_collector() as found:
            await work()
        assert not found


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "fields", [{"presence_penalty": 0.5}, {"temperature": 1, "seed": 5}, {"n": 2}]
)
async def test_a_mark_alone_is_missing_where_nobody_could_go_on(
    path: str, fields: dict[str, Any]
) -> None:
    """The whole answer has come, and the usage behind it: the proxy sends the mark."""
    make = completion if path == COMPLETIONS else chat
    async with world(decode=2, limits=UNBROKEN) as w:
        body = make(
            stream=True, max_tokens=5, stream_options=USAGE, **({"temperature": 1} | fields)
        )
        while not results(w):
            w.decode[0].sim.faults.add("no_done@before_done")
            answer = await w.ask(path, body)
            assert answer.events[-1] == answers.DONE
            assert b'"usage":{' in answer.events[-2]
        assert results(w) == [("finished", "eof")]


async def test_the_end_of_a_second_stream() -> None:
    """Also if no other engine may go on with it any more."""
    async with world(decode=2, limits=UNBROKEN) as w:
        body = completion(stream=True, max_tokens=12, stream_options=USAGE)
        expected = whole(await w.ask(COMPLETIONS, body))
        for engine in w.decode:
            engine.sim.faults.add("reset@mid_stream:events=5")
        for engine in w.decode:
            engine.sim.faults.add("no_done@before_done")
        while ("finished", "eof") not in results(w):
            answer = await w.ask(COMPLETIONS, body)
        assert whole(answer)[:3] == expected[:3]


@pytest.mark.parametrize(
    "case", ["none left", "twice", "refused", "invalid", "invalid at once", "list", "leaves"]
)
async def test_no_garbage_of_second_streams(case: str) -> None:
    """Whatever ends the stream that goes on, reference counts free both."""
    prompt = _piece(b"[1,2,3]", b"[5]")
    begins = scripts.streams(prompt, prompt, then="reset")
    bad = prompt.replace(b'"index":0', b'"index":0,"x":{')
    limits = UNBROKEN | {"continuations": 2 if case == "twice" else 1}
    async with world(prefill=0, decode=0, aggregated=2, limits=limits, leaves=True) as w:
        engines = w.aggregated

        async def work() -> None:
            second = {
                "none left": begins,
                "twice": begins,
                "refused": scripts.whole(answers.SCHEMA_400, 400),
                "invalid": scripts.streams(prompt, bad, then="reset"),
                "invalid at once": scripts.streams(bad, then="reset"),
                "list": begins,
                "leaves": scripts.streams(prompt, then="stall"),
            }[case]
            before = len(results(w))
            ended = len(w.events(RequestEnded))
            count = 0

            async def in_turn(reply: Reply) -> None:
                nonlocal count
                count += 1
                await (begins if count == 1 else second)(reply)

            for engine in engines:
                engine.script(*[in_turn] * 4)
            client = await w.client()
            prompts = [PROMPT, PROMPT] if case == "list" else PROMPT
            client.post(COMPLETIONS, completion(stream=True, max_tokens=12, prompt=prompts))
            await client.head()
            if case == "leaves":
                await until(lambda: len(results(w)) > before)
                client.close()
            await until(lambda: len(w.events(RequestEnded)) > ended)
            client.close()
            for engine in engines:
                engine.scripts.clear()
            await w.quiet()

        await work()
        with left_to_the_collector() as found:
            await work()
        assert not found


async def test_no_place_for_a_retry_leaves_no_garbage() -> None:
    """The client gets the error of the engine that failed."""
    async with world(decode=2, limits=UNBROKEN, leaves=True) as w:
        retries = w.proxy.retries

        async def work() -> None:
            retries.limits = Limits(min_retries=0, retry_share=0.0, max_inflight=0)
            for fault in (RESET, "reset@queued:next=4"):
                for engine in w.decode:
                    engine.sim.faults.clear()
                    engine.sim.faults.add(fault)
                answer = await w.ask(COMPLETIONS, completion(stream=True, max_tokens=12))
                assert b"[DONE]" not in answer.body
            await w.quiet()

        await work()
        with left_to_the_collector() as found:
            await work()
        assert not found
