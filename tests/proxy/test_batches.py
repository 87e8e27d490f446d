"""A batch of chats: one exchange each, and one answer as a single engine would have given it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pdproxy.kit.errors import BadRequestError
from pdproxy.wire.body_bounds import LARGE, Bounds
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Alone
from pdproxy_lab.sim.journal import Request
from tests.fakes import answers, scripts
from tests.fakes.client import Answer
from tests.fakes.engine import Reply, prefill
from tests.fakes.passed import asked
from tests.fakes.world import CHAT, LONG, PROMPT, World, chat, until, world

BATCH = "/v1/chat/completions/batch"
TEXTS = [PROMPT + "1", PROMPT * 2, PROMPT + "333"]


def user(text: Any) -> list[dict[str, Any]]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def batch(**fields: Any) -> dict[str, Any]:
    """The body of a batch of three chats."""
    return {
        "model": "tiny",
        "messages": [user(text) for text in TEXTS],
        "max_tokens": 4,
        "temperature": 0,
        **fields,
    }


async def both(w: World, path: str, body: object) -> tuple[Answer, Answer]:
    """The proxy's answer, and that of an engine that is asked directly."""
    headers = [("x-request-id", "r")]
    ours = await w.ask(path, body, headers)
    w.port, port = w.decode[0].port, w.port
    plain = await w.ask(path, body, headers)
    w.port = port
    return ours, plain


def still(answer: Answer) -> tuple[int, str | None, Any]:
    """An answer without its time, in the order of its fields."""
    body = answer.json
    if "created" in body:
        body["created"] = 0
    return answer.status, answer.header("content-type"), json.dumps(body)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"messages": [user(PROMPT)]},
        {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        {
            "max_tokens": None,
            "max_completion_tokens": 3,
            "stop": [" the"],
            "seed": 1,
            "request_id": "mine",
        },
        {
            "tool_choice": "none",
            "include_reasoning": True,
            "n": 1,
            "stream": False,
            "response_format": {"type": "text"},
        },
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {
            "messages": [
                user([{"type": "text", "text": PROMPT}]),
                [*user(PROMPT), {"role": "assistant", "content": "a"}],
            ]
        },
    ],
    ids=["plain", "one", "logprobs", "limits", "defaults", "choice", "parts"],
)
async def test_a_batch_is_answered_as_by_one_engine(fields: dict[str, Any]) -> None:
    """Every byte but the time; each conversation has a handle of its own, and none goes to one
    engine alone.
    """
    async with world(prefill=2, decode=2, facts={"enable_prompt_tokens_details": True}) as w:
        ours, plain = await both(w, BATCH, batch(**fields))
        assert ours.status == 200
        assert still(ours) == still(plain)
        await w.quiet()
        count = len(ours.json["choices"])
        assert w.books.endings == {"loaded": count}
        report = await w.ended()
        assert (report.endpoint, len(report.legs)) == (BATCH, count)
        assert report.prompt_tokens == ours.json["usage"]["prompt_tokens"]
        assert all(leg.prefill is not None for leg in report.legs)
        assert sum(asked(engine, BATCH) for engine in w.engines) == 1, (
            "the one that was asked directly"
        )


async def test_a_batch_of_thoughts_is_answered_as_by_one_engine() -> None:
    """With a reasoning parser, whose token counts a batch does not report."""
    async with world(facts={"reasoning_parser": "deepseek_r1"}) as w:
        ours, plain = await both(w, BATCH, batch(max_tokens=40))
        assert still(ours) == still(plain)
        assert ours.json["choices"][0]["message"]["reasoning"]
        assert ours.json["usage"]["completion_tokens_details"] is None


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"n": "x"},
        {"use_beam_search": True},
        {"logprob_token_ids": [1]},
        {"tool_choice": "auto"},
        {"tools": []},
        {"messages": []},
        {"messages": [user(PROMPT), []]},
        {"messages": user(PROMPT)},
        {"messages": [user(PROMPT), "x"]},
        {"messages": None},
        {"temperature": "hot"},
        {"temperature": 9},
        {"max_tokens": 0},
        {"max_tokens": 10**9},
        {"top_logprobs": 2},
        {"continue_final_message": True},
        {"stream_options": {"include_usage": True}},
        {"model": "nope"},
        {"structured_outputs": {"choice": ["a"], "regex": "b"}},
        {"seed": 2**70},
        {"kv_transfer_params": {"prompt_token_ids": [300, 301]}},
    ],
    ids=str,
)
async def test_what_an_engine_refuses_of_a_batch_it_refuses_here(fields: dict[str, Any]) -> None:
    """Status and body are those of vLLM's own route, whichever part of the request is wrong."""
    async with world() as w:
        ours, plain = await both(w, BATCH, batch(**fields))
        assert ours.status >= 400
        assert (ours.status, ours.body) == (plain.status, plain.body)
        await w.quiet()


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"echo": True},
        {"prompt_logprobs": 1},
        {"include_reasoning": False, "logprobs": True},
        {"return_prompt_text": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
    ids=str,
)
async def test_what_a_batch_treats_otherwise_than_a_chat_one_engine_serves(
    fields: dict[str, Any],
) -> None:
    """Such a batch goes whole to one engine; a batch is never streamed."""
    async with world() as w:
        ours, plain = await both(w, BATCH, batch(**fields))
        assert ours.status == 200
        assert still(ours) == still(plain)
        assert not w.prefill[0].requests
        assert asked(w.decode[0], BATCH) == 2
        assert (await w.ended()).legs[0].decode == w.decode[0].url


async def test_one_conversation_that_is_refused_refuses_the_batch() -> None:
    """One whose length only an engine knows: no other conversation is answered, and no KV is
    left.
    """
    async with world(facts={"max_model_len": 200, "num_gpu_blocks": 512}) as w:
        ours, plain = await both(w, BATCH, batch(messages=[user(PROMPT), user(PROMPT * 30)]))
        assert (ours.status, ours.body) == (plain.status, plain.body)
        assert ours.status == 400
        await w.quiet()


async def test_answers_are_not_kept_for_a_batch_that_one_engine_gets_after_all() -> None:
    """Those to the other conversations will not be sent."""
    async with world(facts={"max_model_len": 200, "num_gpu_blocks": 512}) as w:
        answered = asyncio.Event()

        async def last(reply: Reply) -> None:
            if reply.request.json["messages"] != user(PROMPT):
                await answered.wait()
            await prefill(reply)

        w.prefill[0].default = last
        w.decode[0].admin = {BATCH: scripts.stall}
        client = await w.client()
        client.post(BATCH, batch(messages=[user(PROMPT), user(PROMPT * 30)]))
        await until(lambda: w.metric("pdproxy_held_bytes", what="answers"))
        answered.set()
        await until(lambda: asked(w.decode[0], BATCH))
        assert not w.metric("pdproxy_held_bytes", what="answers")
        client.close()
        await w.ended()


async def test_a_content_that_is_not_text_is_served_by_one_engine() -> None:
    """The rule holds for each conversation by itself; what the engines say of it is the batch's
    answer.
    """
    image = [{"type": "image_url", "image_url": {"url": "data:,"}, "uuid": "a"}]
    async with world() as w:
        ours, plain = await both(w, BATCH, batch(messages=[user(PROMPT), user(image)]))
        assert (ours.status, ours.body) == (plain.status, plain.body)
        assert w.metric("pdproxy_alone_total", reason="non_text") == 1


async def test_an_engine_that_fails_fails_the_batch() -> None:
    """A 500 in one conversation, on every engine: the client gets an error, the other legs are
    closed.
    """

    async def one_fails(reply: Reply) -> None:
        if reply.request.json["messages"] == user(TEXTS[1]):
            await reply.whole(answers.INTERNAL_500, 500)
        else:
            await prefill(reply)

    async with world() as w:
        w.decode[0].default = one_fails
        answer = await w.ask(BATCH, batch())
        assert (answer.status, answer.body) == (500, answers.INTERNAL_500)
        assert not asked(w.decode[0], BATCH)
        await w.quiet()


@pytest.mark.parametrize("at", ["prefill", "decode"])
async def test_a_client_that_leaves_ends_all_conversations(at: str) -> None:
    """At whichever engine they are: legs are closed, KV is given back, nothing stays in flight."""
    async with world() as w:
        engine = w.prefill[0] if at == "prefill" else w.decode[0]
        go = asyncio.Event()
        engine.default = scripts.gate(go, prefill) if at == "prefill" else scripts.stall
        client = await w.client()
        client.post(BATCH, batch())
        await engine.asked(3)
        requests: list[Request] = engine.requests
        client.close()
        assert (await w.ended()).outcome == "client_left"
        go.set()
        if at == "decode":
            await asyncio.gather(*(request.left.wait() for request in requests))
        await w.settled()
        assert sum(w.books.endings.values()) == 3
        assert "loaded" not in w.books.endings


async def test_a_client_that_leaves_a_batch_that_one_engine_serves() -> None:
    """That engine's leg is closed."""
    async with world() as w:
        w.decode[0].admin = {BATCH: scripts.stall}
        client = await w.client()
        client.post(BATCH, batch(echo=True))
        await until(lambda: asked(w.decode[0], BATCH))
        request = next(one for one in w.decode[0].sim.journal.others if one.path == BATCH)
        client.close()
        await asyncio.wait_for(request.left.wait(), LONG)
        assert (await w.ended()).outcome == "client_left"


async def test_a_batch_takes_one_place_and_sixteen_engines_requests_at_once() -> None:
    """As a list of prompts; the others wait for their turn."""
    go = asyncio.Event()
    async with world() as w:
        w.prefill[0].default = scripts.gate(go, prefill)
        client = await w.client()
        client.post(BATCH, batch(messages=[user(f"{PROMPT}{n}") for n in range(40)]))
        await w.prefill[0].asked(16)
        assert w.inflight == 1
        assert len(w.prefill[0].requests) == 16
        go.set()
        answer = await client.answer()
        assert [choice["index"] for choice in answer.json["choices"]] == list(range(40))


async def test_a_batch_of_too_many_conversations() -> None:
    """`limits.max_prompts` counts them: a 400 that names the field, without an engine; also in a
    body that is not plain JSON.
    """
    async with world(limits={"max_prompts": 3}) as w:
        assert (await w.ask(BATCH, batch())).status == 200
        requests = len(w.prefill[0].requests)
        many = batch(messages=[user("a")] * 4)
        for body in (
            many,
            batch(messages=[user("a")] * 4, echo=True),
            json.dumps(many).encode("utf-16"),
        ):
            answer = await w.ask(BATCH, body)
            assert answer.status == 400
            assert answer.json["error"]["param"] == "messages"
            assert "more than 3 prompts" in answer.json["error"]["message"]
        strange = json.dumps(many).replace('"role"', '"x": NaN, "role"').encode()
        assert "more than 3 prompts" in (await w.ask(BATCH, strange)).json["error"]["message"]
        assert len(w.prefill[0].requests) == requests
        assert not asked(w.decode[0], BATCH)


async def test_a_large_batch_is_read_in_another_process() -> None:
    """The answer is the same, and so are the limits."""
    texts = [f"{n} " + "x" * (LARGE // 40) for n in range(45)]
    body = batch(messages=[user(text) for text in texts], max_tokens=1)
    async with world(facts={"max_model_len": 40_000, "num_gpu_blocks": 4096}) as w:
        ours, plain = await both(w, BATCH, body)
        assert ours.status == 200
        assert still(ours) == still(plain)
        assert w.proxy.bodies.workers is not None
    async with world(limits={"max_prompts": 44}) as w:
        assert "more than 44 prompts" in (await w.ask(BATCH, body)).json["error"]["message"]


async def test_handles_of_clients_are_removed_from_batches() -> None:
    """In exchanges and in a batch that goes whole."""
    async with world() as w:
        for fields in ({}, {"echo": True}):
            forged = {"do_remote_prefill": True, "remote_engine_id": "x"}
            assert (await w.ask(BATCH, batch(kv_transfer_params=forged, **fields))).status == 200
        whole = next(one for one in w.decode[0].sim.journal.others if one.path == BATCH)
        assert "kv_transfer_params" not in whole.json


async def test_no_engines_load_comes_with_a_batch() -> None:
    """vLLM reports it with the answer to a chat only."""
    wanted = [("endpoint-load-metrics-format", "JSON")]
    async with world() as w:
        assert (await w.ask(CHAT, chat(), wanted)).header("endpoint-load-metrics") is not None
        answer = await w.ask(BATCH, batch(), wanted)
        w.port, port = w.decode[0].port, w.port
        plain = await w.ask(BATCH, batch(), wanted)
        w.port = port
        assert (
            answer.header("endpoint-load-metrics") == plain.header("endpoint-load-metrics") is None
        )


async def test_keys_guard_batches() -> None:
    """Without one of the proxy's keys, nothing is read."""
    async with world(auth={"api_keys": ("ours",), "engine_api_key": "theirs"}) as w:
        assert (await w.ask(BATCH, batch())).status == 401
        for fields in ({}, {"echo": True}):
            answer = await w.ask(BATCH, batch(**fields), [("authorization", "Bearer ours")])
            assert answer.status == 200
        seen = [
            *w.decode[0].requests,
            *(one for one in w.decode[0].sim.journal.others if one.path == BATCH),
        ]
        assert {one.header("authorization") for one in seen} == {"Bearer theirs"}


async def test_a_get_of_the_route() -> None:
    """As of every other route."""
    async with world() as w:
        answer = await w.get(BATCH)
        assert (answer.status, answer.header("allow")) == (405, "POST")


def test_each_conversation_becomes_a_chat() -> None:
    """Its bytes are the client's, and all other fields go with it."""
    raw = (
        b'{"messages" : [ [{"content":"a","role":"user"}] ,[ {"role": "user", "content": "bcd"} '
        b'] ],"seed":1}'
    )
    parsed = parse(Route.BATCH, raw)
    assert parsed.alone is None
    chats = [parsed.exchange_of(index)[0] for index in range(2)]
    assert [bytes(chat.fields["messages"]) for chat in chats] == [
        b'[{"content":"a","role":"user"}]',
        b'[ {"role": "user", "content": "bcd"} ]',
    ]
    assert {chat.route for chat in chats} == {Route.CHAT}
    assert bytes(chats[0].fields["seed"]) == b"1"
    assert chats[0].body_bytes < chats[1].body_bytes < parsed.body_bytes


@pytest.mark.parametrize(
    "messages", [b"[[1,2]]", b"[{}]", b"{}", b"[[]]", b'"x"', b"[[{}],[]]", b"null"]
)
def test_what_is_no_batch_goes_whole(messages: bytes) -> None:
    """Only engines have the words for it."""
    parsed = parse(Route.BATCH, b'{"messages":%b}' % messages, Bounds(prompts=4))
    assert parsed.goes_whole
    assert parsed.alone is Alone.UNUSUAL


def test_conversations_beyond_the_limit_are_not_made() -> None:
    """The list is refused by its length."""
    with pytest.raises(BadRequestError, match="more than 2"):
        parse(Route.BATCH, b'{"messages":[[{}],[{}],[{}]]}', Bounds(prompts=2))
    assert Route.CHAT.path == CHAT
