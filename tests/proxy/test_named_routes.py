"""Responses and Messages on two engines: answers are one engine's, failures are honest in the API's
own form, and no KV stays behind.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pdproxy.kit.errors import (
    BadRequestError,
    BodyTooLargeError,
    EngineError,
    ForbiddenError,
    OverloadedError,
    PdproxyError,
    RefusalReason,
    UnauthorizedError,
)
from pdproxy.observe.events import ServedAlone
from pdproxy.wire.api_errors import Dialect, failure_body, failure_event
from tests.fakes import scripts
from tests.fakes.client import exchange, request
from tests.fakes.clock import ManualClock
from tests.fakes.engine import Reply, Script
from tests.fakes.named import body
from tests.fakes.passed import MESSAGES, RESPONSES, shape
from tests.fakes.scripts import streams
from tests.fakes.world import LONG, World, world

ROUTES = pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
STREAM = pytest.mark.parametrize("stream", [False, True])
PREAMBLE = (
    b'event: response.created\ndata: {"sequence_number":0,"type":"response.created"}\n\n',
    b'event: response.in_progress\ndata: {"sequence_number":1,"type":"response.in_progress"}\n\n',
)
ERROR = b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"x"}}\n\n'
GIVEN_UP = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":null}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)


def delta(path: str, number: int = 2) -> bytes:
    """An event with a token."""
    if path == MESSAGES:
        text = b'{"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}'
        return b"event: content_block_delta\ndata: " + text + b"\n\n"
    return (
        b'event: response.output_text.delta\ndata: {"delta":"a","sequence_number":%d}\n\n' % number
    )


def opening(path: str) -> list[bytes]:
    """The events before the first token."""
    if path == RESPONSES:
        added = ("response.output_item.added", "response.content_part.added")
        return [*PREAMBLE, *(_named(name, number) for number, name in enumerate(added, 2))]
    return [_named("message_start", 0), _named("content_block_start", 1)]


def _named(name: str, number: int) -> bytes:
    return f'event: {name}\ndata: {{"sequence_number":{number}}}\n\n'.encode()


def alone(w: World) -> list[str]:
    """Why prompts were served alone."""
    return [event.reason for event in w.events(ServedAlone)]


@STREAM
@ROUTES
async def test_split_as_by_one_engine(path: str, stream: bool) -> None:
    """The prefill engine makes one token, the decode engine loads the KV, and the answer is one
    engine's.
    """
    asked = body(path, stream=stream)
    async with world() as w:
        answer = await w.ask(path, asked)
        direct = await exchange(w.decode[0].port, request("POST", path, asked))
        assert (answer.status, answer.ended) == (200, True)
        ours, plain = (
            [shape(event) for event in (one.events if stream else [one.body])]
            for one in (answer, direct)
        )
        assert ours == plain
        (made,), (loaded, _) = w.prefill[0].requests, w.decode[0].requests
        assert {made.path, loaded.path} == {path}
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        assert (made.json[limit], made.json["stream"]) == (1, False)
        assert (loaded.json[limit], loaded.json["stream"]) == (4, stream)
        assert loaded.kv is not None
        assert ("prompt_token_ids" in loaded.kv) == (path == RESPONSES), "both work on one prompt"
        assert all(one.json.get("store") is False for one in (made, loaded) if path == RESPONSES)
        await w.quiet()
        (history,) = w.books.history.values()
        assert history == ["given", "asked", "loaded"]
        assert not alone(w)
        used = await w.ended()
        assert (used.endpoint, used.completion_tokens) == (path, 4)
        assert (used.legs[0].prefill, used.legs[0].decode) == (w.prefill[0].url, w.decode[0].url)


BEFORE_DATA: dict[str, Script] = {
    "500": scripts.whole(b"{}", 500),
    "reset": scripts.reset,
    "eof": scripts.eof,
    "headers, then eof": streams(then="eof"),
    "an empty stream": streams(),
    "preamble, then eof": streams(*PREAMBLE, then="eof"),
    "preamble, then the end": streams(*PREAMBLE),
    "preamble, then an error": streams(*PREAMBLE, ERROR),
    "error": streams(ERROR),
    "failed": streams(*PREAMBLE, b"event: response.failed\ndata: {}\n\n"),
    "comment, then eof": streams(b": ping\n\n", then="eof"),
    "half an event": streams(delta(RESPONSES)[:-9], then="eof"),
    "ping, then eof": streams(b'event: ping\ndata: {"type":"ping"}\n\n', then="eof"),
    "openings, then eof": streams(*opening(RESPONSES), *opening(MESSAGES), then="eof"),
    "openings, then an error": streams(*opening(RESPONSES), *opening(MESSAGES), ERROR),
    "given up": streams(_named("message_start", 0), GIVEN_UP),
    "lines that only clients find": streams(delta(RESPONSES).replace(b"{", b"\r{")),
    "stalled": streams(*PREAMBLE, then="stall"),
}


@ROUTES
@pytest.mark.parametrize("how", BEFORE_DATA)
async def test_another_decode_engine_with_a_fresh_prefill(path: str, how: str) -> None:
    """What is sent before the engine has begun to work proves nothing: the stream starts over, and
    the client sees none of it.
    """
    clock = ManualClock()
    async with world(decode=2, deadlines={"first_token": 7}, clock=clock) as w:
        first = w.decode[1]
        first.script(BEFORE_DATA[how])
        asking = asyncio.create_task(w.ask(path, body(path, stream=True)))
        if how == "stalled":
            await first.asked()
            await clock.reach(7)
        answer = await asking
        assert (answer.status, answer.ended) == (200, True)
        assert b"error" not in answer.body
        assert answer.body.count(b"event: response.created\n") == (path == RESPONSES)
        assert len(w.prefill[0].requests) == 2
        assert w.metric("pdproxy_leg_failures_total", node=first.url, phase="decode") == 1
        await w.quiet()
        assert not alone(w)


@ROUTES
@pytest.mark.parametrize("how", ["500", "eof", "not an answer"])
async def test_a_whole_answer_that_fails(path: str, how: str) -> None:
    """The same of an answer that is not streamed."""
    fails = {**BEFORE_DATA, "not an answer": scripts.whole(b'{"object":"list","data":[]}')}[how]
    async with world(decode=2) as w:
        w.decode[1].script(fails)
        answer = await w.ask(path, body(path))
        assert (answer.status, answer.json["usage"]["output_tokens"]) == (200, 4)
        assert len(w.prefill[0].requests) == 2
        await w.quiet()


@ROUTES
@pytest.mark.parametrize(
    "then", ["eof", "reset", "finish", "stall", "error", "given up", "other lines"]
)
@pytest.mark.parametrize("part", [b"", b"event: response.outp"])
async def test_a_stream_that_fails_ends_with_an_error_of_the_api(
    path: str, then: str, part: bytes
) -> None:
    """No other engine can go on with it. The client gets whole events and one error event, whose
    number follows the others.
    """
    events = [*opening(path), delta(path, 4), delta(path, 5)]
    wrong = {
        "error": ERROR,
        "given up": GIVEN_UP if path == MESSAGES else ERROR,
        "other lines": delta(path)[:-2] + b"\r\rdata: {}\n\n",
    }
    last = wrong.get(then, part)

    async def script(reply: Reply) -> None:
        await reply.start()
        await reply.pieces(*events)
        await w.flowing(w.decode[1])
        if last:
            await reply.piece(last)
        await scripts.ending(reply, then if then in ("eof", "reset", "stall") else "finish")

    async with world(decode=2, deadlines={"between_tokens": 0.3 if then == "stall" else LONG}) as w:
        w.decode[1].script(script)
        answer = await w.ask(path, body(path, stream=True))
        assert (answer.status, answer.ended, answer.events[:-1]) == (200, True, events)
        name, data = answer.events[-1].removesuffix(b"\n\n").split(b"\n")
        assert name == b"event: error"
        said = json.loads(data.removeprefix(b"data: "))
        assert said["type"] == "error"
        if path == RESPONSES:
            assert (said["sequence_number"], bool(said["message"])) == (6, True)
        else:
            assert set(said["error"]) == {"type", "message"}
        assert b"http" not in answer.events[-1], "where engines are is not for clients"
        assert w.metric("pdproxy_continuations_total", result="refused", reason="route") == 1
        ended = await w.ended()
        assert (ended.outcome, w.decode[0].requests) == ("engine", [])
        assert ended.completion_tokens == 2, "events before the first token are none"
        await w.quiet()


@ROUTES
@STREAM
@pytest.mark.parametrize("how", ["500", "eof", "garbage"])
async def test_a_prefill_that_fails(path: str, how: str, stream: bool) -> None:
    """Another prefill engine is asked."""
    fails = {"garbage": scripts.whole(b'{"fine":true}')}.get(how) or BEFORE_DATA[how]
    async with world(prefill=2) as w:
        w.prefill[1].script(fails)
        answer = await w.ask(path, body(path, stream=stream))
        assert (answer.status, answer.ended) == (200, True)
        assert len(w.prefill[0].requests) == 1
        assert w.decode[0].requests[-1].kv is not None
        await w.quiet()


@ROUTES
@STREAM
async def test_a_client_that_leaves(path: str, stream: bool) -> None:
    """While the decode engine works: it is told, and no KV stays."""
    begun = asyncio.Event()

    async def script(reply: Reply) -> None:
        begun.set()
        if stream:
            await reply.start()
            await reply.pieces(*opening(path), delta(path, 4))
        await reply.stall()

    async with world() as w:
        w.decode[0].script(script)
        client = await w.client()
        client.post(path, body(path, stream=stream))
        await begun.wait()
        leg = await w.decode[0].asked()
        if stream:
            await w.flowing(w.decode[0])
        client.close()
        await asyncio.wait_for(leg.left.wait(), LONG)
        assert (await w.ended()).outcome == "client_left"
        await w.quiet()


NOT_SPLIT: dict[str, tuple[str, dict[str, Any]]] = {
    "background": (RESPONSES, {"background": "off"}),
    "stored": (RESPONSES, {"previous_response_id": "resp_1"}),
    "another number": (RESPONSES, {"max_output_tokens": "4"}),
    "none": (RESPONSES, {"max_output_tokens": 0}),
    "an item of its own": (RESPONSES, {"input": [{"type": "item_reference", "id": "a"}]}),
    "no limit": (MESSAGES, {"max_tokens": None}),
    "no messages": (MESSAGES, {"messages": []}),
    "a budget of all": (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 4}}),
}
REASONS: dict[str, tuple[str, dict[str, Any]]] = {
    "built_in_tools": (RESPONSES, {"tools": [{"type": "code_interpreter", "container": "c"}]}),
    "echo": (RESPONSES, {"enable_response_messages": True}),
    "prompt_ids": (MESSAGES, {"kv_transfer_params": {"prompt_token_ids": [7] * 40}}),
    "non_text": (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"data": "x"}}]}]},
    ),
}


@pytest.mark.parametrize(
    ("reason", "path", "fields"),
    [
        *(("unusual", *one) for one in NOT_SPLIT.values()),
        *((reason, *one) for reason, one in REASONS.items()),
    ],
)
async def test_what_goes_whole_to_one_engine(
    reason: str, path: str, fields: dict[str, Any]
) -> None:
    """One engine gets it on its route and answers, or refuses, in its own words; the reason is
    counted.
    """
    asked = body(path, **fields)
    async with world() as w:
        answer = await w.ask(path, asked)
        direct = await exchange(w.decode[0].port, request("POST", path, asked))
        assert (answer.status, shape(answer.body)) == (direct.status, shape(direct.body))
        assert (alone(w), w.prefill[0].requests) == ([reason], [])


async def test_a_refusal_in_a_stream_gets_a_status() -> None:
    """Where the engine names a refusal as such: nothing was sent before, and no other engine is
    asked.
    """
    event = ERROR.replace(b"internal_error", b"invalid_request_error")
    async with world(decode=2) as w:
        w.decode[1].script(streams(event))
        answer = await w.ask(MESSAGES, body(MESSAGES, stream=True))
        assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
        assert w.decode[0].requests == []
        await w.quiet()


@ROUTES
@STREAM
async def test_a_refusal_has_the_engines_own_words(path: str, stream: bool) -> None:
    """Whatever an engine said to a leg, the client gets what one says to its own body; and no KV
    stays.
    """
    asked = body(path, stream=stream, temperature=-1)
    async with world() as w:
        answer = await w.ask(path, asked)
        direct = await exchange(w.decode[0].port, request("POST", path, asked))
        assert (answer.status, answer.json) == (direct.status, direct.json)
        assert answer.status == 400
        await w.quiet()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UnauthorizedError("x", code=None), "authentication_error"),
        (ForbiddenError("x"), "permission_error"),
        (BodyTooLargeError("x"), "request_too_large"),
        (OverloadedError("x", RefusalReason.DRAINING), "overloaded_error"),
        (EngineError("x"), "api_error"),
        (BadRequestError("x"), "invalid_request_error"),
    ],
)
def test_errors_of_messages_are_named_by_their_status(error: PdproxyError, kind: str) -> None:
    """As Anthropic's clients know them, before a stream and in it."""
    before = json.loads(failure_body(Dialect.MESSAGES, error))
    behind = json.loads(failure_event(Dialect.MESSAGES, error, 0).split(b"data: ")[1])
    for said in (before, behind):
        assert (said["type"], said["error"]["type"]) == ("error", kind)
