"""The routes that one engine serves whole: who gets them, what of them goes on, and what comes back
when an engine fails.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from pdproxy.app.compose import Proxy
from pdproxy.observe.events import RequestEnded
from pdproxy.serving.access.routes import TABLE, RouteKind
from tests.fakes.engine import Reply
from tests.fakes.forms import spoken, typed
from tests.fakes.passed import (
    BODIES,
    FORMS,
    HANDLE,
    MESSAGES,
    PATHS,
    RESPONSES,
    STREAMED,
    VLLM,
    asked,
    everyone,
    fine,
    message,
    shape,
)
from tests.fakes.world import World, until, world

# -- the table


def _own(proxy: Proxy) -> list[int]:
    """The requests that this worker has at each engine."""
    return [engine.own_load[0] for engine in proxy.ledger.engines]


@pytest.mark.parametrize("path", PATHS)
async def test_a_passed_route_reaches_one_engine_that_serves_alone(path: str) -> None:
    """Never a prefill engine; the body arrives as it was, the endpoint's label is the table's
    path.
    """
    async with world(prefill=1, decode=1) as w:
        seen = everyone(w, path, fine)
        body = {"model": "tiny", "anything": [1, {"x": None}], "input": "é"}
        answer = await w.ask(path, body, [("x-request-id", "mine")])
        assert (answer.status, answer.json) == (200, {"fine": True})
        assert answer.header("x-request-id") == "mine"
        assert len(seen) == 1
        assert {key: value for key, value in seen[0].json.items() if key != "store"} == body
        ended = await w.ended()
        assert (ended.endpoint, ended.outcome, ended.legs[0].decode) == (
            path,
            "ok",
            w.decode[0].url,
        )
        assert w.metric("pdproxy_requests_total", endpoint=path, outcome="ok", model="tiny") == 1


async def test_no_route_outside_the_table_reaches_an_engine() -> None:
    """Of all routes that vLLM registers, those that the table does not pass on stay here: 404, or
    405 where the path is known.
    """
    entries = {(method, entry.path): entry.kind for entry in TABLE for method in entry.methods}
    async with world() as w:

        def seen() -> int:
            return sum(
                len(list(engine.sim.journal._others.kept)) + len(engine.requests)
                for engine in w.engines
            )

        for method, path in VLLM:
            kind = entries.get((method, path))
            before = seen()
            concrete = path.replace("{response_id}", "resp_1").replace("{model_id}", "tiny")
            body, headers = b"{}" if method == "POST" else b"", []
            if path in FORMS:
                body, headers = spoken(), [typed()]
            answer = await w.ask(concrete, body, headers, method=method)
            if kind is RouteKind.PASSED:
                twice = path == RESPONSES  # the second time for the text of the refusal
                assert seen() == before + 1 + twice, path
            elif kind in (RouteKind.REFUSED, RouteKind.WEBSOCKET):
                assert (seen(), answer.status) == (before, 404), path
            elif kind is None:
                assert seen() == before, path
                shadowed = path == "/v1/responses/render"  # there is a GET of that form
                assert (answer.status, path) == (405 if shadowed else 404, path)
                assert answer.json == {"detail": "Method Not Allowed" if shadowed else "Not Found"}


# -- whose it is


async def test_the_engine_that_serves_the_model_gets_it() -> None:
    """Among engines of other models, the one that lists the body's model is asked; for an unknown
    one any, for its own 404.
    """

    def name(w: World) -> None:
        for number, engine in enumerate(w.aggregated):
            engine.models = [f"m{number}"]

    async with world(prefill=0, decode=0, aggregated=3, before=name) as w:
        for number in (2, 0, 1):
            answer = await w.ask("/tokenize", {"model": f"m{number}", "prompt": "hi"})
            assert answer.status == 200
            assert (await w.ended(len(w.events(RequestEnded)))).legs[0].decode == w.aggregated[
                number
            ].url
        unknown = await w.ask("/tokenize", {"model": "nope", "prompt": "hi"})
        assert unknown.status == 404
        assert unknown.json["error"]["type"] == "NotFoundError"
        assert (
            w.metric(
                "pdproxy_requests_total", endpoint="/tokenize", model="other", outcome="client"
            )
            == 1
        )


async def test_load_is_counted() -> None:
    """While an engine works for one request the next goes to another, and both leases end."""
    go = asyncio.Event()

    async def slow(reply: Reply) -> None:
        await go.wait()
        await reply.whole(b"{}")

    async with world(decode=2) as w:
        seen = everyone(w, "/v1/embeddings", slow)
        asking = [
            asyncio.ensure_future(w.ask("/v1/embeddings", {"model": "tiny", "input": "x"}))
            for _ in range(2)
        ]
        await until(lambda: len(seen) == 2)
        assert [
            sum(engines) for engines in zip(*(_own(one) for one in w.workers), strict=True)
        ] == [0, 1, 1]
        assert w.inflight == 2
        go.set()
        assert [(await one).status for one in asking] == [200, 200]


async def test_a_full_house_is_told_so() -> None:
    """Admission counts these requests as all others: beyond the last place, 503 with
    retry-after.
    """
    go = asyncio.Event()

    async def slow(reply: Reply) -> None:
        await go.wait()
        await reply.whole(b"{}")

    async with world(limits={"max_inflight": 1, "max_queue": 0}) as w:
        seen = everyone(w, "/pooling", slow)
        first = asyncio.ensure_future(w.ask("/pooling", {"model": "tiny"}))
        await until(lambda: seen)
        second = await w.ask("/pooling", {"model": "tiny"})
        assert (second.status, second.header("retry-after")) == (503, "1")
        go.set()
        assert (await first).status == 200


# -- what goes on


async def test_client_made_handles_are_removed() -> None:
    """Wherever vLLM would take a KV handle from a body, none of a client's making arrives."""
    nested = {"kv_transfer_params": HANDLE, "ec_transfer_params": HANDLE, "kept": 1}
    body = {
        "model": "tiny",
        "kv_transfer_params": HANDLE,
        "ec_transfer_params": HANDLE,
        "vllm_xargs": dict(nested),
        "sampling_params": {"extra_args": dict(nested), "top_k": 1},
    }
    raw = json.dumps(body)[:-1] + ', "kv_transfer_p\\u0061rams": {"do_remote_prefill": true}}'
    async with world() as w:
        for path in PATHS:
            seen = everyone(w, path, fine)
            assert (await w.ask(path, raw.encode())).status == 200
            assert b"remote" not in seen[0].body
            assert b"transfer_p" not in seen[0].body
            assert seen[0].json["vllm_xargs"] == {"kept": 1}
            assert seen[0].json["sampling_params"] == {"extra_args": {"kept": 1}, "top_k": 1}


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe{}", b"null", b'{"a":1}{"b":2}', b'{"a":"\xff"}']
)
async def test_a_body_that_cannot_be_read_stops_here(body: bytes) -> None:
    """What is no JSON object is refused, on every route in the words of vLLM's server."""
    async with world() as w:
        wanted = (await w.ask("/v1/completions", body)).body
        for path in PATHS:
            seen = everyone(w, path, fine)
            answer = await w.ask(path, body)
            assert (answer.status, seen) == (400, [])
            assert answer.body == wanted


async def test_another_content_type_is_refused() -> None:
    """As vLLM does, in its words."""
    async with world() as w:
        answer = await w.ask("/tokenize", b"{}", [("content-type", "text/plain")])
        assert answer.status == 400
        assert "Only 'application/json' is allowed" in answer.json["error"]["message"]


async def test_a_body_that_is_too_large() -> None:
    """Announced or not, it is a 413 and no engine is asked."""
    async with world(limits={"max_body_bytes": 1000}) as w:
        seen = everyone(w, "/tokenize", fine)
        assert (await w.ask("/tokenize", {"prompt": "x" * 1000})).status == 413
        client = await w.client()
        head = (
            b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        client.send(head + b"7d0\r\n" + b" " * 2000 + b"\r\n0\r\n\r\n")
        assert (await client.answer()).status == 413
        assert not seen


async def test_what_a_binary_embedding_is_made_of_goes_on() -> None:
    """vLLM describes it in a header, which may be longer than most."""

    async def script(reply: Reply) -> None:
        described = b"x" * 20_000
        await reply.raw(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: 2\r\n"
        )
        await reply.raw(b"metadata: " + described + b"\r\n\r\n\x00\xff")

    async with world() as w:
        everyone(w, "/v1/embeddings", script)
        answer = await w.ask(
            "/v1/embeddings", {"model": "tiny", "input": "a", "encoding_format": "bytes"}
        )
        assert (answer.status, answer.body) == (200, b"\x00\xff")
        assert answer.header("metadata") == "x" * 20_000


async def test_bodies_of_all_routes_share_one_bound() -> None:
    """What is held for a passed request counts with the others; it is released when its request has
    ended.
    """
    async with world(limits={"max_body_bytes": 1000, "max_buffered_bytes": 1500}) as w:
        first, second = await w.client(), await w.client()
        for client, size in ((first, 900), (second, 700)):
            client.send(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
            client.send(b"content-length: 1000\r\n\r\n" + b" " * size)
            if client is first:
                await until(lambda: w.body_bytes == 900)
        answer = await second.answer()
        assert (answer.status, answer.header("retry-after")) == (503, "1")
        first.send(b" " * 100)
        assert (await first.answer()).status == 400
        await until(lambda: w.body_bytes == 0)


async def test_a_body_without_a_key_is_not_waited_for() -> None:
    """With keys, a passed route refuses a client without one before its body is there."""
    async with world(auth={"api_keys": ("one",)}) as w:
        client = await w.client()
        client.send(
            b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        answer = await client.answer()
        assert (answer.status, answer.header("www-authenticate")) == (401, "Bearer")
        assert not any(engine.requests for engine in w.engines)
        assert (await w.ended()).status == 401


async def test_a_body_that_never_ends() -> None:
    """It is given up after `deadlines.client_body`, and the wait is counted."""
    async with world(deadlines={"client_body": 0.1}) as w:
        client = await w.client()
        client.send(
            b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 9\r\n\r\n{"
        )
        assert (await client.answer()).status == 408
        assert w.metric("pdproxy_deadline_total", wait="client_body") == 1


async def test_only_some_headers_go_on() -> None:
    """Tracing, session and priority; no cookie, no rank, no key of another scheme, no header that
    only a proxy may set.
    """
    async with world() as w:
        seen = everyone(w, MESSAGES, fine)
        sent = [
            ("traceparent", "00-1"),
            ("tracestate", "a=b"),
            ("x-session-id", "s"),
            ("x-vllm-priority", "3"),
            ("endpoint-load-metrics-format", "TEXT"),
            ("authorization", "Bearer mine"),
            ("x-api-key", "secret"),
            ("anthropic-version", "2023-06-01"),
            ("anthropic-beta", "b"),
            ("cookie", "c=1"),
            ("x-data-parallel-rank", "1"),
            ("accept-encoding", "gzip"),
        ]
        assert (await w.ask(MESSAGES, message(), sent)).status == 200
        got = {name.lower(): value for name, value in seen[0].headers}
        assert set(got) - {
            "host",
            "content-length",
            "content-type",
            "x-request-id",
            "accept",
            "connection",
        } == {
            "traceparent",
            "tracestate",
            "x-session-id",
            "x-vllm-priority",
            "endpoint-load-metrics-format",
            "authorization",
        }
        assert got["authorization"] == "Bearer mine"


async def test_proxy_keys_guard_every_route() -> None:
    """Without one of the proxy's keys 401; with one, engines get theirs. Clients of Anthropic's API
    send it as `x-api-key`.
    """
    async with world(auth={"api_keys": ("ours",), "engine_api_key": "theirs"}) as w:
        for path in [*PATHS, RESPONSES, MESSAGES, "/v1/responses/resp_1/cancel"]:
            seen = everyone(w, path, fine)
            in_messages = path in (MESSAGES, f"{MESSAGES}/count_tokens")
            refused = await w.ask(
                path, {"model": "tiny"}, [("x-api-key", "others" if in_messages else "ours")]
            )
            assert (refused.status, seen) == (401, [])
            kind = "authentication_error" if in_messages else "invalid_request_error"
            assert refused.json["error"]["type"] == kind
            header = ("x-api-key", "ours") if in_messages else ("authorization", "Bearer ours")
            allowed = await w.ask(path, {"model": "tiny"}, [header])
            if path.endswith("/cancel"):
                assert allowed.status == 404
            else:
                assert allowed.status == 200
                assert dict(seen[0].headers)["authorization"] == "Bearer theirs"


# -- clients


@pytest.mark.parametrize("path", STREAMED)
@pytest.mark.parametrize("stream", [False, True])
async def test_whole_and_streamed_as_from_the_engine_itself(path: str, stream: bool) -> None:
    """But for ids and times, the answer through the proxy is the engine's own."""
    async with world(prefill=1, decode=1) as w:
        body = {**BODIES[path], "stream": stream}
        answer = await w.ask(path, body)
        assert answer.status == 200
        assert answer.ended
        w.port, ours = w.decode[0].port, w.port
        plain = await w.ask(path, body)
        w.port = ours
        assert answer.header("content-type") == plain.header("content-type")
        assert [shape(part) for part in answer.events] == [shape(part) for part in plain.events]
        assert asked(w.prefill[0], path) == 0
