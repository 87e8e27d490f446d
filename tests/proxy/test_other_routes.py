"""The routes that one engine serves whole: who gets them, what of them goes on, and what comes back when an engine fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from pdproxy.observe.events import RequestEnded
from pdproxy.serving.routes import TABLE, Kind
from pdproxy.sim.journal import Request
from tests.fakes.client import request
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.world import PROMPT, World, until, world

PASSED = [entry for entry in TABLE if entry.kind is Kind.PASSED]
PATHS = [entry.path for entry in PASSED]
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
VLLM = [
    tuple(line.split())
    for line in (Path(__file__).parent / "vllm_routes.txt").read_text().splitlines()
    if not line.startswith("#")
]
OWN_DOCS = ("/docs", "/openapi.json", "/redoc")
"""pdproxy's own, about itself."""
HANDLE = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [1]}


def responses(**fields: Any) -> dict[str, Any]:
    """A body of `/v1/responses`."""
    return {"model": "tiny", "input": PROMPT, "max_output_tokens": 4, "temperature": 0, **fields}


def message(**fields: Any) -> dict[str, Any]:
    """A body of `/v1/messages`."""
    messages = [{"role": "user", "content": PROMPT}]
    return {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0, **fields}


BODIES = {RESPONSES: responses(), MESSAGES: message()}
STREAMED = [RESPONSES, MESSAGES]


def everyone(w: World, path: str, script: Callable[[Reply], Awaitable[None]]) -> list[Request]:
    """Have all engines answer a path so; return the list that its requests go to."""
    seen: list[Request] = []

    async def noted(reply: Reply) -> None:
        seen.append(reply.request)
        await script(reply)

    for engine in w.engines:
        engine.admin = {**engine.admin, path: noted}
    return seen


async def fine(reply: Reply) -> None:
    """An answer."""
    await reply.whole(b'{"fine":true}')


def asked(engine: FakeEngine, path: str) -> int:
    """How many requests of a path an engine has had."""
    return sum(1 for one in engine.sim.journal._others.kept if one.path == path)


# -- the table


@pytest.mark.parametrize("path", PATHS)
async def test_a_passed_route_reaches_one_engine_that_serves_alone(path: str) -> None:
    """Never a prefill engine; the body arrives as it was, the endpoint's label is the table's path."""
    async with world(prefill=1, decode=1) as w:
        seen = everyone(w, path, fine)
        body = {"model": "tiny", "anything": [1, {"x": None}], "input": "é"}
        answer = await w.ask(path, body, [("x-request-id", "mine")])
        assert (answer.status, answer.json) == (200, {"fine": True})
        assert answer.header("x-request-id") == "mine"
        assert len(seen) == 1
        assert {key: value for key, value in seen[0].json.items() if key != "store"} == body
        ended = await w.ended()
        assert (ended.endpoint, ended.outcome, ended.legs[0].decode) == (path, "ok", w.decode[0].url)
        assert w.metric("pdproxy_requests_total", endpoint=path, outcome="ok", model="tiny") == 1


async def test_no_route_outside_the_table_reaches_an_engine() -> None:
    """Of all routes that vLLM registers, those that the table does not pass on stay here: 404, or 405 where the path is known."""
    entries = {(method, entry.path): entry.kind for entry in TABLE for method in entry.methods}
    async with world() as w:

        def seen() -> int:
            return sum(len(list(engine.sim.journal._others.kept)) + len(engine.requests) for engine in w.engines)

        for method, path in VLLM:
            kind = entries.get((method, path))
            before = seen()
            concrete = path.replace("{response_id}", "resp_1").replace("{model_id}", "tiny")
            answer = await w.ask(concrete, b"{}" if method == "POST" else b"", method=method)
            if kind is Kind.PASSED:
                assert seen() == before + 1, path
            elif kind is None and path not in OWN_DOCS:
                assert seen() == before, path
                shadowed = path == "/v1/responses/render"  # there is a GET of that form
                assert (answer.status, path) == (405 if shadowed else 404, path)
                assert answer.json == {"detail": "Method Not Allowed" if shadowed else "Not Found"}


def test_the_table_is_documented() -> None:
    """docs/routes.md has a line for each entry, with its methods and its reason, and no other."""
    text = (Path(__file__).parents[2] / "docs" / "routes.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `/")]
    wanted = [f"| `{e.path}` | {', '.join(e.methods)} | {e.kind.value} | {e.why} |" for e in TABLE]
    assert rows == wanted


# -- whose it is


async def test_the_engine_that_serves_the_model_gets_it() -> None:
    """Among engines of other models, the one that lists the body's model is asked; for an unknown one any, for its own 404."""

    def name(w: World) -> None:
        for number, engine in enumerate(w.aggregated):
            engine.models = [f"m{number}"]

    async with world(prefill=0, decode=0, aggregated=3, before=name) as w:
        for number in (2, 0, 1):
            answer = await w.ask("/tokenize", {"model": f"m{number}", "prompt": "hi"})
            assert answer.status == 200
            assert (await w.ended(len(w.events(RequestEnded)))).legs[0].decode == w.aggregated[number].url
        unknown = await w.ask("/tokenize", {"model": "nope", "prompt": "hi"})
        assert unknown.status == 404
        assert unknown.json["error"]["type"] == "NotFoundError"
        assert w.metric("pdproxy_requests_total", endpoint="/tokenize", model="other", outcome="client") == 1


async def test_load_is_counted() -> None:
    """While an engine works for one request the next goes to another, and both leases end."""
    go = asyncio.Event()

    async def slow(reply: Reply) -> None:
        await go.wait()
        await reply.whole(b"{}")

    async with world(decode=2) as w:
        seen = everyone(w, "/v1/embeddings", slow)
        asking = [asyncio.ensure_future(w.ask("/v1/embeddings", {"model": "tiny", "input": "x"})) for _ in range(2)]
        await until(lambda: len(seen) == 2)
        assert [node.requests for node in w.proxy.ledger.nodes] == [0, 1, 1]
        assert w.proxy.admission.inflight == 2
        go.set()
        assert [(await one).status for one in asking] == [200, 200]


async def test_a_full_house_is_told_so() -> None:
    """Admission counts these requests as all others: beyond the last place, 503 with retry-after."""
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


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe{}", b"null", b'{"a":1}{"b":2}'])
async def test_a_body_that_cannot_be_read_stops_here(body: bytes) -> None:
    """What is no JSON object is refused: an engine that reads it otherwise could find a handle in it."""
    async with world() as w:
        for path in PATHS:
            seen = everyone(w, path, fine)
            answer = await w.ask(path, body)
            assert (answer.status, seen) == (400, [])
            assert answer.json["error"]["type"] == "Bad Request"


async def test_another_content_type_is_refused() -> None:
    """As vLLM does, in its words."""
    async with world() as w:
        client = await w.client()
        client.send(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\n{}")
        answer = await client.answer()
        assert answer.status == 400
        assert "Only 'application/json' is allowed" in answer.json["error"]["message"]


async def test_a_body_that_is_too_large() -> None:
    """Announced or not, it is a 413 and no engine is asked."""
    async with world(limits={"max_body_bytes": 1000}) as w:
        seen = everyone(w, "/tokenize", fine)
        assert (await w.ask("/tokenize", {"prompt": "x" * 1000})).status == 413
        client = await w.client()
        head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        client.send(head + b"7d0\r\n" + b" " * 2000 + b"\r\n0\r\n\r\n")
        assert (await client.answer()).status == 413
        assert not seen


async def test_bodies_of_all_routes_share_one_bound() -> None:
    """What is held for a passed request counts with the others; it is given back when its request is over."""
    async with world(limits={"max_body_bytes": 1000, "max_buffered_bytes": 1500}) as w:
        first, second = await w.client(), await w.client()
        for client, size in ((first, 900), (second, 700)):
            client.send(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
            client.send(b"content-length: 1000\r\n\r\n" + b" " * size)
            if client is first:
                await until(lambda: w.proxy.room.held == 900)
        answer = await second.answer()
        assert (answer.status, answer.header("retry-after")) == (503, "1")
        first.send(b" " * 100)
        assert (await first.answer()).status == 400
        await until(lambda: w.proxy.room.held == 0)


async def test_a_strangers_body_is_not_waited_for() -> None:
    """With keys, a passed route refuses a client without one before its body is there."""
    async with world(auth={"api_keys": ("one",)}) as w:
        client = await w.client()
        client.send(
            b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
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
            b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"
        )
        assert (await client.answer()).status == 408
        assert w.metric("pdproxy_deadline_total", wait="client_body") == 1


async def test_only_some_headers_go_on() -> None:
    """Tracing, session and priority; no cookie, no rank, no key of another scheme, no header that only a proxy may set."""
    async with world() as w:
        seen = everyone(w, MESSAGES, fine)
        sent = [
            ("traceparent", "00-1"),
            ("tracestate", "a=b"),
            ("x-session-id", "s"),
            ("x-vllm-priority", "3"),
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
        assert set(got) - {"host", "content-length", "content-type", "x-request-id", "accept", "connection"} == {
            "traceparent",
            "tracestate",
            "x-session-id",
            "x-vllm-priority",
            "authorization",
        }
        assert got["authorization"] == "Bearer mine"


async def test_proxy_keys_guard_every_route() -> None:
    """Without a key of ours 401, also with `x-api-key`, which vLLM does not know; with one, engines get theirs."""
    async with world(auth={"api_keys": ("ours",), "engine_api_key": "theirs"}) as w:
        for path in [*PATHS, "/v1/responses/resp_1/cancel"]:
            seen = everyone(w, path, fine)
            refused = await w.ask(path, {"model": "tiny"}, [("x-api-key", "ours")])
            assert (refused.status, seen) == (401, [])
            assert refused.json["error"]["type"] == "invalid_request_error"
            allowed = await w.ask(path, {"model": "tiny"}, [("authorization", "Bearer ours")])
            if path in PATHS:
                assert allowed.status == 200
                assert dict(seen[0].headers)["authorization"] == "Bearer theirs"
            else:
                assert allowed.status == 404


# -- memory


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", {"id": "c"}),
        ("background", True),
        ("background", "yes"),
        ("store", True),
        ("store", 1),
        ("store", "on"),
    ],
)
async def test_what_needs_memory_is_refused_by_name(field: str, value: object) -> None:
    """A field that would have an engine remember something is a 400 that names it, also where pydantic would read it as true."""
    async with world() as w:
        seen = everyone(w, RESPONSES, fine)
        answer = await w.ask(RESPONSES, responses(**{field: value}))
        assert answer.status == 400
        assert answer.json["error"]["param"] == field
        assert field in answer.json["error"]["message"]
        assert not seen


@pytest.mark.parametrize("given", [{}, {"store": None}, {"store": False}, {"background": False, "conversation": None}])
async def test_a_plain_response_is_not_stored(given: dict[str, object]) -> None:
    """vLLM's default is to store: engines are always told not to."""
    async with world() as w:
        seen = everyone(w, RESPONSES, fine)
        assert (await w.ask(RESPONSES, responses(**given))).status == 200
        assert seen[0].json["store"] is False
        assert "conversation" not in seen[0].json


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/responses/r1"), ("POST", "/v1/responses/r1/cancel")])
async def test_stored_responses_do_not_exist(method: str, path: str) -> None:
    """Asking for one is vLLM's 404, with the reason."""
    async with world() as w:
        answer = await w.ask(path, b"", method=method)
        error = answer.json["error"]
        assert (answer.status, error["type"], error["param"]) == (404, "invalid_request_error", "response_id")
        assert error["message"].startswith("Response with id 'r1' not found")


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
        assert [_shape(part) for part in answer.events] == [_shape(part) for part in plain.events]
        assert asked(w.prefill[0], path) == 0


def _shape(event: bytes) -> Any:
    name, _, data = event.partition(b"data: ") if b"data: " in event else (b"", b"", event)

    def still(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: "*" if k in ("id", "item_id", "created_at") else still(v) for k, v in value.items()}
        return [still(one) for one in value] if isinstance(value, list) else value

    return name, still(json.loads(data))


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_client_responses(stream: bool) -> None:
    """The official client's plain `responses.create` works, whole and streamed, and says the same both ways."""
    given: Any = {"model": "tiny", "input": PROMPT, "max_output_tokens": 8}
    async with world() as w:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{w.port}/v1", api_key="x", max_retries=0)
        async with client:
            if stream:
                answered = await client.responses.create(**given, stream=True)
                events = [event async for event in answered]
                assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"]
                assert [e.sequence_number for e in events] == list(range(len(events)))
                last = events[-1]
                assert last.type == "response.completed"
                text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
                assert text
                assert text == last.response.output_text
            else:
                made = await client.responses.create(**given)
                assert made.output_text
                with pytest.raises(openai.NotFoundError):
                    await client.responses.retrieve(made.id)


# -- failures


def preamble(path: str) -> list[bytes]:
    """The events that begin a stream."""
    if path == RESPONSES:
        return [
            b'event: response.created\ndata: {"sequence_number":0,"type":"response.created"}\n\n',
            b'event: response.in_progress\ndata: {"sequence_number":1,"type":"response.in_progress"}\n\n',
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
    """The client gets whole events, then one error event of the protocol, and the end of the answer: never silence."""

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

    async with world(deadlines={"between_tokens": 0.3}) as w:
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
        assert w.proxy.ledger.nodes[1].failures == 1


@pytest.mark.parametrize("path", STREAMED)
@pytest.mark.parametrize("then", ["eof", "reset", "stall"])
async def test_before_the_model_has_shown_life_another_engine_is_asked(path: str, then: str) -> None:
    """What an engine says before its model has done anything is held back, so that its death there costs the client nothing."""

    async def script(reply: Reply) -> None:
        await reply.start()
        await reply.pieces(*preamble(path))
        await {"eof": _eof, "reset": _reset, "stall": Reply.stall}[then](reply)

    async with world(decode=2, deadlines={"first_token": 0.3}) as w:
        first: list[Request] = []

        async def once(reply: Reply) -> None:
            if first:
                await reply.serve()
            else:
                first.append(reply.request)
                await script(reply)

        everyone(w, path, once)
        answer = await w.ask(path, {**BODIES[path], "stream": True})
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
                await reply.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\ncontent-type: application/json\r\n\r\n{")
                reply.eof()
            case _:
                await reply.whole(b'{"error":{"message":"m","type":"t","param":null,"code":1}}', int(how))

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
        assert [node.alive for node in w.proxy.ledger.nodes] == [True, False, True]
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
        assert w.proxy.ledger.nodes[1].failures == 2
        assert not w.proxy.ledger.nodes[1].usable(w.proxy.service._engines.now())


async def test_what_a_model_cannot_do_is_no_failure() -> None:
    """vLLM's 501 goes to the client at once and does not count against the engine."""

    async def script(reply: Reply) -> None:
        await reply.whole(b'{"error":{"message":"no","type":"NotImplementedError","param":null,"code":501}}', 501)

    async with world() as w:
        seen = everyone(w, "/v1/embeddings", script)
        assert (await w.ask("/v1/embeddings", {"model": "tiny", "input": "x"})).status == 501
        assert (len(seen), w.proxy.ledger.nodes[1].failures) == (1, 0)


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
    """Quick questions have a deadline of their own; what takes as long as the model needs has the total one."""

    async def script(reply: Reply) -> None:
        await reply.stall()

    async with world(deadlines={deadline: 0.2}, limits={"attempts": 1}) as w:
        everyone(w, path, script)
        assert (await w.ask(path, {"model": "tiny"})).status == 504
        assert w.metric("pdproxy_deadline_total", wait=wait) == 1


async def test_an_engine_that_probes_have_lost() -> None:
    """An engine that was asked and then went down for `between_tokens` is given up, long before the total deadline."""

    async def script(reply: Reply) -> None:
        await reply.stall()

    async with world(deadlines={"between_tokens": 0.2}, limits={"attempts": 1}) as w:
        seen = everyone(w, "/v1/embeddings", script)
        asking = asyncio.ensure_future(w.ask("/v1/embeddings", {"model": "tiny"}))
        await until(lambda: seen)
        w.proxy.ledger.lost(w.decode[0].url, "gone", w.proxy.service._engines.now())
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
        await asyncio.wait_for(left.wait(), 4)
        ended = await w.ended()
        assert ended.outcome == "client_left"
        await w.quiet()
        assert w.proxy.ledger.nodes[1].failures == 0


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
        assert w.server is not None
        await w.proxy.drain(w.server.server_state.tasks)
        assert (await w.ended()).outcome == "capacity"
