"""When the decode engine fails: before its first data another one serves with a fresh prefill,
after it the end is honest.
"""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.observe.events import HandleEnded, LegFailed
from tests.fakes import answers, scripts
from tests.fakes.clock import ManualClock
from tests.fakes.engine import Reply, Script
from tests.fakes.scripts import WORD, streams
from tests.fakes.world import (
    CHAT,
    CHAT_TEXT,
    COMPLETIONS,
    LONG,
    TEXT,
    chat,
    completion,
    until,
    world,
)

ROLE = answers.role()
ERROR = answers.error_event()
BEFORE_DATA: dict[str, Script] = {
    "500": scripts.whole(answers.INTERNAL_500, 500),
    "503": scripts.whole(b"dying", 503),
    "429": scripts.whole(b"full", 429),
    "reset": scripts.reset,
    "eof": scripts.eof,
    "garbage": scripts.garbage,
    "error event": streams(ERROR, answers.DONE),
    "error event in compact form": streams(
        b'data: {"error":{"message":"x","type":"y","code":500}}\n\n', then="stall"
    ),
    "old error event": streams(
        b'data: {"object":"error","message":"x","type":"y","code":500}\n\n', then="stall"
    ),
    "role, then error": streams(ROLE, ERROR, answers.DONE),
    "role and error at once": streams(ROLE + ERROR + answers.DONE),
    "comment, then eof": streams(b": ping\n\n", then="eof"),
    "headers, then eof": streams(then="eof"),
    "headers, then reset": streams(then="reset"),
    "an empty stream": streams(),
    "done without data": streams(answers.DONE),
    "role, then done": streams(ROLE, answers.DONE),
    "usage, then done": streams(answers.usage_event(False, 9, 0), answers.DONE),
    "role, usage, then done": streams(ROLE, answers.usage_event(True, 9, 0), answers.DONE),
    "role, usage and done at once": streams(ROLE + answers.usage_event(True, 9, 0) + answers.DONE),
    "half an event, then eof": streams(WORD[:-10], then="eof"),
    "given up": streams(ROLE, answers.piece(True, "", finish="abort"), answers.DONE),
    "stalled": scripts.stall,
    "stalled after its head": streams(then="stall"),
    "stalled after its role": streams(ROLE, then="stall"),
}
OWNED = ("stalled after its head", "stalled after its role")
"""The engine has said 200: it has the handle, and frees it when the leg is closed."""


def tail(*pieces: bytes, then: str = "finish") -> Script:
    """The rest of a stream whose head has been sent."""

    async def script(reply: Reply) -> None:
        await reply.pieces(*pieces)
        await scripts.ending(reply, then)

    return script


async def _garbage(reply: Reply) -> None:
    await reply.raw(b"zzz this is no chunk\r\n")
    await reply.stall()


@pytest.mark.parametrize("broken", BEFORE_DATA)
async def test_another_decode_engine_with_a_fresh_prefill(broken: str) -> None:
    """A stream that fails before real data starts over elsewhere: a new handle, the first one given
    back or left to its owner.
    """
    clock = ManualClock()
    async with world(decode=2, deadlines={"first_token": 7}, clock=clock) as w:
        first, second = w.decode[1], w.decode[0]  # round robin begins behind the first
        first.script(BEFORE_DATA[broken])
        asked = asyncio.create_task(w.ask(CHAT, chat(stream=True)))
        if "stall" in broken and "event" not in broken:
            await first.asked()
            await clock.reach(7)
        answer = await asked
        assert (answer.status, answer.text) == (200, CHAT_TEXT)
        assert len(w.prefill[0].requests) == 2
        kvs = [engine.requests[0].kv or {} for engine in (first, second)]
        assert kvs[0]["remote_request_id"] != kvs[1]["remote_request_id"]
        await w.quiet()
        history = w.books.history[kvs[0]["remote_request_id"]]
        # A piece that the engine wrote counts as loaded in its books; giving back is then one too
        # many, but harmless.
        end = "aborted" if broken in OWNED else "released"
        assert history[-1] == ("loaded" if broken == OWNED[1] else end)
        w.books.history[kvs[0]["remote_request_id"]] = ["given", "released"]
        assert w.books.history[kvs[1]["remote_request_id"]] == ["given", "asked", "loaded"]
        assert w.metric("pdproxy_kv_handles_ended_total", end=end) == 1
        assert w.metric("pdproxy_kv_handles_ended_total", end="loaded") == 1
        assert w.metric("pdproxy_leg_failures_total", node=first.url, phase="decode") == 1
        expected = 1 if "stall" in broken and "event" not in broken else 0
        assert w.metric("pdproxy_deadline_total", wait="first_token") == expected


@pytest.mark.parametrize("broken", ["500", "reset", "eof", "garbage", "half"])
async def test_an_unstreamed_answer_is_tried_again_too(broken: str) -> None:
    """An unstreamed answer that fails is tried on another decode engine, with a fresh handle."""
    async with world(decode=2) as w:
        w.decode[1].script({**BEFORE_DATA, "half": scripts.half}[broken])
        answer = await w.ask(COMPLETIONS, completion())
        assert answer.status == 200
        await w.quiet()
        assert [event.end for event in w.events(HandleEnded)] == ["released", "loaded"]
        assert w.books.endings["loaded"] == 1


async def test_a_decode_engine_that_refuses_connections() -> None:
    """The handle never went out; it is given back through the other decode engine."""
    async with world(decode=2) as w:
        w.decode[1].refuse()
        answer = await w.ask(COMPLETIONS, completion(stream=True))
        assert answer.status == 200
        await w.quiet()
        assert w.books.endings == {"released": 1, "loaded": 1}
        assert len(w.decode[0].releases) == 1


async def test_one_decode_engine_that_fails_once_serves_alone_at_the_second_try() -> None:
    """With no other decode engine the one there is gets another chance, alone."""
    async with world() as w:
        w.decode[0].script(scripts.whole(answers.INTERNAL_500, 500))
        answer = await w.ask(COMPLETIONS, completion(stream=True))
        assert answer.status == 200
        assert w.decode[0].requests[1].kv is None
        await w.quiet()
        assert w.books.endings == {"released": 1}


@pytest.mark.parametrize(
    ("script", "status", "kind"),
    [
        (scripts.whole(answers.INTERNAL_500, 500), 500, "InternalServerError"),
        (scripts.reset, 502, "BadGatewayError"),
        (streams(ROLE, ERROR, answers.DONE), 500, "InternalServerError"),
        (streams(ROLE, then="eof"), 502, "BadGatewayError"),
        (streams(ROLE, then="stall"), 504, "GatewayTimeoutError"),
    ],
)
async def test_all_decode_engines_fail(script: Script, status: int, kind: str) -> None:
    """If none can, the client gets the last failure as an error status with an OpenAI body, never a
    200.
    """
    first_token = 0.1 if status == 504 else LONG
    async with world(decode=2, deadlines={"first_token": first_token}, leaves=True) as w:
        for engine in w.decode:
            engine.default = script
        answer = await w.ask(CHAT, chat(stream=True))
        assert answer.status == status
        assert answer.json["error"]["type"] == kind
        assert answer.json["error"]["code"] == status
        assert (await w.ended()).outcome == "engine"
        await w.quiet()


BAD_ENDS: dict[str, tuple[Script, str]] = {
    "eof": (tail(then="eof"), "closed the connection"),
    "reset": (tail(then="reset"), "closed the connection"),
    "finish without done": (tail(), "without its end mark"),
    "error event": (tail(ERROR, answers.DONE), "Internal server error"),
    "error event in pieces": (tail(ERROR[:9], ERROR[9:], answers.DONE), "Internal server error"),
    "error event behind data in one write": (
        tail(WORD + ERROR + answers.DONE),
        "Internal server error",
    ),
    "half an event, then the end": (tail(WORD[:-9]), "without its end mark"),
    "given up": (
        tail(answers.piece(False, "", finish="abort"), answers.DONE),
        "gave the answer up",
    ),
    "done before the choice has ended": (tail(answers.DONE), "before the answer's end"),
    "usage before the choice has ended": (
        tail(answers.usage_event(False, 9, 3), answers.DONE),
        "before the answer's end",
    ),
    "stall": (tail(then="stall"), "sent nothing for"),
    "stall in an event": (tail(WORD[:30], then="stall"), "sent nothing for"),
    "garbage": (_garbage, "sends no valid HTTP"),
}


@pytest.mark.parametrize("bad", BAD_ENDS)
async def test_a_stream_that_fails_after_data_ends_with_an_error_and_no_end_mark(bad: str) -> None:
    """The client keeps what came, then gets one OpenAI error event, and no [DONE]. Its connection
    takes the next request.
    """
    script, message = BAD_ENDS[bad]
    async with world(decode=2, deadlines={"between_tokens": 0.2 if "stall" in bad else LONG}) as w:
        seen = asyncio.Event()
        for engine in w.decode:
            engine.script(scripts.after_word(seen, script))
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=True))
        head = await client.head()
        assert await client.piece() == WORD
        seen.set()
        answer = await client.rest(head)
        assert answer.status == 200
        assert b"[DONE]" not in answer.body
        assert answer.body.startswith(WORD if "behind" in bad else b'data: {"error":')
        last = answer.events[-1]
        assert last.startswith(b'data: {"error":') or last == ERROR
        assert message in last.decode()
        assert len(answer.events) == (2 if "behind" in bad else 1)
        assert answer.ended
        assert sum(len(engine.requests) for engine in w.decode) == 1, (
            "not tried again: data had gone out"
        )
        assert (await w.ended()).outcome == "engine"
        assert w.metric("pdproxy_deadline_total", wait="between_tokens") == (
            1 if "stall" in bad else 0
        )
        (failed,) = w.events(LegFailed)
        (ledger_engine,) = [engine.url for engine in w.decode if engine.requests]
        assert (failed.node, failed.phase, failed.will_retry) == (ledger_engine, "decode", False)
        assert w.metric("pdproxy_leg_failures_total", node=ledger_engine, phase="decode") == 1
        await w.quiet()
        assert w.books.endings == {"loaded": 1}
        for engine in w.decode:
            engine.scripts.clear()
        client.post(COMPLETIONS, completion())
        assert (await client.answer()).text == TEXT


async def test_done_and_then_nothing() -> None:
    """After [DONE] the answer is whole for the client, whatever the engine's connection does."""
    async with world() as w:
        w.decode[0].script(
            streams(WORD, answers.end(), then="stall"), streams(WORD, answers.end(), then="reset")
        )
        for _ in range(2):
            answer = await w.ask(COMPLETIONS, completion(stream=True))
            assert answer.body == WORD + answers.end()
            assert answer.ended
        assert {report.outcome for report in [await w.ended(1), await w.ended(2)]} == {"ok"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_by_the_handler_has_given_the_handle_back(stream: bool) -> None:
    """D's own 400 passes through, and frees the KV by itself: nothing is released twice."""

    async def refuse(reply: Reply) -> None:
        reply.engine.books.note(reply.request.kv or {}, "refused")
        reply.engine.books.free(reply.request.kv or {})
        await reply.whole(answers.HANDLER_400, 400)

    async with world() as w:
        w.decode[0].script(refuse)
        answer = await w.ask(COMPLETIONS, completion(stream=stream))
        assert (answer.status, answer.body) == (400, answers.HANDLER_400)
        await w.quiet()
        assert w.books.endings == {"refused": 1}
        assert not w.decode[0].releases
        assert w.metric("pdproxy_kv_handles_ended_total", end="refused") == 1


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, answers.SCHEMA_400),
        (404, answers.MODEL_404),
        (404, answers.error("No such deployment", "NotFoundError", 404, "model")),
        (401, b'{"error":"Unauthorized"}'),
        (400, b'{"detail":"There was an error parsing the body"}'),
    ],
)
async def test_a_refusal_from_before_the_handler_gives_nothing_back(
    status: int, body: bytes
) -> None:
    """A schema error, an unknown model, in whose words ever, or a wrong key passes through, and the
    handle is given back by the proxy.
    """
    async with world() as w:
        w.decode[0].script(scripts.whole(body, status))
        answer = await w.ask(COMPLETIONS, completion())
        assert (answer.status, answer.body) == (status, body)
        await w.quiet()
        assert w.books.endings == {"released": 1}


async def test_a_release_is_tried_again_and_then_counted_as_lost() -> None:
    """A decode engine that cannot be told is asked again; then the handle is left to its lease, and
    that is counted.
    """
    async with world(deadlines={"release": 0.15}, leaves=True) as w:
        w.decode[0].script(scripts.whole(answers.SCHEMA_400, 400))
        w.decode[0].on_release = scripts.stall
        await w.ask(COMPLETIONS, completion())
        await w.quiet()
        assert len(w.decode[0].releases) == 3
        assert w.metric("pdproxy_kv_handles_ended_total", end="lost") == 1
        assert w.metric("pdproxy_deadline_total", wait="release") == 3


@pytest.mark.parametrize("status", [200, 401, 404, 500, 503])
async def test_only_the_handlers_own_refusal_gives_a_handle_back(status: int) -> None:
    """A release that is answered from before the handler, or by a failure, has released nothing: it
    is not counted so.
    """
    async with world(deadlines={"release": 0.1}, leaves=True) as w:
        w.decode[0].script(scripts.whole(answers.SCHEMA_400, 400))
        w.decode[0].on_release = scripts.whole(answers.INTERNAL_500, status)
        await w.ask(COMPLETIONS, completion())
        await w.quiet()
        assert [event.end for event in w.events(HandleEnded)] == ["lost"]


async def test_the_release_body() -> None:
    """Giving back: the handle verbatim, a tiny prompt, not streamed, max_tokens 0, a fresh id, the
    client's key.
    """
    async with world() as w:
        w.decode[0].script(scripts.whole(answers.SCHEMA_400, 400))
        await w.ask(CHAT, chat(), [("authorization", "Bearer k"), ("x-request-id", "mine")])
        await w.quiet()
        told = w.decode[0].releases[0]
        assert told.path == COMPLETIONS
        body = told.json
        assert body.pop("kv_transfer_params") == next(iter(w.books.params.values()))
        assert body == {"prompt": "x", "max_tokens": 0, "stream": False, "model": "tiny"}
        assert told.header("authorization") == "Bearer k"
        assert told.ident != "mine"


@pytest.mark.parametrize("engine", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_kept_connection_that_the_engine_had_closed(engine: int, stream: bool) -> None:
    """It may have read the request: the next attempt begins anew, with another handle. Nothing is
    held against the engine.
    """
    async with world() as w:
        await w.ask(COMPLETIONS, completion(stream=stream))
        await w.quiet()
        w.engines[engine].sim.faults.add("eof@queued")
        answer = await w.ask(COMPLETIONS, completion(stream=stream))
        assert answer.status == 200
        assert len(w.prefill[0].requests) == 3, (
            "the first request, the leg that failed or was for nothing, and the next one"
        )
        assert len(w.decode[0].requests) == 2 + (engine == 1)
        assert w.metric("pdproxy_leg_failures_total") == 1
        assert [
            one.in_ledger.failures for worker in w.workers for one in worker.engines.values()
        ] == [0] * 2 * len(w.workers)
        await w.quiet()
        assert w.books.endings == ({"loaded": 2} if engine == 0 else {"loaded": 2, "released": 1})


async def test_connections_are_kept_and_closed_as_the_engine_says() -> None:
    """Legs reuse a kept connection; one whose engine said `connection: close` is not used again."""
    async with world() as w:
        for _ in range(3):
            await w.ask(COMPLETIONS, completion(stream=True))
            await until(lambda: not w.busy())
        assert len({request.connection for request in w.decode[0].requests}) == 1
        assert len({request.connection for request in w.prefill[0].requests}) == 1

        async def close(reply: Reply) -> None:
            reply.engine.loaded(reply.request)
            await reply.whole(answers.whole(False, [1], "x", 1), headers=[("connection", "close")])

        w.decode[0].script(close)
        await w.ask(COMPLETIONS, completion())
        await w.ask(COMPLETIONS, completion())
        assert len({request.connection for request in w.decode[0].requests}) == 2
        assert w.metric("pdproxy_leg_failures_total") == 0
