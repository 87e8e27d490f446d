"""Engines that send without end, or much more than was asked for: bounded, refused with the bound's
name, and nothing is left.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdproxy.observe.events import HandleEnded, LegFailed
from pdproxy.upstream.admin import MAX_MODELS
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.upstream.metrics_page import MAX_SAMPLES
from tests.fakes import answers, scripts
from tests.fakes.client import bearer, request
from tests.fakes.engine import Reply, Script
from tests.fakes.passed import RESPONSES, everyone, responses
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

MIB = 1 << 20
LIMITS = {"max_answer_bytes": MIB, "max_buffered_answer_bytes": 4 * MIB}
ENOUGH = 64 * MIB
"""An engine that was not stopped by then would go on for ever."""
LET_THROUGH = 24 * MIB
"""More than the bound, what is read behind it, and what sockets take."""

OK = b"HTTP/1.1 200 OK\r\n"
JSON = OK + b"content-type: application/json\r\n"
CHUNKED = JSON + b"transfer-encoding: chunked\r\n\r\n"
STREAM = OK + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def framed(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


class Endless:
    """A script that begins an answer and goes on with the same piece. `sent` are the bytes that it
    could send.
    """

    def __init__(self, begin: bytes, piece: bytes) -> None:
        self.begin = begin
        self.piece = piece * (65_536 // len(piece) or 1)
        self.sent = 0

    async def __call__(self, reply: Reply) -> None:
        await reply.raw(self.begin)
        while self.sent < ENOUGH:
            await reply.raw(self.piece)
            self.sent += len(self.piece)
            await asyncio.sleep(0)  # what is written to a client that has left is taken at once
        await reply.stall()


WHOLE = {
    "an answer that says it is too large": (JSON + b"content-length: 1073741824\r\n\r\n", b"x"),
    "an answer in chunks": (CHUNKED, framed(b"x" * 8192)),
    "an answer that the end of the connection would end": (JSON + b"\r\n", b"x"),
    "an error": (b"HTTP/1.1 500 X\r\ntransfer-encoding: chunked\r\n\r\n", framed(b"x" * 8192)),
    "a header": (OK + b"x: ", b"y"),
    "a status line": (b"HTTP/1.1 200 ", b"y"),
    "headers": (OK, b"a: b\r\n"),
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "an extension of a chunk": (CHUNKED + b"5;", b"e"),
    "trailers": (CHUNKED + framed(b"{}") + b"0\r\n", b"a: b\r\n"),
}
STREAMED = {
    **{name: WHOLE[name] for name in ("a header", "headers", "interim answers")},
    "an event": (STREAM, framed(b"x" * 8192)),
    "an event in small chunks": (STREAM, framed(b"x" * 20)),
    "openings of a chat": (STREAM, framed(answers.role())),
    "comments": (STREAM, framed(b": ping\n\n" * 100)),
    "empty events": (STREAM, framed(b"\n\n" * 1000)),
    "lines of an event": (STREAM, framed(b"data: x\n" * 1000)),
    "an extension of a chunk": (STREAM + b"5;", b"e"),
}
AS_ASKED = {
    "an answer that says it is too large",
    "an answer in chunks",
    "an answer that the end of the connection would end",
    "an error",
    "an event",
    "an event in small chunks",
    "openings of a chat",
    "lines of an event",
}
"""What its request may have asked for: bytes of bodies. Heads, and what holds nothing, are the
engine's doing.
"""


def room(w: World) -> AnswerBudget:
    """The room of the proxy's engines."""
    return w.proxy.service.resources.answer_budget


@asynccontextmanager
async def bounded(prefill: int = 1, decode: int = 1, **more: Any) -> AsyncIterator[World]:
    """A world with low bounds, in which no answer is held at the end."""
    async with world(prefill, decode, limits=LIMITS, **more) as w:
        yield w
        await w.quiet()
        await until(lambda: room(w).held == 0)


@pytest.mark.parametrize("name", sorted(WHOLE.keys() - AS_ASKED))
async def test_an_answer_without_end_is_tried_elsewhere(name: str) -> None:
    """Past the bound the leg is closed; another decode engine answers, with a handle of its own."""
    async with bounded(decode=2) as w:
        first, script = w.decode[1], Endless(*WHOLE[name])
        first.script(script)
        answer = await w.ask(COMPLETIONS, completion())
        assert (answer.status, answer.text) == (200, TEXT)
        assert script.sent < LET_THROUGH
        assert w.proxy.ledger.engines[2].failures == 1, "the breaker counts it"
        assert [failed.node for failed in w.events(LegFailed)] == [first.url]
        await w.quiet()
        assert [event.end for event in w.events(HandleEnded)] == ["released", "loaded"]
        w.books.history.clear()
        w._recorder.events.clear()


@pytest.mark.parametrize("name", sorted(AS_ASKED))
async def test_an_answer_that_is_too_large_is_not_tried_elsewhere(name: str) -> None:
    """Every engine would answer so. The client learns the bound; nothing is held against the
    engine, or the way of the KV.
    """
    begin, piece = {**WHOLE, **STREAMED}[name]
    async with bounded(prefill=2, decode=2, leaves=True) as w:
        scripts_ = [Endless(begin, piece) for _ in w.decode]
        for engine, script in zip(w.decode, scripts_, strict=True):
            engine.default = script
        for _ in range(3):
            answer = await w.ask(CHAT, chat(stream=name in STREAMED))
            assert (answer.status, answer.json["error"]["type"]) == (502, "BadGatewayError")
            assert "of more than" in answer.json["error"]["message"]
            assert "127.0.0.1" not in answer.json["error"]["message"]
        assert sum(len(engine.requests) for engine in w.decode) == 3
        assert max(script.sent for script in scripts_) < 3 * LET_THROUGH
        assert not any(ledger_engine.failures for ledger_engine in w.proxy.ledger.engines)
        assert not w.proxy.ledger.transfers.suspects
        assert not w.events(LegFailed)


@pytest.mark.parametrize("name", sorted(STREAMED.keys() - AS_ASKED))
async def test_a_stream_without_data_is_tried_elsewhere(name: str) -> None:
    """The same before a stream's first data: nothing of it has reached the client."""
    async with bounded(decode=2) as w:
        script = Endless(*STREAMED[name])
        w.decode[1].script(script)
        answer = await w.ask(CHAT, chat(stream=True))
        assert (answer.status, answer.text) == (200, CHAT_TEXT)
        assert script.sent < LET_THROUGH
        assert w.metric("pdproxy_deadline_total", wait="first_token") == 0
        assert w.proxy.ledger.engines[2].failures == 1
        await w.quiet()
        w.books.history.clear()
        w._recorder.events.clear()


@pytest.mark.parametrize(
    ("begin", "piece", "said"),
    [
        (
            *WHOLE["an answer that says it is too large"],
            "an answer of more than 1048576 bytes (limits.max_answer_bytes)",
        ),
        (
            *WHOLE["an answer in chunks"],
            "an answer of more than 1048576 bytes (limits.max_answer_bytes)",
        ),
        (*WHOLE["a header"], "more than 65536 bytes that are not body"),
        (*WHOLE["headers"], "sent more than 65536 bytes"),
    ],
)
async def test_where_all_engines_do_so_the_client_learns_the_bound(
    begin: bytes, piece: bytes, said: str
) -> None:
    """502, what was too large, and the bound; no engine's address."""
    async with bounded(leaves=True) as w:
        w.decode[0].default = Endless(begin, piece)
        answer = await w.ask(COMPLETIONS, completion())
        assert (answer.status, answer.json["error"]["type"]) == (502, "BadGatewayError")
        assert said in answer.json["error"]["message"]
        assert "127.0.0.1" not in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("piece", "failures"), [(b"x" * 8192, 0), (b":\n\n" * 1000, 1), (b"data:x\n\n" * 1000, 1)]
)
async def test_a_stream_that_goes_wrong_behind_its_data(piece: bytes, failures: int) -> None:
    """An event without end, or many that hold nothing, behind data: an error event, and the leg is
    closed.
    """
    async with bounded() as w:
        seen, script = asyncio.Event(), Endless(b"", framed(piece))

        async def data_first(reply: Reply) -> None:
            await reply.start()
            await reply.piece(scripts.WORD)
            await seen.wait()
            await script(reply)

        w.decode[0].script(data_first)
        client = await w.client()
        client.send(request("POST", COMPLETIONS, completion(stream=True)))
        head = await client.head()
        assert await client.piece() == scripts.WORD
        seen.set()
        answer = await client.rest(head)
        assert b'{"error":{"message":"the engine sent' in answer.body[-300:]
        assert script.sent < LET_THROUGH
        assert w.proxy.ledger.engines[1].failures == failures


PREFILLS = {
    **WHOLE,
    "ids that are not this prompt's": (
        JSON + b"content-length: 700000\r\n\r\n" + b'{"choices":[],"prompt_token_ids":[1',
        b",1" * 1000,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PREFILLS)
async def test_a_prefill_without_end(name: str) -> None:
    """A prefill's answer may have some bytes for each byte of its prompt: the next engine's handle
    is used.
    """
    async with bounded(prefill=2) as w:
        script = Endless(*PREFILLS[name])
        w.prefill[1].script(script)
        answer = await w.ask(COMPLETIONS, completion())
        assert (answer.status, answer.text) == (200, TEXT)
        assert script.sent < LET_THROUGH
        assert w.proxy.ledger.engines[1].failures == 1
        await w.quiet()
        assert w.books.endings == {"loaded": 1}


async def test_a_release_without_end() -> None:
    """Who answers a release with a gigabyte has not given the KV back: it is told again, and the
    handle counts as lost.
    """
    async with bounded(leaves=True, deadlines={"release": 0.3}) as w:
        script = Endless(*WHOLE["an answer in chunks"])
        w.decode[0].script(scripts.whole(answers.INTERNAL_500, 500))
        w.decode[0].on_release = script
        answer = await w.ask(COMPLETIONS, completion())
        assert answer.status == 200
        await w.quiet()
        assert script.sent < 3 * LET_THROUGH
        assert [event.end for event in w.events(HandleEnded)] == ["lost"]


async def test_many_answers_share_one_room() -> None:
    """What finds no room is given up with 503; its engine is not blamed for that, and later answers
    are served.
    """
    async with bounded(leaves=True) as w:
        go = asyncio.Event()

        async def large(reply: Reply) -> None:
            await reply.raw(JSON + b"content-length: 1000000\r\n\r\n" + b" " * 900_000)
            await go.wait()
            body = answers.whole(False, [1] * 20, "x", 1)
            await reply.raw(b" " * (100_000 - len(body)) + body)

        w.decode[0].default = large
        asked = [asyncio.ensure_future(w.ask(COMPLETIONS, completion())) for _ in range(4)]
        await until(lambda: room(w).held >= 3_600_000)
        answer = await w.ask(COMPLETIONS, completion())
        assert answer.status == 503
        assert "limits.max_buffered_answer_bytes" in answer.json["error"]["message"]
        assert w.proxy.ledger.engines[1].failures == 0
        go.set()
        assert {one.status for one in await asyncio.gather(*asked)} == {200}
        assert (await w.ask(COMPLETIONS, completion())).status == 200


async def test_a_list_of_prompts_has_one_answer() -> None:
    """Answers that are small enough by themselves are too large together."""
    async with bounded(leaves=True) as w:
        w.decode[0].default = scripts.whole(answers.whole(False, [1] * 20, "x" * 600_000, 1))
        answer = await w.ask(COMPLETIONS, completion(prompt=[completion()["prompt"]] * 2))
        assert answer.status == 502
        assert (
            "answers of more than 1048576 bytes (limits.max_answer_bytes)"
            in answer.json["error"]["message"]
        )


# -- passed routes


@pytest.mark.parametrize(
    "name", ["an answer that says it is too large", "an answer in chunks", "an error"]
)
async def test_a_passed_answer_without_end(name: str) -> None:
    """502, from one engine, which is not blamed."""
    async with bounded(decode=2) as w:
        script = Endless(*WHOLE[name])
        seen = everyone(w, "/v1/embeddings", script)
        answer = await w.ask("/v1/embeddings", {"model": "tiny", "input": "x"})
        assert answer.status == 502
        assert "limits.max_answer_bytes" in answer.json["error"]["message"]
        assert script.sent < LET_THROUGH
        assert len(seen) == 1
        assert not any(engine.failures for engine in w.proxy.ledger.engines)


@pytest.mark.parametrize("piece", [b"x" * 8192, b'data: {"sequence_number":' + b"9" * 8000])
async def test_a_passed_event_without_end(piece: bytes) -> None:
    """A stream's event has the bound of an answer."""
    async with bounded() as w:
        script = Endless(STREAM, framed(piece))
        seen = everyone(w, RESPONSES, script)
        answer = await w.ask(RESPONSES, responses(stream=True))
        assert answer.status == 502
        assert script.sent < LET_THROUGH
        assert (len(seen), w.proxy.ledger.engines[1].failures) == (1, 0)


async def test_a_number_that_no_counter_has() -> None:
    """Of 5000 digits Python makes no integer: the stream goes on all the same."""
    event = b'event: response.completed\ndata: {"sequence_number":%b}\n\n' % (b"9" * 5000)
    async with bounded() as w:
        everyone(w, RESPONSES, scripts.streams(*[b'data: {"sequence_number":1}\n\n'] * 3, event))
        answer = await w.ask(RESPONSES, responses(stream=True))
        assert (answer.status, answer.events[-1]) == (200, event)


@pytest.mark.parametrize("digits", [14, 400])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_usage_that_is_no_count(tmp_path: Path, digits: int, stream: bool) -> None:
    """Of a key with limits, in which usage is added up: the request ends, its place is free, and
    the key is served.
    """
    (tmp_path / "keys").write_text("a:sk-a tpm=600000 inflight=1")
    count = 10**digits
    events = answers.stream(False, count, ["a"], with_usage=True)
    body = answers.compact(
        {"choices": [{"index": 0, "text": "a"}], "usage": answers.usage(count, count)}
    )
    script = scripts.streams(*events) if stream else scripts.whole(body)
    async with world(auth={"api_keys_file": str(tmp_path / "keys")}) as w:
        for _ in range(4):
            w.decode[0].script(script)
            answer = await w.ask(COMPLETIONS, completion(stream=stream), bearer("sk-a"))
            assert answer.status == 200
        await w.quiet()


@pytest.mark.parametrize("digits", [14, 400])
async def test_a_prefill_whose_usage_is_no_count(digits: int) -> None:
    """Its answer is none: another engine is asked, or the next request served."""
    usage = {"usage": {"prompt_tokens": 10**digits, "total_tokens": 1, "completion_tokens": 1}}
    async with world(prefill=2) as w:
        params = {"kv_transfer_params": {"do_remote_prefill": True}}
        for engine in w.prefill:
            engine.script(scripts.whole(answers.compact({"choices": [], **params, **usage})))
        found = [(await w.ask(COMPLETIONS, completion())).status for _ in range(4)]
        assert found[2:] == [200] * 2, "each engine has said it once"
        assert len(w.events(LegFailed)) == 2


# -- probes


def listing(count: int) -> bytes:
    return json.dumps({"data": [{"id": f"m{number}"} for number in range(count)]}).encode()


PAGES: dict[str, tuple[str, Script, str]] = {
    "models without end": ("/v1/models", Endless(*WHOLE["an answer in chunks"]),
    "answered more than 4194304 bytes"),
    "too many models": ("/v1/models", scripts.whole(listing(3 * MAX_MODELS)),
    "more than 4096 models"),
    "a model with a long name": ("/v1/models",
    scripts.whole(b'{"data":[{"id":"%b"}]}' % (b"n" * 5000)), "a name of more"),
    "metrics without end": ("/metrics", Endless(*WHOLE["an answer in chunks"]),
    "answered more than 8388608 bytes"),
    "too many samples": (
        "/metrics", scripts.whole(b"vllm:num_requests_running 1\n" * (MAX_SAMPLES + 1)),
        "more than 512 lines",
    ),
    "a long sample": (
        "/metrics", scripts.whole(b'vllm:num_requests_running{a="%b"} 1\n' % (b"x" * 5000)),
        "more than 4096 bytes in a line",
    ),
    "long samples": (
        "/metrics", scripts.whole(b'vllm:num_requests_running{a="%b"} 1\n' % (b"x" * 1000) * 70),
        "more than 65536 bytes",
    ),
    "a sample that is no number": ("/metrics", scripts.whole(b"vllm:num_requests_running NaN\n"),
    "is not finite"),
    "a long word": ("/metrics", scripts.whole(b"vllm:num_requests_running %b\n" % (b"x" * 3000)),
    "not in Prometheus"),
    "a version without end": ("/version", Endless(*WHOLE["an answer in chunks"]),
    "answered more than 65536 bytes"),
    "ids without end": ("/tokenize", Endless(*WHOLE["an answer in chunks"]),
    "answered more than 65536 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
async def test_an_engine_whose_pages_have_no_end_does_not_come_up(name: str) -> None:
    """What is too large is named with its bound, in words that fit a log line."""
    path, script, said = PAGES[name]

    def before(w: World) -> None:
        w.decode[0].admin = {path: script}

    async with world(probed=False, before=before) as w:
        await w.probe()
        why = w.proxy.ledger.engines[1].down_because or ""
        assert said in why
        assert len(why) < 500
        assert w.proxy.ledger.engines[0].up
        if isinstance(script, Endless):
            assert script.sent < LET_THROUGH + 8 * MIB


async def test_a_health_page_without_end() -> None:
    """Its status is all that counts: nothing of it is read."""

    def before(w: World) -> None:
        w.decode[0].admin = {"/health": script}

    script = Endless(*WHOLE["an answer in chunks"])
    async with world(probed=False, before=before) as w:
        await w.probe()
        assert w.proxy.ledger.engines[1].up
        assert script.sent < LET_THROUGH


async def test_words_of_an_engine_are_cut() -> None:
    """A version of a megabyte is nobody's to keep; names of models are told in part."""

    def before(w: World) -> None:
        w.decode[0].admin = {"/version": scripts.whole(b'{"version":"%b"}' % (b"v" * 60_000))}
        w.decode[0].models = [f"{'n' * 200}{number}" for number in range(100)]

    async with world(probed=False, before=before) as w:
        await w.probe()
        assert len(w.proxy.ledger.engines[1].evidence.version) < 200  # type: ignore[union-attr]
        assert all(len(one) < 2000 for one in w.proxy.ledger.shortcomings(0.0))
