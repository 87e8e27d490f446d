"""HTTP as clients really use it: kept and pipelined connections, old versions, odd methods,
expectations.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes import scripts
from tests.fakes.client import request
from tests.fakes.engine import Reply
from tests.fakes.world import CHAT, COMPLETIONS, TEXT, completion, world


@pytest.mark.parametrize("stream", [False, True])
async def test_one_connection_serves_many_requests(stream: bool) -> None:
    """A kept connection takes one request after the other, with other routes in between."""
    async with world() as w:
        client = await w.client()
        for number in range(3):
            client.post(COMPLETIONS, completion(stream=stream), [("x-request-id", f"r{number}")])
            answer = await client.answer()
            assert (answer.status, answer.header("x-request-id")) == (200, f"r{number}")
            assert answer.text == TEXT
            client.send(request("GET", "/health", b""))
            assert (await client.answer()).status == 200


async def test_pipelined_requests_are_answered_in_order() -> None:
    """Requests sent at once, of all kinds, get their answers one by one in their order."""
    go = asyncio.Event()
    async with world() as w:
        w.prefill[0].script(scripts.gate(go, w.prefill[0].default))
        client = await w.client()
        client.send(
            request("POST", COMPLETIONS, completion(stream=True), [("x-request-id", "a")])
            + request("GET", "/version", b"")
            + request("POST", CHAT, b"{", [("x-request-id", "c")])
            + request("POST", COMPLETIONS, completion(), [("x-request-id", "d")])
        )
        await w.prefill[0].asked()
        go.set()
        seen = [await client.answer() for _ in range(4)]
        assert [a.status for a in seen] == [200, 200, 400, 200]
        assert [a.header("x-request-id") for a in seen] == ["a", None, "c", "d"]
        assert "version" in seen[1].json


async def test_a_client_that_leaves_with_requests_in_the_pipeline() -> None:
    """Leaving ends the request that is served, at its next write; the ones behind it never
    start.
    """

    async def flow(reply: Reply) -> None:
        await reply.start()
        while True:
            await reply.piece(scripts.WORD)
            await asyncio.sleep(0.01)

    async with world() as w:
        w.decode[0].script(flow)
        client = await w.client()
        client.send(
            request("POST", COMPLETIONS, completion(stream=True))
            + request("POST", COMPLETIONS, completion())
        )
        await client.head()
        client.close()
        await w.ended()
        await w.quiet()
        assert len(w.prefill[0].requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_of_http_1_0(stream: bool) -> None:
    """An HTTP/1.0 client gets no chunks: the end of the connection ends a stream."""
    async with world() as w:
        client = await w.client()
        client.send(request("POST", COMPLETIONS, completion(stream=stream), version="1.0"))
        answer = await client.answer()
        assert answer.status == 200
        assert answer.header("transfer-encoding") is None
        assert answer.text == TEXT
        assert await client.closed()


@pytest.mark.parametrize("stream", [False, True])
async def test_connection_close_is_honoured(stream: bool) -> None:
    """A client that asks for it has its connection closed after the answer."""
    async with world() as w:
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=stream), [("connection", "close")])
        answer = await client.answer()
        assert answer.ended
        assert answer.header("connection") == "close"
        assert await client.closed()


async def test_expect_100_continue() -> None:
    """A client that waits for 100 Continue gets it before it sends its body."""
    body = json.dumps(completion()).encode()
    async with world() as w:
        client = await w.client()
        head = request("POST", COMPLETIONS, body, [("expect", "100-continue")]).removesuffix(body)
        client.send(head)
        assert (await client.head()).status == 100
        client.send(body)
        answer = await client.answer()
        assert (answer.status, answer.text) == (200, TEXT)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
async def test_other_methods_on_the_generating_routes(path: str, method: str) -> None:
    """They are 405, as with vLLM, and name the one that is allowed."""
    async with world() as w:
        answer = await w.ask(path, b"", method=method)
        assert answer.status == 405
        assert answer.header("allow") == "POST"
        if method != "HEAD":
            assert answer.json == {"detail": "Method Not Allowed"}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions?x=1",
        "http://proxy/v1/completions",
        "http://proxy/v1/completions?y",
        "/v1/%63ompletions",
        "/v1%2Fcompletions?x=%2F",
        "/v1/completions#a",
        "/v1/completions?x#a",
        "http://proxy/%761/completions",
    ],
)
async def test_other_forms_of_the_same_target(path: str) -> None:
    """A query, a fragment, the absolute form or a percent-encoded form of the target is the same
    route.
    """
    async with world() as w:
        assert (await w.ask(path, completion())).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/nope",
        "/",
        "/pause",
        "/collective_rpc",
        "/sleep",
        "/v1/load_lora_adapter",
        "/abort_requests",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_other_routes_are_404_and_never_reach_an_engine(path: str, method: str) -> None:
    """Only the routes that the proxy knows exist; an engine's admin routes cannot be reached
    through it.
    """
    async with world() as w:
        answer = await w.ask(path, b"{}", method=method)
        assert (answer.status, answer.json) == (404, {"detail": "Not Found"})
        assert not any(engine.requests for engine in w.engines)


async def test_a_client_that_offers_http_2() -> None:
    """An offer to upgrade to h2c is ignored, as RFC 9110 allows: clients in Java send it with every
    first request.
    """
    offer = [
        ("connection", "Upgrade, HTTP2-Settings"),
        ("upgrade", "h2c"),
        ("http2-settings", "AAEAAEAAAAIAAAAA"),
    ]
    async with world() as w:
        client = await w.client()
        for path, body in (
            (COMPLETIONS, completion()),
            ("/tokenize", {"model": "tiny", "prompt": "x"}),
        ) * 2:
            client.post(path, body, offer)
            answer = await client.answer()
            assert (answer.status, answer.header("connection")) == (200, None)


async def test_bytes_that_are_no_http() -> None:
    """Nonsense gets a 400 and a closed connection."""
    async with world() as w:
        client = await w.client()
        client.send(b"\x16\x03\x01\x02\x00\r\n\r\n")
        assert (await client.answer()).status == 400
        assert await client.closed()


async def test_a_request_in_single_bytes() -> None:
    """However a request is cut into packets, it is one request."""
    async with world() as w:
        client = await w.client()
        client.writer.get_extra_info("socket").setsockopt(6, 1, 1)
        for byte in request("POST", COMPLETIONS, completion(prompt="p" * 40)):
            client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.answer()).status == 200
        assert w.decode[0].requests[0].json["prompt"] == "p" * 40


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_head_behind_a_request_spoils_nothing(stream: bool) -> None:
    """The request before it has its body and its answer; then the connection ends."""
    async with world() as w:
        client = await w.client()
        # no path: uvicorn refuses it once the head is whole
        bad = b"GET http://x HTTP/1.1\r\nhost: x\r\n\r\n"
        client.send(request("POST", COMPLETIONS, completion(stream=stream)) + bad)
        answer = await client.answer()
        assert (answer.status, answer.text) == (200, TEXT)
        assert await client.closed()
        alone = await w.client()
        alone.send(bad)
        assert (await alone.answer()).status == 400


async def test_the_answers_to_errors_keep_the_connection() -> None:
    """A refused request does not cost the client its connection."""
    async with world() as w:
        client = await w.client()
        for body, status in ((b"{", 400), (completion(max_tokens=10**6), 400), (completion(), 200)):
            client.post(COMPLETIONS, body)
            assert (await client.answer()).status == status
