"""Streams that nobody goes on with end with the error of their engine, for a reason that is
counted, and leave nothing behind.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from pdproxy.observe.events import LegFailed, RequestEnded
from pdproxy.observe.logs import access_fields
from pdproxy.settings.health import Continuations
from pdproxy.settings.schema import Settings
from tests.fakes import answers, scripts
from tests.fakes.client import Answer
from tests.fakes.clock import STEP, ManualClock
from tests.fakes.engine import serve
from tests.fakes.garbage import left_to_the_collector
from tests.fakes.world import CHAT, COMPLETIONS, World, chat, completion, until, world
from tests.proxy.test_continued import UNBROKEN, USAGE, asked, cut, results, whole

pytestmark = pytest.mark.timeout(120, method="thread")  # uvloop's own loop does not end by a signal

RESET = "reset@mid_stream:events=3"


def broken(answer: Answer, expected: str | None = None) -> dict[str, Any]:
    """Check a stream that ends with an error, well-formed, and return that."""
    assert answer.status == 200
    assert b"[DONE]" not in answer.body
    error: dict[str, Any] = json.loads(answer.events[-1].removeprefix(b"data: "))["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    text = Answer(200, [], b"".join(answer.events[:-1]), [], True).text
    assert text
    assert expected is None or expected.startswith(text)
    return error


async def ended(w: World, path: str, body: dict[str, Any], fault: str = RESET) -> dict[str, Any]:
    """Ask until the fault has happened; return the error with which that stream ends."""
    (w.decode or w.aggregated)[0].sim.faults.add(fault)
    before = len(results(w))
    for _ in range(4):
        answer = await w.ask(path, body)
        if len(results(w)) > before:
            return broken(answer)
    raise AssertionError("the fault has not happened")


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"logprobs": 1}, "logprobs"),
        (CHAT, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"n": 2, "temperature": 1}, "n"),
        (COMPLETIONS, {"presence_penalty": 0.5}, "penalty"),
        (CHAT, {"frequency_penalty": 0.5}, "penalty"),
        (COMPLETIONS, {"bad_words": ["zzz"]}, "bad_words"),
        (COMPLETIONS, {"temperature": 1, "seed": 5}, "seed"),
        (CHAT, {"response_format": {"type": "json_object"}}, "grammar"),
        (COMPLETIONS, {"structured_outputs": {"choice": ["a b c d e f g"]}}, "grammar"),
        (
            CHAT,
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                "tool_choice": "none",
            },
            "tools",
        ),
        (COMPLETIONS, {"vllm_xargs": {"a": 1}}, "unknown_field"),
    ],
)
async def test_what_is_not_right_behind_some_of_the_answer(
    path: str, fields: dict[str, Any], reason: str
) -> None:
    """The plan refuses it before the stream begins."""
    make = completion if path == COMPLETIONS else chat
    async with world(decode=2, limits=UNBROKEN, facts={"enable_auto_tool_choice": True}) as w:
        error = await ended(w, path, make(max_tokens=12, **({"stream": True} | fields)))
        assert (error["type"], error["code"]) == ("BadGatewayError", 502)
        assert results(w) == [("refused", reason)]
        assert w.metric("pdproxy_continuations_total", result="refused", reason=reason) == 1
        (failed,) = w.events(LegFailed)
        assert not failed.will_retry
        report = w.events(RequestEnded)[-1]
        assert (report.outcome, report.legs[0].continued) == ("engine", 0)


def told(answer: Answer) -> tuple[str, str, Any, Any]:
    """The reasoning and the content of a stream, its finish reason, and its counts."""
    thoughts, content, finish, counts = "", "", None, None
    for event in answer.events[:-1]:
        body = json.loads(event[6:])
        for choice in body.get("choices", ()):
            thoughts += choice["delta"].get("reasoning") or ""
            content += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
        if body.get("usage"):
            counts = [
                body["usage"][name]
                for name in ("prompt_tokens", "completion_tokens", "total_tokens")
            ]
    return thoughts, content, finish, counts


async def test_reasoning() -> None:
    """As a completion, thoughts would be content: in them a stream ends with an error. Behind them
    it goes on.
    """
    facts = {"reasoning_parser": "deepseek_r1"}
    async with world(decode=2, limits=UNBROKEN, facts=facts) as w:
        body = chat(stream=True, max_tokens=60, stream_options=USAGE)
        thoughts, content, finish, counts = expected = told(await w.ask(CHAT, body))
        assert len(thoughts) > 20
        assert len(content) > 20
        assert finish == "length"
        outcomes = []
        for events in range(1, 55, 3):
            w.decode[0].sim.faults.add(f"reset@mid_stream:events={events}")
            before = len(results(w))
            while len(results(w)) == before:
                answer = await w.ask(CHAT, body)
            outcomes.append(results(w)[-1])
            if outcomes[-1] == ("continued", "eof"):
                assert told(answer) == expected, events
            else:
                assert outcomes[-1] == ("refused", "reasoning_seen"), events
                assert b'"error"' in answer.events[-1]
        first = outcomes.index(("continued", "eof"))
        assert outcomes[first:].count(("continued", "eof")) >= 0.7 * len(outcomes[first:]), (
            "but behind half letters"
        )
        assert set(outcomes) == {("continued", "eof"), ("refused", "reasoning_seen")}
        assert counts is not None


async def test_hidden_reasoning() -> None:
    """Its tokens are in no event."""
    async with world(decode=2, limits=UNBROKEN) as w:
        await ended(w, CHAT, chat(stream=True, max_tokens=12, include_reasoning=False))
        assert results(w) == [("refused", "hidden_reasoning")]


@pytest.mark.parametrize(
    ("settings", "limits", "reason"),
    [
        (Continuations(sampled=False), {}, "sampled"),
        (Continuations(max_bytes=100), {}, "memory"),
        (Continuations(), {"continuations": 0}, None),
    ],
)
async def test_settings(
    settings: Continuations, limits: dict[str, Any], reason: str | None
) -> None:
    """What an operator does not want, or has no memory for."""

    def adjust(found: Settings) -> Settings:
        return Settings(
            **(
                {name: getattr(found, name) for name in found.__struct_fields__}
                | {"continuations": settings}
            )
        )

    async with world(decode=2, limits=UNBROKEN | limits, adjust=adjust) as w:
        engine = w.decode[0]
        engine.sim.faults.add(RESET)
        while (
            b'"error"'
            not in (
                answer := await w.ask(
                    COMPLETIONS, completion(stream=True, max_tokens=12, temperature=1)
                )
            ).body
        ):
            pass
        broken(answer)
        assert results(w) == ([] if reason is None else [("refused", reason)])
        assert w.metric("pdproxy_held_bytes", what="records") == 0


async def test_records_are_bounded_and_counted() -> None:
    """While a stream flows, its record counts; a second one that exceeds the bound is not kept."""

    def adjust(found: Settings) -> Settings:
        wanted = Continuations(max_bytes=1500)
        return Settings(
            **(
                {name: getattr(found, name) for name in found.__struct_fields__}
                | {"continuations": wanted}
            )
        )

    async with world(decode=1, adjust=adjust, leaves=True) as w:
        clients = []
        for count in (1, 2, 3):
            w.decode[0].sim.faults.add("stall@mid_stream:events=3")
            client = await w.client()
            client.post(COMPLETIONS, completion(stream=True, max_tokens=12))
            clients.append(client)
            await client.head()
            for _ in range(3):
                await client.piece()
            held = w.metric("pdproxy_held_bytes", what="records")
            assert 512 < held <= 1500
            if count == 1:
                one = held
        assert held == one * (1500 // one) < one * 3
        for client in clients:
            client.close()
        await w.quiet()
        assert w.metric("pdproxy_held_bytes", what="records") == 0


async def test_each_failure_counts() -> None:
    """`limits.continuations` 1: the second failure ends the stream, with its own error; 2: it goes
    on once more.
    """
    body = completion(stream=True, max_tokens=30, stream_options=USAGE)
    for allowed, wanted in (
        (1, [("continued", "eof"), ("refused", "none_left")]),
        (2, [("continued", "eof")] * 2),
    ):
        async with world(decode=2, limits=UNBROKEN | {"continuations": allowed}) as w:
            expected = await asked(w, COMPLETIONS, body)
            for engine in w.decode:
                engine.sim.faults.add("reset@mid_stream:events=9")
            answer = await w.ask(COMPLETIONS, body)
            assert results(w) == wanted
            if allowed == 2:
                assert whole(answer)[:3] == expected
            else:
                broken(answer, expected[0])
            await w.ended(2)
            legs = w.events(RequestEnded)[-1].legs[0]
            assert (legs.continued, legs.continued_by) == (allowed, "eof")
            assert legs.attempts == 1 + allowed
            fields = access_fields(w.events(RequestEnded)[-1])
            assert (fields["continued"], fields["continued_by"]) == (allowed, "eof")
            assert 0 <= float(fields["pause_ms"]) <= float(fields["total_ms"])  # type: ignore[arg-type]
            if allowed == 2:
                report = w.events(RequestEnded)[-1]
                assert (report.prompt_tokens, report.completion_tokens) == (
                    expected[2][0]["prompt_tokens"],
                    30,
                )
                assert sum(report.gaps.buckets) == 31 - 3, "30 tokens and a usage, in three streams"


async def test_an_engine_that_cannot_take_it() -> None:
    """The context of the smallest engine is full; or the engine that was to go on refuses: the
    client gets the first error.
    """
    async with world(decode=2, limits=UNBROKEN) as w:
        for one in w.workers:
            engine = one.ledger.engines[0]
            assert engine.evidence is not None
            engine.evidence = replace(engine.evidence, max_model_len=40)
        await ended(w, COMPLETIONS, completion(stream=True, max_tokens=12))
        assert results(w) == [("refused", "too_long")]
    async with world(leaves=True) as w:
        begins = scripts.streams(*[_piece(b"[1,2,3]", b"[5]")] * 3, then="reset")
        w.decode[0].script(begins, scripts.whole(answers.SCHEMA_400, 400))
        error = broken(await w.ask(COMPLETIONS, completion(stream=True, max_tokens=12)))
        assert error["code"] == 502
        assert results(w) == [("failed", "refused")]
        sent = w.decode[0].requests[1].json
        assert (sent["prompt"], sent["max_tokens"]) == ([1, 2, 3, 5, 5, 5], 9)


async def test_a_second_engine_that_sends_no_completion() -> None:
    """The stream ends with an error; what was not written is not taken for written, however often
    it may go on.
    """
    async with world(leaves=True, limits={"continuations": 5}) as w:
        begins = scripts.streams(*[_piece(b"[1,2,3]", b"[5]")] * 3, then="reset")
        other = _piece(b"[1,2,3,5,5,5]", b"[6]").replace(b'"index":0', b'"index":0,"x":{')
        w.decode[0].script(
            begins, scripts.streams(_piece(b"[1,2,3,5,5,5]", b"[6]"), other, then="reset")
        )
        error = broken(await w.ask(COMPLETIONS, completion(stream=True, max_tokens=12)))
        assert "invalid completion event" in error["message"]
        assert results(w) == [("continued", "eof"), ("refused", "no_ids")]


async def test_no_engine_is_left() -> None:
    """The client gets the error of the engine that failed, not that nobody else was there."""
    async with world(
        prefill=0, decode=0, aggregated=1, limits={"breaker_failures": 1}, leaves=True
    ) as w:
        (engine,) = w.aggregated
        engine.sim.faults.add("kill@mid_stream:events=3")
        error = broken(await w.ask(COMPLETIONS, completion(stream=True, max_tokens=12)))
        assert error["code"] == 502
        assert results(w) == [("refused", "no_engine")]


async def test_only_the_engine_that_failed_is_there() -> None:
    """It goes on itself: a connection may break for many reasons."""
    async with world(decode=1, limits=UNBROKEN) as w:
        expected = await asked(
            w, COMPLETIONS, completion(stream=True, max_tokens=12, stream_options=USAGE)
        )
        found = await cut(
            w, RESET, COMPLETIONS, completion(stream=True, max_tokens=12, stream_options=USAGE)
        )
        assert found == expected


async def test_the_only_engine_goes_down() -> None:
    """It has given its answers up: another prefill for it would leave KV at P until the lease's
    end.
    """
    async with world(decode=1, limits=UNBROKEN) as w:
        w.decode[0].sim.faults.add("abort_finish@mid_stream:events=3")
        error = broken(await w.ask(COMPLETIONS, completion(stream=True, max_tokens=12)))
        assert "gave the answer up" in error["message"]
        assert results(w) == [("refused", "no_engine")]
        assert len(w.prefill[0].requests) == 1
        await w.quiet()


async def test_only_a_silent_engine_is_there() -> None:
    """It is not waited for again: the error comes after `deadlines.between_tokens`."""
    clock = ManualClock()
    async with world(decode=1, clock=clock, leaves=True, deadlines={"between_tokens": 7}) as w:
        w.decode[0].sim.faults.add("stall@mid_stream:events=3")
        asking = asyncio.ensure_future(w.ask(COMPLETIONS, completion(stream=True, max_tokens=12)))
        await until(lambda: w.decode[0].sim.faults.happened)
        await clock.reach(7)
        assert broken(await asking)["code"] == 504
        assert results(w) == [("refused", "no_engine")]


@pytest.mark.parametrize("failing", [1, 4])
async def test_an_engine_that_returns_no_text(failing: int) -> None:
    """The text at a cut is asked of one other engine then, and of no third one."""
    body = completion(stream=True, max_tokens=12, stop=["zz 78"], stream_options=USAGE)
    async with world(decode=3, limits=UNBROKEN) as w:
        expected = await asked(w, COMPLETIONS, body)
        for engine in w.engines[:failing]:  # idle engines are asked in this order
            engine.sim.faults.add("status@queued:path=/detokenize,next=99,status=500")
        w.decode[0].sim.faults.add(RESET)
        for _ in range(3):
            answer = await w.ask(COMPLETIONS, body)
            if results(w):
                break
        if failing == 1:
            assert results(w) == [("continued", "eof")]
            text, finish, usages, _, done = whole(answer)
            assert ((text, finish, usages), done) == (expected, True)
        else:
            assert results(w) == [("refused", "half_letter")]
        asked_for = sum(len(engine.sim.faults.happened) for engine in w.engines) - 1
        assert asked_for == min(failing, 2)


@pytest.mark.parametrize("stage", ["prefill", "decode", "detokenize"])
async def test_another_engine_that_is_late(stage: str) -> None:
    """No longer than `deadlines.continuation` in all, whatever it waits for; a text is waited for
    as long as for ids.
    """
    clock = ManualClock()
    async with world(
        decode=2, clock=clock, leaves=True, deadlines={"continuation": 7, "tokenize": 3}
    ) as w:
        other = w.decode[1]
        if stage == "prefill":
            w.prefill[0].script(serve, serve)
        elif stage == "decode":
            other.script(serve)
        w.decode[0].sim.faults.add("stall@mid_stream:events=3")
        await w.ask(COMPLETIONS, completion(stream=True, max_tokens=2))  # the other one's turn
        if stage == "decode":
            other.default = scripts.stall
        if stage == "prefill":
            w.prefill[0].default = scripts.stall
        stop = ["zz 78"] if stage == "detokenize" else []
        if stage == "detokenize":
            for engine in w.engines:
                engine.sim.faults.add("stall@queued:path=/detokenize,next=5")
        asking = asyncio.ensure_future(
            w.ask(COMPLETIONS, completion(stream=True, max_tokens=12, stop=stop))
        )
        answer = await clock.through(asking, STEP)
        broken(answer)
        wanted = {"detokenize": ("refused", "half_letter")}.get(stage, ("failed", "deadline"))
        assert results(w) == [wanted]
        waited = "tokenize" if stage == "detokenize" else "continuation"
        # each engine that is asked has its part of the time
        passed = 2 if stage == "detokenize" else 1
        assert w.metric("pdproxy_deadline_total", wait=waited) == passed


async def test_a_client_that_leaves_while_nothing_comes() -> None:
    """At each wait between the two streams: for a text, for the prefill engine, for the engine that
    goes on, in its stream.
    """
    for at in ("/detokenize", "prefill", "decode", "stream"):
        async with world(decode=2, leaves=True) as w:
            first, other = w.decode
            await w.ask(COMPLETIONS, completion(max_tokens=2))  # the other one's turn
            if other.requests == []:
                first, other = other, first
            first.sim.faults.add("reset@mid_stream:events=9")
            if at == "/detokenize":
                for engine in w.engines:
                    engine.sim.faults.add("stall@queued:path=/detokenize")
            elif at == "prefill":
                w.prefill[0].script(serve, scripts.stall)
            else:
                other.sim.faults.add(
                    "stall@queued" if at == "decode" else "stall@mid_stream:events=3"
                )
            client = await w.client()
            client.post(
                COMPLETIONS,
                completion(stream=True, max_tokens=30, stop=["zz 78"] if at[0] == "/" else []),
            )
            await client.head()
            for _ in range(11 if at == "stream" else 4):
                await client.piece()
            waits = (
                [*w.engines]
                if at == "/detokenize"
                else [w.prefill[0]]
                if at == "prefill"
                else [other]
            )
            if at == "prefill":
                await until(lambda w=w: len(w.prefill[0].requests) == 3)  # type: ignore[misc]
            else:
                await until(lambda waits=waits: any(one.sim.faults.happened for one in waits))  # type: ignore[misc]
            client.close()
            assert (await w.ended(2)).outcome == "client_left"
            if at == "prefill":
                w.prefill[0].stop()
            await w.quiet()
            assert w.metric("pdproxy_held_bytes", what="records") == 0


def _piece(prompt: bytes, ids: bytes, **changes: bytes) -> bytes:
    event = answers.piece(False, "a").replace(
        b'"prompt_token_ids":null', b'"prompt_token_ids":' + prompt
    )
    event = event.replace(b'"token_ids":null}', b'"token_ids":' + ids + b"}")
    for name, value in changes.items():
        event = re.sub(
            rb'"%b":("[^"]*"|\d+)' % name.encode(),
            rb'"%b":%b' % (name.encode(), value),
            event,
            count=1,
        )
    return event


@pytest.mark.parametrize(
    ("events", "results_of"),
    [
        ([_piece(b'["x"]', b"[5]")], {"no_ids"}),
        ([_piece(b"[[1],2]", b"[5]")], {"no_ids"}),
        ([_piece(b"[]", b"[5]")], {"no_ids"}),
        ([_piece(b"null", b"[5]")], {"no_ids"}),
        ([_piece(b"[1,2]", b"null")], {"no_ids"}),
        ([_piece(b"[1,2]", b'["5"]')], {"no_ids"}),
        ([_piece(b"[1,2]", b"[99999999999999999999]")], {"no_ids", "too_long"}),
        ([_piece(b"[1,2]", b"[5]", id=b"7", created=b'"x"')], {"eof"}),
        ([_piece(b"[1,2]", b"[5]", created=b"[" * 9)], {"no_ids"}),
        ([_piece(b"[1,2]", b"[5]"), _piece(b"null", b"[5,6,7]")], {"half_letter"}),
    ],
)
async def test_hostile_engines(events: list[bytes], results_of: set[str]) -> None:
    """What an engine sends for ids, or in place of what its events show, ends at the worst in an
    error event.
    """
    async with world(decode=2, leaves=True) as w:
        for engine in w.decode:
            engine.script(scripts.streams(*events, then="reset"))
        answer = await w.ask(COMPLETIONS, completion(stream=True, max_tokens=12))
        assert answer.status == 200
        assert {reason for _, reason in results(w)[:1]} <= results_of
        assert (
            answer.events[-1].startswith(b'data: {"error"')
            or answer.events[-1] == b"data: [DONE]\n\n"
        )
        await w.quiet()


@pytest.mark.parametrize("fault", [RESET, "reset@before_done", "abort_finish@mid_stream:events=5"])
@pytest.mark.parametrize("refused", [False, True])
async def test_no_garbage(fault: str, refused: bool) -> None:
    """Both exchanges are freed by reference counts, whether the second one served or none was
    made.
    """
    fields = {"presence_penalty": 0.5} if refused else {}
    async with world(decode=2, limits=UNBROKEN) as w:

        async def work() -> None:
            before = len(results(w))
            w.decode[0].sim.faults.add(fault)
            while len(results(w)) == before:
                await w.ask(COMPLETIONS, completion(stream=True, max_tokens=12, **fields))
            await w.quiet()

        await work()
        with left_to_the_collector() as found:
            await work()
        assert not found
