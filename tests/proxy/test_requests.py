"""What the proxy makes of a request's headers and body before any engine is asked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.client import Answer, exchange, request
from tests.fakes.engine import Reply
from tests.fakes.passed import MESSAGES, RESPONSES, message, responses
from tests.fakes.world import CHAT, COMPLETIONS, PROMPT, TEXT, World, chat, completion, world

FAKE = {"do_remote_prefill": True, "remote_engine_id": "made-up", "remote_block_ids": [[1]]}
MARK = "Dear doctor"
ALONE = {"echo": True}


def legs(w: World) -> list[dict[str, Any]]:
    """The bodies of all legs so far."""
    return [request.json for engine in w.engines for request in engine.requests]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("alone", [False, True])
async def test_a_clients_kv_handles_never_reach_an_engine(path: str, alone: bool) -> None:
    """Handles made by clients are taken out wherever they may stand: at the top, nested, escaped,
    twice.
    """
    body = json.dumps(
        {**(completion() if path == COMPLETIONS else chat()), **(ALONE if alone else {})}
    )[:-1]
    made_up = json.dumps(FAKE)
    evil = (
        body
        + f',"kv_transfer_params":{made_up},"kv_transfer_params":{made_up},"ec_transfer_params":'
        f"{made_up}"
        + f',"kv_transfer\\u005fparams":{made_up},"\\u006bv_transfer_params":{made_up}'
        + f',"vllm_xargs":{{"a":1,"kv_transfer_params":{made_up},"ec_transfer\\u005fparams":'
        f"{made_up}}}"
        + f',"sampling_params":{{"b":2,"extra_args":{{"c":3,"kv_transfer_params":{made_up}}}}}}}'
    )
    async with world() as w:
        answer = await w.ask(path, evil.encode())
        assert answer.status == 200
        assert len(legs(w)) == (1 if alone else 2)
        for leg in legs(w):
            assert "made-up" not in json.dumps(leg)
            assert "ec_transfer_params" not in leg
            assert leg["vllm_xargs"] == {"a": 1}
            assert leg["sampling_params"] == {"b": 2, "extra_args": {"c": 3}}


async def test_the_request_id_of_the_client_is_used_everywhere() -> None:
    """`X-Request-Id` goes to both engines and back to the client, and is in the report."""
    async with world() as w:
        answer = await w.ask(COMPLETIONS, completion(), [("X-Request-Id", "abc-1")])
        assert answer.header("x-request-id") == "abc-1"
        assert answer.json["id"] == "cmpl-abc-1"
        assert [e.requests[0].header("x-request-id") for e in w.engines] == ["abc-1", "abc-1"]
        assert (await w.ended()).request_id == "abc-1"


@pytest.mark.parametrize("bad", ["", "a b", 'a"b', "x" * 129, "é"])
async def test_an_unusable_request_id_is_replaced(bad: str) -> None:
    """An id that would break a log line or a header is replaced by a fresh one of 32 hex digits."""
    async with world() as w:
        answer = await w.ask(COMPLETIONS, completion(), [("x-request-id", bad)])
        fresh = answer.header("x-request-id") or ""
        assert len(fresh) == 32
        assert int(fresh, 16) >= 0
        assert w.decode[0].requests[0].ident == fresh


async def test_the_bodys_request_id_counts_where_no_header_does() -> None:
    """vLLM takes `request_id` from the body, too; a header wins over it; errors carry the id as
    well.
    """
    async with world() as w:
        answer = await w.ask(COMPLETIONS, completion(request_id="from-body"))
        assert answer.header("x-request-id") == "from-body"
        answer = await w.ask(
            COMPLETIONS, completion(request_id="from-body"), [("x-request-id", "from-header")]
        )
        assert answer.header("x-request-id") == "from-header"
        answer = await w.ask(COMPLETIONS, b"{", [("x-request-id", "mine")])
        assert (answer.status, answer.header("x-request-id")) == (400, "mine")


async def test_tracing_headers_go_on_and_others_stop() -> None:
    """Engines get what traces and what vLLM reads; cookies and hop-by-hop headers stay with the
    proxy.
    """
    sent = [
        ("traceparent", "00-aa-bb-01"),
        ("tracestate", "x=y"),
        ("cookie", "secret"),
        ("x-forwarded-for", "1.2.3.4"),
    ]
    async with world() as w:
        await w.ask(COMPLETIONS, completion(), sent)
        for engine in w.engines:
            request = engine.requests[0]
            assert request.header("traceparent") == "00-aa-bb-01"
            assert request.header("tracestate") == "x=y"
            assert request.header("cookie") is None
            assert request.header("x-forwarded-for") is None
            assert request.header("host") == f"127.0.0.1:{engine.port}"


@pytest.mark.parametrize("form", ["TEXT", "json", "binary", None])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, completion()),
        (COMPLETIONS, completion(prompt=[PROMPT, PROMPT[::-1]])),
        (COMPLETIONS, completion(max_tokens=0)),
        (CHAT, chat()),
        (RESPONSES, responses()),
        (MESSAGES, message()),
    ],
    ids=["completion", "list", "refused", "chat", "responses", "messages"],
)
async def test_the_headers_of_an_answer_are_an_engines(
    path: str, body: dict[str, object], stream: bool, form: str | None
) -> None:
    """A stream has what vLLM sends, and that nobody should buffer it; a whole answer has the load,
    if a format is named.
    """
    headers = [("endpoint-load-metrics-format", form)] if form else []
    async with world() as w:
        ours = await w.ask(path, {**body, "stream": stream}, headers)
        w.port, port = w.decode[0].port, w.port
        plain = await w.ask(path, {**body, "stream": stream}, headers)
        w.port = port
        own = ("date", "server", "x-request-id", "content-length", "connection")
        found, wanted = (
            sorted((name.lower(), value) for name, value in one.headers if name.lower() not in own)
            for one in (ours, plain)
        )
        unbuffered = [("cache-control", "no-cache"), ("x-accel-buffering", "no")]
        assert found == sorted([*wanted, *unbuffered] if stream and ours.status == 200 else wanted)
        whole = not stream and ours.status == 200 and path in (COMPLETIONS, CHAT)
        assert (ours.header("endpoint-load-metrics") is not None) is (
            whole and form in ("TEXT", "json")
        )


async def test_without_keys_the_clients_authorization_goes_on() -> None:
    """With no keys configured it is the engines that judge the client's Authorization."""
    async with world() as w:
        await w.ask(COMPLETIONS, completion(), [("Authorization", "Bearer theirs")])
        assert [e.requests[0].header("authorization") for e in w.engines] == ["Bearer theirs"] * 2


async def test_without_proxy_keys_the_engine_key_is_kept_for_probes() -> None:
    """A proxy that asks for no key opens no engine that wants one: a client's request carries what
    the client brought.
    """
    async with world(auth={"engine_api_key": "engine-key"}) as w:
        await w.ask(COMPLETIONS, completion(), [("authorization", "Bearer theirs")])
        await w.ask(COMPLETIONS, completion())
        for engine in w.engines:
            assert [r.header("authorization") for r in engine.requests] == ["Bearer theirs", None]
        seen: list[str | None] = []

        async def health(reply: Reply) -> None:
            seen.append(reply.request.header("authorization"))
            await reply.whole(b"")

        w.decode[0].admin["/health"] = health
        await w.probe()
        assert seen == ["Bearer engine-key"]


@pytest.mark.parametrize(
    "given",
    [None, "Bearer wrong", "Bearer", "Basic one", "one", "Bearer one two", "Bearer On\u00e9"],
)
async def test_with_keys_a_client_without_one_is_refused(given: str | None) -> None:
    """No key or a wrong one is a 401 in OpenAI's shape, and no engine hears of it."""
    async with world(auth={"api_keys": ("one", "two")}) as w:
        headers = [("authorization", given)] if given is not None else []
        answer = await w.ask(COMPLETIONS, completion(), headers)
        assert answer.status == 401
        assert answer.json["error"]["type"] == "invalid_request_error"
        assert answer.header("www-authenticate") == "Bearer"
        assert (await w.get("/v1/models", headers)).status == 401
        assert not legs(w)


@pytest.mark.parametrize("engine_key", [None, "engine-key"])
async def test_with_keys_the_clients_authorization_is_consumed(engine_key: str | None) -> None:
    """A client's key stops at the proxy; engines get their own, or none."""
    async with world(auth={"api_keys": ("one", "two"), "engine_api_key": engine_key}) as w:
        for key in ("Bearer one", "bearer two"):
            assert (await w.ask(COMPLETIONS, completion(), [("authorization", key)])).status == 200
        expected = f"Bearer {engine_key}" if engine_key else None
        assert {r.header("authorization") for e in w.engines for r in e.requests} == {expected}
        assert (await w.get("/v1/models", [("authorization", "Bearer one")])).status == 200


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "",
        "application/x-www-form-urlencoded",
        "application/jsonx",
        "application/x+json",
        "application/json ;x=y",
    ],
)
async def test_another_content_type_is_refused(kind: str) -> None:
    """Only application/json is read, with vLLM's status and words."""
    async with world() as w:
        answer = await w.ask(COMPLETIONS, completion(), [("content-type", kind)])
        assert answer.status == 400
        assert answer.json["error"]["type"] == "Bad Request"
        assert "Unsupported Media Type" in answer.json["error"]["message"]
        assert not legs(w)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("application/x+json", "JSON decode error"), ("text/x+json", "Unsupported Media Type")],
)
async def test_json_of_another_type_is_read_before_it_is_refused(kind: str, words: str) -> None:
    """As vLLM does: what is wrong with the body is said first."""
    async with world() as w:
        answer = await w.ask(COMPLETIONS, b"{", [("content-type", kind)])
        assert answer.status == 400
        assert words in answer.json["error"]["message"]


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "Application/JSON", "application/json;"]
)
async def test_content_types_that_are_json(kind: str) -> None:
    """Parameters and case of the content type do not matter."""
    async with world() as w:
        assert (await w.ask(COMPLETIONS, completion(), [("content-type", kind)])).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"1",
        b'{"model":"tiny",}',
        b"\xff\xfe",
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_body_that_is_no_json_object_is_a_400(path: str, body: bytes) -> None:
    """Unreadable bodies get a 400 in OpenAI's shape; no engine hears of them, nothing leaks."""
    async with world() as w:
        answer = await w.ask(path, body)
        assert answer.status == 400
        assert answer.json["error"]["type"] == "Bad Request"
        assert answer.json["error"]["code"] == 400
        assert not legs(w)


@pytest.mark.broken_bodies("a number that only Python's own parser refuses is passed on as it came")
@pytest.mark.parametrize(
    "body",
    [
        b'{"a":' * 100_000,
        b'{"a":' + b"[" * 50_000,
        b'{"messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"prompt":"\xff"}',
        b'{"a":%b}' % (b"1" * 4301),
    ],
)
async def test_a_body_that_no_parser_takes_is_a_400(body: bytes) -> None:
    """Wrong UTF-8, and nesting and numbers beyond the engines' parser, are answered in FastAPI's
    words, without an engine.
    """
    async with world() as w:
        answer = await w.ask(CHAT, body)
        assert answer.status == 400
        assert answer.json == {"detail": "There was an error parsing the body"}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-32-be"])
async def test_a_body_in_another_encoding_is_served_by_one_engine(encoding: str) -> None:
    """What only the engines' own parser takes reaches one engine in plain JSON, without the handles
    it held.
    """
    body = completion(
        kv_transfer_params={"do_remote_prefill": True},
        vllm_xargs={"ec_transfer_params": "x", "y": 1},
    )
    async with world() as w:
        answer = await w.ask(COMPLETIONS, json.dumps(body, ensure_ascii=False).encode(encoding))
        assert answer.status == 200
        assert answer.text == TEXT
        assert len(legs(w)) == 1
        assert w.metric("pdproxy_alone_total", reason="unusual") == 1
        assert "transfer_params" not in json.dumps(legs(w)[0])


@pytest.mark.parametrize("name", ["temperature", "top_p", "presence_penalty"])
@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400"])
async def test_numbers_that_are_no_json_are_judged_by_an_engine(name: str, number: str) -> None:
    """NaN and infinities reach an engine, whose answer is the client's."""
    body = (
        json.dumps(completion(**{name: 0})).replace(f'"{name}": 0', f'"{name}": {number}').encode()
    )
    async with world() as w:
        answer = await w.ask(COMPLETIONS, body)
        own = await ask_engine(w, body)
        assert answer.status == own.status
        if own.status != 200:
            assert answer.body == own.body


async def ask_engine(w: World, body: bytes) -> Answer:
    return await exchange(w.decode[0].port, request("POST", COMPLETIONS, body))


async def test_the_body_limit() -> None:
    """A body at the limit passes; one byte more is a 413, whether it says its length or comes in
    chunks.
    """
    async with world(limits={"max_body_bytes": 2000}) as w:
        fits = json.dumps(completion(prompt="")).encode()
        fits = json.dumps(completion(prompt="p" * (2000 - len(fits)))).encode()
        assert len(fits) == 2000
        assert (await w.ask(COMPLETIONS, fits)).status == 200
        answer = await w.ask(COMPLETIONS, fits + b" ")
        assert answer.status == 413
        assert answer.json["error"]["code"] == 413
        assert answer.header("connection") == "close"
        client = await w.client()
        client.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n" + b"7d1\r\n" + b" " * 2001 + b"\r\n0\r\n\r\n"
        )
        assert (await client.answer()).status == 413
        assert len(w.decode[0].requests) == 1


async def test_a_body_far_over_the_limit_still_gets_its_413() -> None:
    """The answer arrives although the client is still sending when it is written."""
    async with world(limits={"max_body_bytes": 1000}) as w:
        answer = await w.ask(COMPLETIONS, b" " * 8_000_000)
        assert answer.status == 413


async def test_a_length_over_the_limit_is_refused_before_the_body() -> None:
    """A client that announces too much gets its 413 at once, and no 100 Continue."""
    async with world(limits={"max_body_bytes": 1000}, deadlines={"client_body": 30}) as w:
        client = await w.client()
        client.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\nexpect: "
            b"100-continue\r\n\r\n"
        )
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (413, "close")
        assert await client.closed()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_unknown_model_gets_the_engines_own_404(path: str) -> None:
    """No engine serves the model: a decode engine says so itself, and no prefill is spent on it."""
    async with world() as w:
        body = completion(model="nope") if path == COMPLETIONS else chat(model="nope")
        answer = await w.ask(path, body)
        assert answer.status == 404
        assert answer.json["error"]["type"] == "NotFoundError"
        assert not w.prefill[0].requests


async def test_a_missing_model_is_served() -> None:
    """As with vLLM, a request without a model goes to the model there is."""
    async with world() as w:
        body = completion()
        del body["model"]
        assert (await w.ask(COMPLETIONS, body)).status == 200
        assert len(w.prefill[0].requests) == 1


async def test_a_chunked_body_is_read() -> None:
    """A client that sends its body in chunks is served like any other."""
    body = json.dumps(completion()).encode()
    async with world() as w:
        client = await w.client()
        client.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for part in (body[:10], body[10:]):
            client.send(b"%x\r\n%b\r\n" % (len(part), part))
        client.send(b"0\r\n\r\n")
        assert (await client.answer()).status == 200
        assert w.decode[0].requests[0].json["prompt"] == PROMPT


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/messages"])
async def test_an_unreadable_body_is_quoted_to_its_sender_alone(path: str) -> None:
    """vLLM's refusal quotes what was sent; the report, which the log is made of, does not."""
    async with world() as w:
        answer = await w.ask(path, json.dumps(MARK).encode())
        assert (answer.status, MARK.encode() in answer.body) == (400, True)
        report = await w.ended()
        assert report.error is not None
        assert MARK not in report.error
