"""What a request has used, on every route that runs a model: what engines count is reported,
charged to the key, and no more.
"""

# Each row of `ROUTES` is asked in all its forms. A route of the table without a row fails the first
# test.

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pdproxy.observe.events import RequestEnded
from pdproxy.serving.access.routes import TABLE, RouteKind
from pdproxy_lab.sim.server import SimServer
from tests.fakes import answers, scripts
from tests.fakes.client import Answer, bearer
from tests.fakes.clock import ManualClock
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.flagged import COHERE, FLAGGED, FLAGS, GENERATE, OPENING, WORDS, cohere, generate
from tests.fakes.passed import FORMS, MESSAGES, RESPONSES, everyone, message, responses
from tests.fakes.pool import pool
from tests.fakes.world import CHAT, COMPLETIONS, PROMPT, World, chat, completion, until, world
from tests.proxy.test_batches import BATCH, batch
from tests.proxy.test_connectors import CONNECTORS, SHAPES, same
from tests.proxy.test_continued import TOKENS, UNBROKEN, cut
from tests.proxy.test_quotas import keys, level
from tests.proxy.test_tenant_salts import tenants

TPM = 60_000
A = bearer("sk-a")
STREAM, ASKED = {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}
SEVERAL = {"n": 3, "temperature": 1, "seed": 4}
LISTED = {"prompt": [PROMPT + "1", PROMPT + "two", [1, 2, 3, 4, 5]][:2]}
INVOCATIONS, SCORING = "/invocations", "/generative_scoring"
MODELS = [e for e in TABLE if e.kind in (RouteKind.SPLIT, RouteKind.PASSED) and e.computes]
"""The routes that run a model."""

Form = tuple[dict[str, Any], dict[str, Any] | None]
"""A body, and the usage with which engines answer that; None: the simulated engine answers, and
counts.
"""


def forms(make: Callable[..., dict[str, Any]], *fields: dict[str, Any]) -> list[Form]:
    """The forms of a route that the simulated engine has."""
    return [(make(**one), None) for one in fields]


def pooled(usage: dict[str, Any]) -> list[Form]:
    """A route of pooling models, which answers with a usage."""
    return [({"model": "tiny", "input": [PROMPT, PROMPT]}, usage)]


PROMPT_ONLY = {
    "prompt_tokens": 41,
    "total_tokens": 41,
    "completion_tokens": 0,
    "prompt_tokens_details": None,
}
IN_BYTES: Form = (
    {"model": "tiny", "input": [PROMPT, PROMPT], "encoding_format": "bytes"},
    PROMPT_ONLY,
)
TOTAL = {"prompt_tokens": 41, "total_tokens": 41}
ROUTES: dict[str, list[Form]] = {
    COMPLETIONS: forms(
        completion,
        *({}, STREAM, ASKED, {**STREAM, "max_tokens": 1}, {"echo": True}, {**STREAM, "echo": True}),
        *(
            SEVERAL,
            {**STREAM, **SEVERAL},
            {**ASKED, **SEVERAL},
            {"prompt": "a"},
            {**STREAM, "prompt": "a"},
        ),
        *(
            LISTED,
            {**STREAM, **LISTED},
            {**ASKED, **LISTED},
            {**STREAM, **SEVERAL, **LISTED},
            {**STREAM, **LISTED, "echo": True},
        ),
    ),
    CHAT: forms(
        chat,
        *({}, STREAM, ASKED, SEVERAL, {**STREAM, **SEVERAL}, {**ASKED, **SEVERAL}),
        *(
            {**STREAM, "include_reasoning": False},
            {**STREAM, "return_token_ids": True},
            {"max_completion_tokens": 7},
        ),
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    BATCH: [*forms(batch, {}, {"max_tokens": 9}), (batch(return_prompt_text=True), None)],
    INVOCATIONS: [
        *forms(chat, {}, STREAM, ASKED),
        *forms(completion, {}, STREAM, LISTED, {**STREAM, **SEVERAL}),
        ({"model": "tiny", "input": [PROMPT, PROMPT]}, PROMPT_ONLY),
    ],
    RESPONSES: [
        *forms(
            responses,
            {},
            STREAM,
            {"max_output_tokens": None},
            {**STREAM, "instructions": "Be brief."},
        ),
        (
            responses(),
            {
                "input_tokens": 31,
                "output_tokens": 5,
                "total_tokens": 36,
                "input_tokens_details": {},
            },
        ),
    ],
    MESSAGES: [
        *forms(message, {}, STREAM, {**STREAM, "max_tokens": 30}),
        (
            message(),
            {
                "input_tokens": 1,
                "cache_read_input_tokens": 32,
                "cache_creation_input_tokens": 8,
                "output_tokens": 5,
            },
        ),
    ],
    GENERATE: forms(
        generate,
        *({}, STREAM, ASKED, {**STREAM, "output_mode": "text"}),
        *({**one, "params": SEVERAL} for one in ({}, STREAM, ASKED)),
        {**STREAM, "params": {"prompt_logprobs": 1}},
    ),
    COHERE: forms(cohere, {}, STREAM, {**STREAM, "max_tokens": "4"}, {"logprobs": True}),
    SCORING: [
        (
            {"model": "tiny", "query": PROMPT, "items": ["a", "b", "c"], "label_token_ids": [5, 6]},
            None,
        )
    ],
    "/v1/decisions": pooled({"input_tokens": 41, "output_tokens": 2, "total_tokens": 43}),
    "/v1/systemone": pooled({"prompt_tokens": 41, "completion_tokens": 2, "total_tokens": 43}),
    "/v1/embeddings": [*pooled(PROMPT_ONLY), IN_BYTES],
    "/pooling": [*pooled(PROMPT_ONLY), IN_BYTES],
    "/classify": pooled(PROMPT_ONLY),
    "/score": pooled(PROMPT_ONLY),
    "/v1/score": pooled(PROMPT_ONLY),
    "/rerank": pooled(TOTAL),
    "/v1/rerank": pooled(TOTAL),
    "/v2/rerank": pooled({"total_tokens": 41}),
}
GENERATING = (COMPLETIONS, CHAT, BATCH, INVOCATIONS, RESPONSES, MESSAGES, *FLAGGED)
"""Those whose answers are as long as the model makes them."""
ALL = [(path, number) for path, rows in ROUTES.items() for number in range(len(rows))]


def test_no_route_is_forgotten() -> None:
    """A route that runs a model has a row above, or its bodies are forms (`test_audio`)."""
    assert {*ROUTES, *FORMS} == {entry.path for entry in MODELS}


def made(engines: list[FakeEngine]) -> tuple[int, int]:
    """Tokens of prompts and answers that engines have counted."""
    return made_by([engine.sim for engine in engines])


def made_by(engines: list[SimServer]) -> tuple[int, int]:
    """The same of simulators."""
    stats = [engine.engine.stats for engine in engines]
    return sum(one.prompt_tokens for one in stats), sum(one.generation_tokens for one in stats)


def counted(usage: dict[str, Any]) -> tuple[int, int]:
    """The same of a usage."""
    usage = usage.get("tokens", usage)
    cached = usage.get("cache_read_input_tokens", 0) + usage.get("cache_creation_input_tokens", 0)
    completion = usage.get("completion_tokens", usage.get("output_tokens", 0))
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", usage.get("total_tokens", 0)))
    return prompt + cached, completion


def charged(w: World, ended: RequestEnded) -> tuple[int, int]:
    """What the access line, the metrics and the key's minute say that a request has used: the
    same.
    """
    found = ended.prompt_tokens or 0, ended.completion_tokens or 0
    assert w.metric("pdproxy_tenant_tokens_total", tenant="a") == sum(found)
    assert w.metric("pdproxy_tokens_total", kind="prompt") == found[0]
    assert w.metric("pdproxy_tokens_total", kind="completion") == found[1]
    assert level(w) == pytest.approx(TPM - sum(found), abs=1e-3)
    return found


def answering(usage: dict[str, Any]) -> Callable[[Reply], Awaitable[None]]:
    """Have an engine answer with a usage. In its words stands another one. An answer in bytes has
    it in a header.
    """

    async def script(reply: Reply) -> None:
        words = {
            "type": "tool_use",
            "input": {"usage": {"input_tokens": 0, "output_tokens": 0}},
            "text": '"usage":{',
        }
        text = json.dumps({"id": "x", "data": [words], "content": [words], "usage": usage}).encode()
        if reply.request.json.get("encoding_format") != "bytes":
            await reply.whole(text)
            return
        await reply.raw(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: 4\r\n"
        )
        await reply.raw(b"metadata: " + text + b"\r\n\r\n\x00\xff{}")

    return script


@pytest.mark.parametrize(("path", "number"), ALL)
async def test_what_engines_count_is_what_the_key_pays(
    tmp_path: Path, path: str, number: int
) -> None:
    """Each token once, on every route, in every form; a client that has not asked for the usage of
    its stream sees none.
    """
    body, usage = ROUTES[path][number]
    clock = ManualClock()
    own = keys(tmp_path, f"a:sk-a tpm={TPM}")
    async with world(auth=own, clock=clock, facts=FLAGS) as w:
        if usage is not None:
            everyone(w, path, answering(usage))
        answer = await w.ask(path, body, A)
        assert (answer.status, answer.ended) == (200, True), answer.body
        ended = await w.ended()
        await w.quiet()
        prompt, generated = counted(usage) if usage is not None else made(w.decode)
        several = body.get("sampling_params", body).get("n", 1)
        # it has loaded the prompt before that, and made a token
        loads = int(usage is None and several > 1 and bool(w.prefill[0].requests))
        expected = (
            prompt // (several + loads),
            generated - loads,
        )  # in its usage, an engine counts a prompt of several answers once
        assert charged(w, ended) == expected
        assert min(expected) > 0 or usage is not None
        generates = (path in GENERATING and "input" not in body) or path == RESPONSES
        shares = w.metric("pdproxy_prompt_tokens_total")
        assert shares == (expected[0] if generates else 0)
        if (
            body.get("stream")
            and path in (COMPLETIONS, CHAT, INVOCATIONS, GENERATE)
            and "stream_options" not in body
        ):
            assert b'"usage":{' not in answer.body
        assert _shown(answer) in (None, expected)


def _shown(answer: Answer) -> tuple[int, int] | None:
    """What the client was told, None if nothing."""
    found = None
    for event in answer.events if answer.body.startswith((b"data:", b"event:")) else [answer.body]:
        text = event.partition(b"data: ")[2] or event
        if text.startswith(b"{"):
            said = json.loads(text)
            inner = said["delta"] if said.get("type") == "message-end" else said
            usage = inner.get("usage")
            found = counted(usage) if isinstance(usage, dict) else found
    return found


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_every_connector_counts_as_one_engine(connector: str) -> None:
    """Whichever engine makes the first token, and whatever the decode engine takes for the
    prompt.
    """
    async with pool(connector) as pair:
        for number, (path, body) in enumerate(SHAPES):
            before = made_by([pair.plain])
            await same(pair, path, body)
            prompt, generated = (
                now - then for now, then in zip(made_by([pair.plain]), before, strict=True)
            )
            ended = await pair.world.ended(number + 1)
            assert (ended.prompt_tokens, ended.completion_tokens) == (prompt, generated), (
                path,
                body,
            )


@pytest.mark.parametrize(
    "path", [entry.path for entry in TABLE if entry.kind is RouteKind.PASSED and not entry.computes]
)
async def test_what_runs_no_model_is_free(tmp_path: Path, path: str) -> None:
    """Whatever stands in the answer: engines have generated nothing, and have prefilled nothing."""
    clock = ManualClock()
    async with world(auth=keys(tmp_path, f"a:sk-a tpm={TPM}"), clock=clock) as w:
        everyone(w, path, answering({"prompt_tokens": 99, "completion_tokens": 99}))
        has_body = path != "/tokenizer_info"
        answer = await w.ask(
            path, message() if has_body else b"", A, method="POST" if has_body else "GET"
        )
        assert answer.status == 200
        assert charged(w, await w.ended()) == (0, 0)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
async def test_a_stream_that_goes_on_elsewhere_counts_once(
    tmp_path: Path, path: str, options: dict[str, Any]
) -> None:
    """The second engine gets what the first one has made as a prompt, and neither counts it twice
    nor forgets it.
    """
    make = completion if path == COMPLETIONS else chat
    body = make(stream=True, max_tokens=TOKENS, **options)
    async with world(decode=2, limits=UNBROKEN) as w:
        expected = w.decode[0].tokenize(body)
        for events in (1, 4, 40):
            await cut(w, f"reset@mid_stream:events={events}", path, body)
            await w.quiet()
        for ended in w.events(RequestEnded):
            assert (ended.prompt_tokens, ended.completion_tokens) == (len(expected), TOKENS)
        assert any(leg.continued for ended in w.events(RequestEnded) for leg in ended.legs)


def events_of(path: str, words: int) -> list[bytes]:
    """The beginning of a stream with so many tokens, without its end."""
    if path == RESPONSES:
        opening = ["created", "in_progress", "output_item.added", "content_part.added"]
        kinds = [f"response.{one}" for one in opening + ["output_text.delta"] * words]
    elif path == MESSAGES:
        kinds = ["message_start", "content_block_start", *["content_block_delta"] * words]
    else:
        others = {COMPLETIONS: scripts.WORD, CHAT: scripts.CHAT_WORD, **WORDS}
        return [*OPENING.get(path, ()), *[others[path]] * words]
    bodies = [{"type": kind} for kind in kinds]
    if path == MESSAGES:
        bodies[0]["message"] = {"usage": {"input_tokens": 23, "output_tokens": 0}}  # type: ignore[assignment]
    return [
        b"event: %b\ndata: %b\n\n" % (body["type"].encode(), json.dumps(body).encode())
        for body in bodies
    ]


STREAMED = {
    COMPLETIONS: completion,
    CHAT: chat,
    RESPONSES: responses,
    MESSAGES: message,
    GENERATE: generate,
    COHERE: cohere,
}


@pytest.mark.parametrize("path", STREAMED)
@pytest.mark.parametrize("how", ["leaves", "eof", "reset"])
async def test_a_stream_that_is_cut_counts_as_far_as_it_was_seen(
    tmp_path: Path, path: str, how: str
) -> None:
    """By its events. The prompt: as the prefill engine has counted it."""
    clock = ManualClock()
    async with world(
        auth=keys(tmp_path, f"a:sk-a tpm={TPM}"),
        clock=clock,
        limits={"continuations": 0},
        facts=FLAGS,
    ) as w:
        script = scripts.streams(*events_of(path, 50), then="stall" if how == "leaves" else how)
        body = STREAMED[path](stream=True, **limited(path, 500))
        w.decode[0].script(script)
        client = await w.client()
        client.post(path, body, A)
        if how == "leaves":
            await client.head()
            seen = b""
            while seen.count(b"\n\n") < len(events_of(path, 50)):
                seen += await client.piece()
            client.close()
        else:
            await client.answer()
        ended = await w.ended()
        prompt, completion_tokens = charged(w, ended)
        assert completion_tokens == 50
        whole = body if path == COMPLETIONS else chat()
        assert prompt == len(body.get("token_ids") or w.prefill[0].tokenize(whole))


@pytest.mark.parametrize("path", STREAMED)
async def test_whoever_leaves_an_answer_that_shows_nothing_pays_for_its_limit(
    tmp_path: Path, path: str
) -> None:
    """Nobody can tell what was made of it. The reports name what is known: the prompt."""
    clock = ManualClock()
    own = keys(tmp_path, f"a:sk-a tpm={TPM}")
    async with world(auth=own, clock=clock, facts=FLAGS) as w:
        asked = asyncio.Event()

        async def silent(reply: Reply) -> None:
            asked.set()
            await reply.stall()

        w.decode[0].script(silent)
        client = await w.client()
        client.post(path, STREAMED[path](**limited(path, 500)), A)
        await asyncio.wait_for(asked.wait(), 30)
        client.close()
        await clock.through(until(lambda: w.events(RequestEnded)), 1.0)
        ended = await w.ended()
        assert (ended.outcome, ended.completion_tokens) == ("client_left", None)
        assert w.metric("pdproxy_tenant_tokens_total", tenant="a") == ended.prompt_tokens
        assert level(w) == TPM - 500 - (ended.prompt_tokens or 0)


@pytest.mark.parametrize("path", STREAMED)
@pytest.mark.parametrize("status", [400, 500])
async def test_a_failure_costs_the_prompt_and_a_refusal_before_it_nothing(
    tmp_path: Path, path: str, status: int
) -> None:
    clock = ManualClock()
    async with world(
        auth=keys(tmp_path, f"a:sk-a tpm={TPM}"),
        clock=clock,
        limits={"attempts": 1},
        facts=FLAGS,
    ) as w:
        fails = scripts.whole(answers.error("no", "BadRequestError", status), status)
        whole = path in (RESPONSES, MESSAGES)
        for engine in w.decode if not whole else []:
            engine.default = fails
        if whole:
            everyone(w, path, fails)
        body = STREAMED[path](stream=False)
        assert (await w.ask(path, body, A)).status == status
        prompt, completion_tokens = charged(w, await w.ended())
        assert completion_tokens == 0
        assert (prompt > 0) is (status == 500 or not whole), "a prefill engine has computed those"


REFUSED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, completion()),
    (COMPLETIONS, completion(stream=True)),
    (COMPLETIONS, completion(**LISTED)),
    (COMPLETIONS, completion(stream=True, **LISTED)),
    (BATCH, batch()),
    (INVOCATIONS, chat()),
    (INVOCATIONS, completion(**LISTED)),
]


@pytest.mark.parametrize(("path", "body"), REFUSED)
async def test_prompts_that_were_prefilled_are_paid_whoever_refuses_them_then(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """A client chooses what only the decode engine reads: a wrong grammar, too many logprobs. Each
    prompt is paid once.
    """
    clock = ManualClock()
    async with world(auth=keys(tmp_path, f"a:sk-a tpm={TPM}"), clock=clock) as w:
        fails, asked = (
            scripts.whole(answers.error("no", "BadRequestError", 400), 400),
            asyncio.Event(),
        )
        prompts = (
            len(body["messages"])
            if path == BATCH
            else 2
            if isinstance(body.get("prompt"), list)
            else 1
        )
        waiting = 0

        async def refuse(reply: Reply) -> None:
            nonlocal waiting
            waiting += 1
            if waiting == prompts:
                asked.set()
            await asked.wait()
            await fails(reply)

        w.decode[0].default = refuse
        if path != COMPLETIONS:
            everyone(w, path, fails)
        assert (await w.ask(path, body, A)).status == 400
        await w.quiet()
        computed, _ = made(w.prefill)
        assert computed > 0
        assert charged(w, await w.ended()) == (computed, 0)


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("wrong", [{"structured_outputs": {"regex": "("}}, {"max_tokens": 10**7}])
async def test_every_connector_counts_what_was_refused_behind_its_prefill(
    connector: str, wrong: dict[str, Any]
) -> None:
    """Also where the prefill engine makes the first token, and one engine is asked alone after the
    refusal.
    """
    async with pool(connector) as pair:
        path, body = SHAPES[0]
        before = made_by([pair.p])
        assert (await pair.ask(path, {**body, **wrong})).status == 400
        ended = await pair.world.ended()
        computed = made_by([pair.p])[0] - before[0]
        assert ended.prompt_tokens is not None
        assert computed > 0
        assert 0 <= ended.prompt_tokens - computed <= 1, (
            "with `lmcache-pd`, another engine may compute the last token"
        )


def limited(path: str, tokens: int) -> dict[str, Any]:
    """The fields that bound an answer."""
    if path == GENERATE:
        return {"params": {"max_tokens": tokens}}
    return {"max_output_tokens" if path == RESPONSES else "max_tokens": tokens}


@pytest.mark.parametrize("path", STREAMED)
@pytest.mark.parametrize("limit", [100, 700, 1900])
async def test_many_at_once_get_no_more_than_their_minute(
    tmp_path: Path, path: str, limit: int
) -> None:
    """In 30 s a key gets its minute and half of another one, also while others' short answers pull
    every mean down.
    """
    clock = ManualClock()
    async with world(
        auth=keys(tmp_path, "a:sk-a tpm=2000\nb:sk-b"),
        adjust=tenants(caches="shared" if path == COHERE else "auto"),
        clock=clock,
        facts={**FLAGS, "max_model_len": 4096},
    ) as w:
        for _ in range(20):
            assert (
                await w.ask(path, STREAMED[path](**limited(path, 1)), bearer("sk-b"))
            ).status == 200
        others = made(w.decode)
        body = STREAMED[path](stream=limit != 700, **limited(path, limit))
        found: list[Answer] = []
        for _ in range(15):
            found += await asyncio.gather(*(w.ask(path, body, A) for _ in range(6)))
            await w.quiet()
            await clock.advance(2.0)
        used = sum(made(w.decode)) - sum(others)
        assert 1900 <= used <= 2000 + 1000
        assert {one.status for one in found} == {200, 429}
        refused = [one for one in found if one.status == 429]
        assert all(1 <= int(one.header("retry-after") or 0) <= 60 for one in refused)
        errors = [one.json.get("error", one.json) for one in refused]
        assert all("tokens per minute" in error["message"] for error in errors)
        assert all(("reason" in error) is (path not in (MESSAGES, COHERE)) for error in errors), (
            "Anthropic's shape and Cohere's have none"
        )
