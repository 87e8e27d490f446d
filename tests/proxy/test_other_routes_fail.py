"""The routes that one engine serves whole, where an engine fails or the client leaves."""

from __future__ import annotations

import asyncio
import json

import pytest

from pdproxy_lab.sim.journal import Request
from tests.fakes.client import request
from tests.fakes.clock import ManualClock
from tests.fakes.engine import Reply
from tests.fakes.passed import (
    BODIES,
    MESSAGES,
    RESPONSES,
    STREAMED,
    everyone,
    message,
    responses,
)
from tests.fakes.world import LONG, until, world

# -- failures


def preamble(path: str) -> list[bytes]:
    """The events that begin a stream."""
    if path == RESPONSES:
        return [
            b'event: response.created\ndata: {"sequence_number":0,"type":"response.created"}\n\n',
            (
                b"event: response.in_progress\ndata: "
                b'{"sequence_number":1,"type":"response.in_progress"}\n\n'
            ),
        ]
    return []


def delta(path: str) -> bytes:
    """An event with text."""
    if path == RESPONSES:
        return b'event: response.output_text.delta\ndata: {"delta":"a","sequence_number":2}\n\n'
    return b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n'


@pytest.mark.parametrize("path", STREAMED)
@pytest.mark.parametrize("then", ["eof", "reset", "finish", "stall"])
@pytest.mark.parametrize("part", [b"", b"event: response.outp", b'event: x\ndata: {"ha'])
async def test_an_engine_that_dies_in_a_stream(path: str, then: str, part: bytes) -> None:
    """The client gets whole events, then one error event of the protocol, and the end of the
    answer: never silence.
    """

    async def script(reply: Reply) -> None:
        await reply.start()
        await reply.pieces(*preamble(path), delta(path), *([part] if part else []))
        match then:
            case "eof":
                reply.eof()
            case "reset":
                reply.reset()
            case "finish":
                await reply.finish()
            case "stall":
                await reply.stall()

    async with world(deadlines={"between_tokens": 0.3 if then == "stall" else LONG}) as w:
        seen = everyone(w, path, script)
        answer = await w.ask(path, {**BODIES[path], "stream": True})
        assert (answer.status, answer.ended, len(seen)) == (200, True, 1)
        *before, last = answer.events
        assert before == [*preamble(path), delta(path)]
        name, data = last.removesuffix(b"\n\n").split(b"\n")
        assert name == b"event: error"
        said = json.loads(data.removeprefix(b"data: "))
        assert said["type"] == "error"
        if path == RESPONSES:
            assert said["sequence_number"] == 3
            assert said["message"]
        else:
            assert said["error"]["message"]
        assert b"http" not in last, "where engines are is not for clients"
        assert (await w.ended()).outcome == "engine"
        assert w.metric("pdproxy_deadline_total", wait="between_tokens") == (then == "stall")
        await until(lambda: w.proxy.ledger.engines[1].failures == 1)


@pytest.mark.parametrize("path", STREAMED)
@pytest.mark.parametrize("then", ["eof", "reset", "stall"])
async def test_before_the_model_has_shown_life_another_engine_is_asked(
    path: str, then: str
) -> None:
    """What an engine sends before its model has begun is held back, so that a failure there costs
    the client nothing.
    """

    async def script(reply: Reply) -> None:
        await reply.start()
        await reply.pieces(*preamble(path))
        await {"eof": _eof, "reset": _reset, "stall": Reply.stall}[then](reply)

    clock = ManualClock()
    async with world(decode=2, deadlines={"first_token": 7}, clock=clock) as w:
        first: list[Request] = []

        async def once(reply: Reply) -> None:
            if first:
                await reply.serve()
            else:
                first.append(reply.request)
                await script(reply)

        everyone(w, path, once)
        asked = asyncio.create_task(w.ask(path, {**BODIES[path], "stream": True}))
        if then == "stall":
            await until(lambda: first)
            await clock.reach(7)
        answer = await asked
        assert answer.status == 200
        assert b"error" not in answer.body
        assert answer.body.count(b"event: response.created\n") == (path == RESPONSES)
        ended = await w.ended()
        assert (ended.outcome, ended.legs[0].attempts) == ("ok", 2)
        assert w.metric("pdproxy_deadline_total", wait="first_token") == (then == "stall")


async def _eof(reply: Reply) -> None:
    reply.eof()


async def _reset(reply: Reply) -> None:
    reply.reset()


@pytest.mark.parametrize("how", ["eof", "reset", "500", "503", "429", "half"])
async def test_an_engine_that_fails_is_not_the_last(how: str) -> None:
    """Before an answer is whole another engine is asked; the client sees nothing of it."""
    failed: list[Request] = []

    async def script(reply: Reply) -> None:
        if failed:
            await reply.whole(b'{"tokens":[1]}')
            return
        failed.append(reply.request)
        match how:
            case "eof":
                reply.eof()
            case "reset":
                reply.reset()
            case "half":
                await reply.raw(
                    b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\ncontent-type: application/json\r\n"
                    b"\r\n{"
                )
                reply.eof()
            case _:
                await reply.whole(
                    b'{"error":{"message":"m","type":"t","param":null,"code":1}}', int(how)
                )

    async with world(decode=2) as w:
        everyone(w, "/tokenize", script)
        answer = await w.ask("/tokenize", {"model": "tiny", "prompt": "x"})
        assert (answer.status, answer.json) == (200, {"tokens": [1]})
        assert (await w.ended()).legs[0].attempts == 2


async def test_an_engine_that_is_not_there() -> None:
    """A refused connection shuts the engine out until a probe succeeds, and another is asked."""
    async with world(decode=2) as w:
        w.decode[0].refuse()
        for _ in range(2):
            assert (await w.ask("/tokenize", {"model": "tiny", "prompt": "x"})).status == 200
        assert [engine.up for engine in w.proxy.ledger.engines] == [True, False, True]
        await w.decode[0].listen()


@pytest.mark.parametrize("path", ["/tokenize", RESPONSES, MESSAGES])
async def test_the_breaker_hears_of_failures(path: str) -> None:
    """An engine's last error body goes to the client as it is, and its failures are counted."""
    own = b'{"error":{"message":"broken","type":"InternalServerError","param":null,"code":500}}'

    async def script(reply: Reply) -> None:
        await reply.whole(own, 500)

    async with world(limits={"breaker_failures": 2, "attempts": 2}) as w:
        everyone(w, path, script)
        answer = await w.ask(path, {"model": "tiny"})
        assert (answer.status, answer.body) == (500, own)
        await until(lambda: w.proxy.ledger.engines[1].failures == 2)
        assert not w.proxy.ledger.engines[1].usable(w.proxy.service.resources.now())


async def test_what_a_model_cannot_do_is_no_failure() -> None:
    """vLLM's 501 goes to the client at once and does not count against the engine."""

    async def script(reply: Reply) -> None:
        await reply.whole(
            b'{"error":{"message":"no","type":"NotImplementedError","param":null,"code":501}}', 501
        )

    async with world() as w:
        seen = everyone(w, "/v1/embeddings", script)
        assert (await w.ask("/v1/embeddings", {"model": "tiny", "input": "x"})).status == 501
        assert (len(seen), w.proxy.ledger.engines[1].failures) == (1, 0)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/classify", "/score", "/v1/rerank"])
async def test_routes_that_an_engine_lacks(path: str) -> None:
    """A generative engine's own 404 comes back."""
    async with world() as w:
        answer = await w.ask(path, {"model": "tiny", "input": "x"})
        assert (answer.status, answer.json) == (404, {"detail": "Not Found"})


async def test_no_engine_at_all() -> None:
    """503 in the protocol's own shape."""
    async with world() as w:
        w.decode[0].stop()
        answer = await w.ask(MESSAGES, message())
        assert answer.status == 503
        assert answer.json["type"] == "error"
        assert set(answer.json["error"]) == {"type", "message"}
        assert "127.0.0.1" not in answer.body.decode()
        again = await w.ask(RESPONSES, responses())
        assert (again.status, again.json["error"]["code"]) == (503, 503)
        await w.decode[0].listen()


@pytest.mark.parametrize(
    ("path", "deadline", "wait"),
    [("/tokenize", "first_token", "first_token"), ("/v1/embeddings", "total", "total")],
)
async def test_an_engine_that_never_answers(path: str, deadline: str, wait: str) -> None:
    """Quick questions have a deadline of their own; what takes as long as the model needs has the
    total one.
    """

    async def script(reply: Reply) -> None:
        await reply.stall()

    async with world(deadlines={deadline: 0.2}, limits={"attempts": 1}) as w:
        everyone(w, path, script)
        assert (await w.ask(path, {"model": "tiny"})).status == 504
        assert w.metric("pdproxy_deadline_total", wait=wait) == 1


async def test_an_engine_that_probes_have_lost() -> None:
    """An engine that was asked and then went down for `between_tokens` is given up, long before the
    total deadline.
    """

    async def script(reply: Reply) -> None:
        await reply.stall()

    async with world(deadlines={"between_tokens": 0.2}, limits={"attempts": 1}) as w:
        seen = everyone(w, "/v1/embeddings", script)
        asking = asyncio.ensure_future(w.ask("/v1/embeddings", {"model": "tiny"}))
        await until(lambda: seen)
        w.mark_down(w.decode[0], "gone", w.proxy.now())
        assert (await asking).status == 504


# -- clients that leave


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_leg(stream: bool) -> None:
    """The engine's connection closes, so that it stops to work; the lease and the place end."""
    left = asyncio.Event()

    async def script(reply: Reply) -> None:
        try:
            if stream:
                await reply.start()
                await reply.pieces(*preamble(RESPONSES), delta(RESPONSES))
            await reply.stall()
        finally:
            left.set()

    async with world() as w:
        seen = everyone(w, RESPONSES, script)
        client = await w.client()
        client.send(request("POST", RESPONSES, responses(stream=stream)))
        await until(lambda: seen)
        if stream:
            assert (await client.head()).status == 200
        client.close()
        await asyncio.wait_for(left.wait(), LONG)
        ended = await w.ended()
        assert ended.outcome == "client_left"
        await w.quiet()
        await until(lambda: w.proxy.ledger.engines[1].failures == 0)


async def test_a_client_that_leaves_with_a_request_behind_ends_the_leg() -> None:
    """Also where another request is in the pipeline: uvicorn would notify only that one."""
    left = asyncio.Event()

    async def script(reply: Reply) -> None:
        try:
            await reply.stall()
        finally:
            left.set()

    async with world() as w:
        seen = everyone(w, "/v1/embeddings", script)
        client = await w.client()
        asked = {"model": "tiny", "input": "x"}
        client.send(request("POST", "/v1/embeddings", asked) + request("GET", "/health", b""))
        await until(lambda: seen)
        client.close()
        await asyncio.wait_for(left.wait(), LONG)
        assert (await w.ended()).outcome == "client_left"
        await w.quiet()


async def test_a_client_that_does_not_read() -> None:
    """It is dropped after `deadlines.client_write`, and the engine with it."""

    async def script(reply: Reply) -> None:
        await reply.start()
        while True:
            await reply.piece(b"event: content_block_delta\ndata: {}" + b" " * 60_000 + b"\n\n")
            await asyncio.sleep(0)  # what is written to a lost connection waits for nothing

    async with world(deadlines={"client_write": 0.2}) as w:
        everyone(w, MESSAGES, script)
        client = await w.client(receive_buffer=4096)
        client.send(request("POST", MESSAGES, message(stream=True)))
        assert (await w.ended()).outcome == "client_left"
        assert w.metric("pdproxy_deadline_total", wait="client_write") == 1


async def test_a_shutdown_ends_what_is_left() -> None:
    """A request that outlives the drain gets an error event of its protocol."""

    async def script(reply: Reply) -> None:
        await reply.start()
        await reply.piece(delta(MESSAGES))
        await reply.stall()

    async with world(deadlines={"drain": 0.1}) as w:
        everyone(w, MESSAGES, script)
        client = await w.client()
        client.send(request("POST", MESSAGES, message(stream=True)))
        await client.head()
        await w.drain()
        assert (await w.ended()).outcome == "capacity"
