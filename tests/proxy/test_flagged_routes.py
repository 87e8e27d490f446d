"""`/inference/v1/generate` and `/cohere/v2/chat` on two engines: answers are one engine's, keys
bind, failures are honest, and no KV stays behind.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdproxy.observe.events import RequestEnded, ServedAlone
from tests.fakes import scripts
from tests.fakes.client import bearer, exchange, request
from tests.fakes.engine import Reply, Script
from tests.fakes.flagged import COHERE, FLAGGED, FLAGS, GENERATE, MAKE, OPENING, WORDS
from tests.fakes.passed import shape
from tests.fakes.scripts import streams
from tests.fakes.world import LONG, PROMPT, World, world
from tests.proxy.test_key_rights import KEY, auth
from tests.proxy.test_tenant_salts import tenants
from tests.proxy.test_turns import talking

ROUTES = pytest.mark.parametrize("path", FLAGGED)
STREAM = pytest.mark.parametrize("stream", [False, True])
SHARED = tenants(caches="shared")
NAMED = [("x-request-id", "a")]
"""Errors of Cohere's chat name the request's id."""


def body(path: str, **fields: Any) -> dict[str, Any]:
    """A request that can be split."""
    return MAKE[path](**fields)


@asynccontextmanager
async def flagged(*roles: int, **fields: Any) -> AsyncIterator[World]:
    """A world whose engines have the routes."""
    async with world(*roles, facts=FLAGS, **fields) as w:
        yield w


def still(event: bytes) -> Any:
    """An event, or an answer, without what differs between two answers to one request."""
    if b"[DONE]" in event:
        return event
    name, data = shape(event)
    for one in ("request_id", "created"):
        data.pop(one, None)
    return name, data


def alone(w: World) -> list[str]:
    """Why prompts were served alone."""
    return [event.reason for event in w.events(ServedAlone)]


def limit(path: str, sent: dict[str, Any]) -> int:
    """The most tokens that a leg asks for."""
    found: int = (sent["sampling_params"] if path == GENERATE else sent)["max_tokens"]
    return found


SPLIT: list[tuple[str, dict[str, Any]]] = [
    (GENERATE, {}),
    (GENERATE, {"return_token_ids": True}),
    (GENERATE, {"output_mode": "text"}),
    (GENERATE, {"stream_options": {"include_usage": True}}),
    (GENERATE, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    (GENERATE, {"params": {"logprobs": 2}}),
    (GENERATE, {"params": {"min_tokens": 3, "stop_token_ids": [1]}}),
    (GENERATE, {"params": {"max_tokens": 4.0, "n": 1}}),
    (GENERATE, {"params": {"extra_args": {"kv_transfer_params": {"do_remote_prefill": True}}}}),
    (GENERATE, {"kv_transfer_params": {"do_remote_prefill": True, "prompt_token_ids": [1]}}),
    (COHERE, {}),
    (COHERE, {"logprobs": True}),
    (COHERE, {"stop_sequences": ["q"], "k": 3, "p": 0.9, "seed": 3}),
    (COHERE, {"messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]}),
    (COHERE, {"kv_transfer_params": {"do_remote_prefill": True}, "priority": 3}),
]


@STREAM
@pytest.mark.parametrize(("path", "fields"), SPLIT, ids=str)
async def test_split_as_by_one_engine(path: str, fields: dict[str, Any], stream: bool) -> None:
    """The prefill engine makes one token, the decode engine loads the KV, and the answer is one
    engine's.
    """
    if not stream and "stream_options" in fields:
        return
    asked = body(path, stream=stream, **fields)
    async with flagged() as w:
        answer = await w.ask(path, asked)
        plain = {**asked, "kv_transfer_params": None}
        if path == GENERATE:
            plain["sampling_params"] = {**plain["sampling_params"], "extra_args": None}
        direct = await exchange(w.decode[0].port, request("POST", path, plain))
        assert (answer.status, answer.ended) == (200, True), answer.body
        ours, theirs = (
            [still(event) for event in (one.events if stream else [one.body])]
            for one in (answer, direct)
        )
        assert ours == theirs
        (made,), (loaded, _) = w.prefill[0].requests, w.decode[0].requests
        assert {made.path, loaded.path} == {path}
        assert (limit(path, made.json), made.json["stream"]) == (1, False)
        assert (limit(path, loaded.json), loaded.json["stream"]) == (4, stream)
        assert loaded.kv is not None
        await w.quiet()
        (history,) = w.books.history.values()
        assert history == ["given", "asked", "loaded"]
        assert not alone(w)
        used = await w.ended()
        assert (used.endpoint, used.completion_tokens) == (path, 4)
        assert (used.legs[0].prefill, used.legs[0].decode) == (w.prefill[0].url, w.decode[0].url)


ENDED = (
    b'data: {"type": "message-end", "delta": {"error": "x", "finish_reason": "ERROR"}}\n\n',
    b'data: {"id":"a","delta":{"finish_reason":"COMPLETE"},"type":"message-end"}\n\n',
)
"""Ends of an answer of Cohere's chat that has failed, and of one that was given up."""
ERROR = b'data: {"error": {"message": "x", "type": "InternalServerError", "code": 500}}\n\n'
DONE = b"data: [DONE]\n\n"
BEFORE_DATA: dict[str, Script] = {
    "500": scripts.whole(b"{}", 500),
    "reset": scripts.reset,
    "headers, then eof": streams(then="eof"),
    "an empty stream": streams(),
    "the end": streams(DONE),
    "an error": streams(ERROR, DONE),
}


@ROUTES
@pytest.mark.parametrize("how", BEFORE_DATA)
async def test_another_decode_engine_with_a_fresh_prefill(path: str, how: str) -> None:
    """The client sees nothing of a stream that fails before its first token."""
    async with flagged(1, 2) as w:
        first = w.decode[1]
        first.script(BEFORE_DATA[how])
        answer = await w.ask(path, body(path, stream=True))
        assert (answer.status, answer.ended) == (200, True)
        assert b"rror" not in answer.body
        assert len(w.prefill[0].requests) == 2
        assert w.metric("pdproxy_leg_failures_total", node=first.url, phase="decode") == 1
        await w.quiet()
        assert not alone(w)


@ROUTES
@pytest.mark.parametrize("then", ["eof", "reset", "finish", "stall", "error", "given up", "done"])
async def test_a_stream_that_fails_ends_with_an_error_of_the_api(path: str, then: str) -> None:
    """No other engine can go on with it."""
    aborted = WORDS[path].replace(b'"finish_reason":null', b'"finish_reason":"abort"')
    error, aborted = ENDED if path == COHERE else (ERROR, aborted)
    last = {"error": error + DONE, "given up": aborted + DONE, "done": DONE}.get(then, b"")
    events = [*OPENING[path], WORDS[path], WORDS[path]]

    async def script(reply: Reply) -> None:
        await reply.start()
        await reply.pieces(*events)
        await w.flowing(w.decode[1])
        if last:
            await reply.piece(last)
        await scripts.ending(reply, then if then in ("eof", "reset", "stall") else "finish")

    async with flagged(1, 2, deadlines={"between_tokens": 0.3 if then == "stall" else LONG}) as w:
        w.decode[1].script(script)
        answer = await w.ask(path, body(path, stream=True))
        assert (answer.status, answer.ended, answer.events[: len(events)]) == (200, True, events)
        said, *end = answer.events[len(events) :]
        found = json.loads(said.removeprefix(b"data: "))
        if path == COHERE:
            assert (found["type"], found["delta"]["finish_reason"]) == ("message-end", "ERROR")
            assert (bool(found["delta"]["error"]), end) == (True, [DONE])
        else:
            assert (set(found), end) == ({"error"}, [])
        assert b"http" not in said, "where engines are is not for clients"
        assert w.metric("pdproxy_continuations_total", result="refused", reason="route") == 1
        ended = await w.ended()
        assert (ended.outcome, w.decode[0].requests) == ("engine", [])
        assert ended.completion_tokens == 2
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
            await reply.pieces(*OPENING[path], WORDS[path])
        await reply.stall()

    async with flagged() as w:
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


REASONS: list[tuple[str, str, dict[str, Any]]] = [
    ("unusual", GENERATE, {"params": {"n": 2, "temperature": 0}}),
    ("prompt_logprobs", GENERATE, {"params": {"prompt_logprobs": 1}}),
    ("non_text", GENERATE, {"content_parts": [{"type": "image_url", "url": "data:,"}]}),
    ("non_text", GENERATE, {"features": {"mm_hashes": {}, "mm_placeholders": {}}}),
    ("unusual", GENERATE, {"params": {"max_tokens": "4"}}),
    ("unusual", GENERATE, {"params": {"max_tokens": 0}}),
    ("unusual", GENERATE, {"params": {"min_tokens": 5}}),
    ("unusual", GENERATE, {"params": {"skip_reading_prefix_cache": True}}),
    ("unusual", GENERATE, {"sampling_params": None}),
    ("unusual", GENERATE, {"token_ids": []}),
    ("unusual", GENERATE, {"token_ids": "ids"}),
    ("unusual", COHERE, {"max_tokens": "4"}),
    ("unusual", COHERE, {"max_tokens": 0}),
    ("unusual", COHERE, {"messages": []}),
    ("prompt_ids", COHERE, {"kv_transfer_params": {"prompt_token_ids": [7] * 40}}),
]


@STREAM
@pytest.mark.parametrize(("reason", "path", "fields"), REASONS, ids=str)
async def test_what_goes_whole_to_one_engine(
    reason: str, path: str, fields: dict[str, Any], stream: bool
) -> None:
    """One engine gets it on its route and answers, or refuses, in its own words; the reason is
    counted.
    """
    asked = body(path, stream=stream, **fields)
    async with flagged() as w:
        answer = await w.ask(path, asked, NAMED)
        direct = await exchange(w.decode[0].port, request("POST", path, asked, NAMED))
        ours, plain = (
            [still(event) for event in (one.events if stream and one.status == 200 else [one.body])]
            for one in (answer, direct)
        )
        assert (answer.status, ours) == (direct.status, plain)
        assert (alone(w), w.prefill[0].requests) == ([reason], [])


@pytest.mark.parametrize("fields", [{"url": "http://inside/x"}, {"url": "file:///etc/passwd"}])
async def test_media_by_url_are_not_fetched(fields: dict[str, Any]) -> None:
    """As on all routes."""
    async with flagged() as w:
        answer = await w.ask(
            GENERATE, body(GENERATE, content_parts=[{"type": "image_url"} | fields])
        )
        assert (answer.status, answer.json["error"]["param"]) == (400, "content_parts")
        assert not w.decode[0].requests


@STREAM
@ROUTES
async def test_a_refusal_has_the_engines_own_words(path: str, stream: bool) -> None:
    """Whatever an engine said to a leg."""
    asked = body(path, stream=stream, model="other")
    async with flagged() as w:
        answer = await w.ask(path, asked, NAMED)
        direct = await exchange(w.decode[0].port, request("POST", path, asked, NAMED))
        assert (answer.status, answer.json) == (direct.status, direct.json)
        await w.quiet()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            GENERATE,
            b'{"error":{"message":"x","type":"BadRequestError","param":"temperature","code":400}}',
        ),
        (COHERE, b'{"message":"x","id":"a"}'),
    ],
)
async def test_kv_of_a_request_that_a_decode_engine_refuses(path: str, said: bytes) -> None:
    """No engine frees it on the first route, and on the other one nobody can tell: the proxy has it
    freed.
    """
    async with flagged() as w:
        w.decode[0].script(scripts.whole(said, 400))
        answer = await w.ask(path, body(path))
        assert (answer.status, answer.body) == (400, said)
        await w.quiet()
        (history,) = w.books.history.values()
        assert history == ["given", "asked", "released"]


async def test_tenants_whose_caches_are_apart_have_no_route_without_a_salt() -> None:
    """Engines drop `cache_salt` there: one tenant could find another one's prompts."""
    async with flagged(auth={"api_keys": ("sk-a", "sk-b")}) as w:
        answer = await w.ask(COHERE, body(COHERE), bearer("sk-a"))
        assert (answer.status, set(answer.json)) == (403, {"message"})
        assert "tenants.caches" in answer.json["message"]
        assert (await w.ask(GENERATE, body(GENERATE), bearer("sk-a"))).status == 200
        salts = {engine.requests[-1].json["cache_salt"] for engine in (*w.prefill, *w.decode)}
        assert len(salts) == 1
        assert not [one for engine in w.engines for one in engine.requests if one.path == COHERE]


@STREAM
@ROUTES
async def test_engines_without_the_route(path: str, stream: bool) -> None:
    """Their answer is the client's: nothing is tried again, and no engine is taken for broken."""
    async with world(2, 2) as w:
        answers = [await w.ask(path, body(path, stream=stream)) for _ in range(8)]
        direct = await exchange(w.decode[0].port, request("POST", path, body(path)))
        assert {one.status for one in answers} == {direct.status}
        assert {one.body for one in answers} == {direct.body}
        assert direct.status in (403, 404)
        assert len(w.events(RequestEnded)) == 8
        assert (await w.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})).status == 200
        assert w.metric("pdproxy_leg_failures_total") == 0
        assert w.metric("pdproxy_retries_total") == 0


OVER: list[tuple[str, str, dict[str, Any], str | None]] = [
    ("max_tokens=3", GENERATE, {}, "max_tokens"),
    ("max_tokens=3", GENERATE, {"params": {"max_tokens": "3"}}, "max_tokens"),
    ("max_tokens=3", GENERATE, {"sampling_params": 5}, "sampling_params"),
    ("max_tokens=3", GENERATE, {"sampling_params": [3]}, "sampling_params"),
    ("max_tokens=9", GENERATE, {"params": {"bad_words": ["x" * 2**18]}}, "sampling_params"),
    ("n=2", GENERATE, {"params": {"n": 3}}, "n"),
    ("n=2", GENERATE, {"params": {"n": 1e3}}, "n"),
    ("n=2", GENERATE, {"sampling_params": None}, "sampling_params"),
    ("max_tokens=3", COHERE, {}, "max_tokens"),
    ("max_tokens=3", COHERE, {"max_tokens": "3"}, "max_tokens"),
    ("routes=chat", COHERE, {}, None),
    ("routes=cohere", GENERATE, {}, None),
]


@pytest.mark.parametrize(("words", "path", "fields", "param"), OVER, ids=range(len(OVER)))
async def test_what_a_key_is_not_good_for(
    tmp_path: Path, words: str, path: str, fields: dict[str, Any], param: str | None
) -> None:
    """403 before any engine is asked."""
    async with flagged(auth=auth(tmp_path, words), adjust=SHARED) as w:
        answer = await w.ask(path, body(path, **fields), bearer(KEY))
        assert answer.status == 403
        if path == COHERE:
            assert "This API key" in answer.json["message"]
        else:
            assert answer.json["error"]["param"] == param
        assert not [one for engine in w.engines for one in engine.requests]


@STREAM
@ROUTES
async def test_a_request_without_a_limit_gets_the_keys(
    tmp_path: Path, path: str, stream: bool
) -> None:
    """Where the engine reads it."""
    async with flagged(auth=auth(tmp_path, "max_tokens=3"), adjust=SHARED) as w:
        none = {"max_tokens": None}
        asked = body(path, stream=stream, **({"params": none} if path == GENERATE else none))
        assert (await w.ask(path, asked, bearer(KEY))).status == 200
        assert (await w.ended()).completion_tokens == 3
        assert limit(path, w.decode[0].requests[0].json) == 3


async def test_the_priority_in_the_body_counts(tmp_path: Path) -> None:
    """Engines do not read the header on this route: what a key may not have is changed in the
    body.
    """
    async with flagged(auth=auth(tmp_path, "priority=0..5")) as w:
        for sent, got in ((-7, 0), (9, 5), (3, 3), ("-7", 0)):
            asked = body(GENERATE, priority=sent)
            await w.ask(GENERATE, asked, [*bearer(KEY), ("x-vllm-priority", "1")])
            assert w.decode[0].requests[-1].json["priority"] == got
            assert w.prefill[0].requests[-1].json["priority"] == got


async def test_answers_of_engines_that_keep_turns_have_their_ids() -> None:
    """The proxy takes ids out of answers on other routes, where the client has not asked for
    them.
    """
    async with talking(everybody=FLAGS) as pair:
        answer = await pair.ask(GENERATE, body(GENERATE))
        plain = await pair.asked_plain(GENERATE, body(GENERATE))
        assert answer.json["choices"] == plain.json["choices"]
        assert answer.json["prompt_token_ids"] is None
