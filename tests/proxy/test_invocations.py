"""SageMaker's route: the form of the body decides what it is; chats and completions are split as on
their own routes.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pdproxy.settings.schema import Settings
from pdproxy.wire.body_bounds import LARGE
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route
from tests.fakes import scripts
from tests.fakes.engine import Reply
from tests.fakes.passed import asked, everyone, fine
from tests.fakes.world import PROMPT, chat, completion, until, world
from tests.proxy.test_batches import both, still

INVOCATIONS = "/invocations"


def body_of(kind: str, **fields: Any) -> dict[str, Any]:
    """A body of one kind."""
    return chat(**fields) if kind == "chat" else completion(**fields)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("chat", {}),
        ("chat", {"logprobs": True, "top_logprobs": 1}),
        (
            "chat",
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        ),
        ("completion", {}),
        ("completion", {"prompt": [PROMPT, PROMPT + "2"]}),
        ("completion", {"prompt": list(range(5, 60))}),
        ("chat", {"model": "nope"}),
        ("completion", {"kv_transfer_params": {"prompt_token_ids": [300, 301]}}),
        ("completion", {"model": None}),
    ],
    ids=str,
)
async def test_chats_and_completions_are_split(kind: str, fields: dict[str, Any]) -> None:
    """As on their own routes, with the same bytes; the body's model is ignored, as vLLM ignores
    it.
    """
    async with world() as w:
        ours, plain = await both(w, INVOCATIONS, body_of(kind, **fields))
        assert ours.status == 200
        assert still(ours) == still(plain)
        report = await w.ended()
        assert report.endpoint == INVOCATIONS
        if fields.get("model", "tiny") == "tiny":
            assert all(leg.prefill for leg in report.legs)
            assert w.prefill[0].requests
        assert asked(w.decode[0], INVOCATIONS) == 1, "the one that was asked directly"


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_streams(kind: str) -> None:
    """A stream is the engine's own, byte for byte but for its time."""
    async with world() as w:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        ours, plain = await both(w, INVOCATIONS, body_of(kind, **options))

        def events(answer: Any) -> list[bytes]:
            return [event.replace(b'"created":' + _created(event), b"") for event in answer.events]

        assert ours.ended
        assert events(ours) == events(plain)
        assert (await w.ended()).legs[0].prefill is not None


def _created(event: bytes) -> bytes:
    found = event.partition(b'"created":')[2]
    return found[: found.find(b",")]


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"echo": True}], ids=str)
@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_what_one_engine_serves_on_the_own_route_one_serves_here(
    kind: str, fields: dict[str, Any]
) -> None:
    """The rules are those of the own routes."""
    async with world() as w:
        ours, plain = await both(w, INVOCATIONS, body_of(kind, **fields))
        assert still(ours) == still(plain)
        assert not w.prefill[0].requests
        assert len(w.decode[0].requests) == 1


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"model": "tiny"},
        {"input": "x"},
        {"prompt": ""},
        {"prompt": {"a": 1}},
        {"messages": "x"},
        {"messages": []},
        {"messages": [{"role": "user", "content": PROMPT}], "temperature": "hot"},
        {"messages": [{"role": "user", "content": PROMPT}], "temperature": 9},
        {"messages": "x", "prompt": PROMPT, "temperature": 0},
        {"model": 5, "prompt": PROMPT, "temperature": 0},
        {"prompt": PROMPT, "top_logprobs": 2},
        {"prompt": PROMPT, "tools": []},
        {"prompt": PROMPT, "temperature": 9},
        {"prompt": [PROMPT, PROMPT], "temperature": "hot"},
        {"prompt": PROMPT, "continue_final_message": True, "add_generation_prompt": True},
        {"prompt": PROMPT, "stream_options": {"include_usage": True}},
        {"requestType": "NEW_SESSION"},
        {"requestType": "NEW_SESSION", "prompt": PROMPT},
        {"requestType": None, "messages": [{"role": "user", "content": PROMPT}]},
    ],
    ids=str,
)
async def test_what_fits_none_is_answered_as_by_one_engine(body: dict[str, Any]) -> None:
    """In the words of vLLM's own route, which reads the body as a chat first."""
    async with world() as w:
        ours, plain = await both(w, INVOCATIONS, body)
        assert still(ours) == still(plain)
        await w.quiet()


@pytest.mark.broken_bodies("an engine reads and refuses what the client sends, in its own words")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"3",
        b"true",
        b"1.5",
        b"\xff\xfe{}",
        b'{"a":1}{"b":2}',
        b'{"a":"\xff"}',
    ],
)
async def test_a_body_that_cannot_be_read(body: bytes) -> None:
    """Is refused here, in the words that vLLM has for this route, and no engine is asked."""
    async with world() as w:
        ours, plain = await both(w, INVOCATIONS, body)
        assert ours.status == 400
        assert (ours.status, ours.body) == (plain.status, plain.body)
        assert asked(w.decode[0], INVOCATIONS) == 1, "the one that was asked directly"


async def test_another_content_type_is_refused() -> None:
    """Before the body is read."""
    async with world() as w:
        client = await w.client()
        head = (
            b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-type: application/x+json\r\n"
            b"content-length: 1\r\n\r\n{"
        )
        client.send(head)
        answer = await client.answer()
        assert answer.status == 400
        assert "Only 'application/json' is allowed" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    "body", [{"prompt": {"a": 1}}, completion(), completion(echo=True), {"input": "x"}], ids=str
)
async def test_the_adapter_of_a_header_is_the_model(body: dict[str, Any]) -> None:
    """SageMaker names a LoRA adapter so, in place of the body's model."""
    async with world() as w:
        headers = [("X-Amzn-SageMaker-Adapter-Identifier", "nope")]
        ours = await w.ask(INVOCATIONS, body, headers)
        w.port, port = w.decode[0].port, w.port
        plain = await w.ask(INVOCATIONS, body, headers)
        w.port = port
        assert still(ours) == still(plain)
        if "echo" in body or body == completion():
            assert ours.status == 404
            assert "`nope`" in ours.json["error"]["message"]
        named = await w.ask(
            INVOCATIONS,
            completion(model="other"),
            [("x-amzn-sagemaker-adapter-identifier", "tiny")],
        )
        assert (named.status, named.json["model"]) == (200, "tiny")
        assert w.prefill[0].requests[-1].json["model"] == "tiny"


@pytest.mark.parametrize("then", ["finish", "eof", "reset"])
async def test_a_stream_without_its_end_mark_is_an_error(then: str) -> None:
    """Also where the engine ends the HTTP answer properly."""
    async with world() as w:
        w.decode[0].admin = {
            INVOCATIONS: scripts.streams(scripts.CHAT_WORD, scripts.CHAT_WORD, then=then)
        }
        answer = await w.ask(INVOCATIONS, chat(max_tokens="4", stream=True))
        assert answer.body.startswith(scripts.CHAT_WORD * 2)
        assert b'"code":502' in answer.events[-1]
        assert (await w.ended()).outcome == "engine"


async def test_an_adapter_that_is_an_alias() -> None:
    """An engine that gets the request whole reads its own name in the header."""

    def aliased(settings: Settings) -> Settings:
        pool = msgspec.structs.replace(settings.pools[0], aliases={"fast": "tiny"})
        return msgspec.structs.replace(settings, pools=(pool,))

    async with world(adjust=aliased) as w:
        seen = everyone(w, INVOCATIONS, fine)
        for name in ("fast", "tiny"):
            header = [("x-amzn-sagemaker-adapter-identifier", name)]
            assert (await w.ask(INVOCATIONS, {"input": "x"}, header)).status == 200
        assert [dict(one.headers)["x-amzn-sagemaker-adapter-identifier"] for one in seen] == [
            "tiny",
            "tiny",
        ]


@pytest.mark.parametrize("name", ["\u00e9", "\u6a21"])
async def test_an_adapters_name_beyond_ascii(name: str) -> None:
    """Engines that get the invocation whole read the bytes that the client sent."""
    async with world() as w:
        header = [("X-Amzn-SageMaker-Adapter-Identifier", name.encode().decode("latin-1"))]
        for body in (completion(), completion(add_generation_prompt=True)):
            ours = await w.ask(INVOCATIONS, body, header)
            w.port, port = w.decode[0].port, w.port
            plain = await w.ask(INVOCATIONS, body, header)
            w.port = port
            assert ours.status == 404
            assert still(ours) == still(plain)


async def test_a_long_adapters_name_is_reported_shortened() -> None:
    """As the model of a body is: the name is logged."""
    async with world() as w:
        assert (
            await w.ask(INVOCATIONS, chat(), [("x-amzn-sagemaker-adapter-identifier", "x" * 5000)])
        ).status == 404
        assert (await w.ended()).model == "x" * 256 + "... (5000 bytes)"


async def test_the_load_comes_with_a_chat_that_goes_whole() -> None:
    """As with one that is split."""
    async with world() as w:
        for body in (chat(), chat(max_tokens="4")):
            answer = await w.ask(INVOCATIONS, body, [("endpoint-load-metrics-format", "TEXT")])
            assert answer.status == 200
            assert answer.header("endpoint-load-metrics") is not None
        assert asked(w.decode[0], INVOCATIONS) == 1


async def test_what_goes_whole_is_counted_with_its_reason() -> None:
    """As what one engine serves alone on the own routes."""
    async with world() as w:
        await w.ask(INVOCATIONS, chat(max_tokens="4"))
        assert [leg.why_alone for leg in (await w.ended()).legs] == ["unusual"]
        assert w.metric("pdproxy_alone_total", reason="unusual") == 1
        assert w.metric("pdproxy_alone_total") == 1


async def test_what_is_pooled_goes_whole_to_one_engine() -> None:
    """With its answer's own headers; also a chat that a pooling model embeds: its engine has no
    chat route.
    """

    async def embedded(reply: Reply) -> None:
        await reply.raw(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: 2\r\n"
        )
        await reply.raw(b"metadata: {}\r\n\r\n\x00\xff")

    async with world(prefill=0, decode=0, aggregated=1) as w:
        w.aggregated[0].default = scripts.whole(b'{"detail":"Not Found"}', 404)
        seen = everyone(w, INVOCATIONS, embedded)
        for body in ({"input": ["a", "b"], "model": "tiny"}, chat()):
            answer = await w.ask(INVOCATIONS, body)
            assert (answer.status, answer.body) == (200, b"\x00\xff")
            assert answer.header("content-type") == "application/octet-stream"
            assert answer.header("metadata") == "{}"
        assert [set(one.json) for one in seen] == [{"input"}, set(chat()) - {"model"}]


PARTS = {"content": [{"type": "text", "text": "x"}] * 3}
TURN = {"role": "user", "content": "x"}
THREE = [
    *(
        (name, ["a", "b", "c"])
        for name in (
            "input",
            "documents",
            "items",
            "queries",
            "text_1",
            "text_2",
            "data_1",
            "data_2",
        )
    ),
    *((name, [PARTS, "b", "c"]) for name in ("documents", "data_2", "queries")),
    ("documents", ["a", PARTS, PARTS]),
    ("input", [["a"], ["b"], [[1], "]"]]),
    ("messages", [[TURN]] * 3),
]
"""Three texts or conversations, by the fields of all kinds of requests."""
PROMPTS = [
    ("prompt", ["a", "b", "c"]),
    ("prompt", [["1"], ["2"], ["3"]]),
    ("prompt_embeds", ["AAAA"] * 3),
]
FEWER = [
    *(("input", few) for few in (["a", "b"], [1, 2, 3], [TURN] * 3)),
    *(("documents", few) for few in (["a", "b"], PARTS, [PARTS, "a"])),
    ("messages", [TURN] * 3),
]


@pytest.mark.parametrize("path", [INVOCATIONS, "/score", "/v1/embeddings"])
async def test_the_limits_of_lists_hold(path: str) -> None:
    """`limits.max_prompts`, whatever the list is called, and whatever is in it. Token ids, parts
    and messages are one prompt.
    """
    async with world(limits={"max_prompts": 2}) as w:
        seen = everyone(w, path, fine)
        for name, three in THREE + PROMPTS * (path == INVOCATIONS):
            answer = await w.ask(path, {name: three})
            assert answer.status == 400, name
            assert answer.json["error"]["param"] == name
        assert not seen
        for name, few in FEWER:
            assert (await w.ask(path, {name: few})).status == 200, name


@pytest.mark.broken_bodies("one that is not read here is passed on as it came")
async def test_large_bodies() -> None:
    """They are read in another process, with the same result."""
    text = "x" * (LARGE + 1000)
    async with world() as w:
        for body in (completion(max_tokens=1, user=text), chat(max_tokens=1, user=text)):
            ours, plain = await both(w, INVOCATIONS, body)
            assert ours.status == 200
            assert still(ours) == still(plain)
        ours, plain = await both(w, INVOCATIONS, b'{"prompt":"' + text.encode())
        assert (ours.status, ours.body) == (400, plain.body)
        assert len(w.prefill[0].requests) == 2


async def test_a_client_that_leaves_while_one_engine_serves() -> None:
    """The engine's leg is closed, and the place is free."""
    async with world() as w:
        w.decode[0].admin = {INVOCATIONS: scripts.stall}
        client = await w.client()
        client.post(INVOCATIONS, {"input": "x"})
        await until(lambda: asked(w.decode[0], INVOCATIONS))
        request = next(one for one in w.decode[0].sim.journal.others if one.path == INVOCATIONS)
        client.close()
        await request.left.wait()
        assert (await w.ended()).outcome == "client_left"


async def test_an_engine_that_fails_is_not_the_last_one_asked() -> None:
    """A request that goes whole is sent to another engine, as on the passed routes."""
    async with world(decode=2) as w:
        seen = everyone(w, INVOCATIONS, scripts.eof)
        w.decode[1].admin = {INVOCATIONS: scripts.whole(b'{"fine":true}')}
        w.decode[0].admin = {INVOCATIONS: scripts.eof}
        for _ in range(2):
            answer = await w.ask(INVOCATIONS, {"input": "x"})
            assert (answer.status, answer.json) == (200, {"fine": True})
        assert not seen


async def test_keys_guard_invocations() -> None:
    """vLLM leaves this route open; pdproxy sends the engines' key, so it checks its own."""
    async with world(auth={"api_keys": ("ours",), "engine_api_key": "theirs"}) as w:
        for body in (completion(), {"input": "x"}):
            assert (await w.ask(INVOCATIONS, body)).status == 401
        assert not w.prefill[0].requests
        assert not asked(w.decode[0], INVOCATIONS)
        assert (
            await w.ask(INVOCATIONS, completion(), [("authorization", "Bearer ours")])
        ).status == 200


async def test_handles_of_clients_are_removed() -> None:
    """In every form."""
    forged = {"do_remote_prefill": True, "remote_engine_id": "x"}
    async with world() as w:
        for body in (completion(), chat(), {"input": "x"}):
            await w.ask(INVOCATIONS, json.dumps({**body, "kv_transfer_params": forged}).encode())
        assert [(one.kv or {}).get("remote_engine_id") == "x" for one in w.decode[0].requests] == [
            False,
            False,
        ]
        whole = next(one for one in w.decode[0].sim.journal.others if one.path == INVOCATIONS)
        assert "kv_transfer_params" not in whole.json


@pytest.mark.parametrize(
    ("body", "route"),
    [
        (b'{"messages":[{}]}', Route.CHAT),
        (b'{"messages":[{}],"prompt":"a"}', Route.CHAT),
        (b'{"prompt":"a"}', Route.COMPLETIONS),
        (b'{"prompt":"a","messages":null}', Route.INVOCATIONS),
        (b'{"prompt":"a","tool_choice":"auto"}', Route.INVOCATIONS),
        (b'{"prompt":7}', Route.INVOCATIONS),
        (b'{"input":"a"}', Route.INVOCATIONS),
        (b'{"messages":[{}],"max_tokens":"x"}', Route.INVOCATIONS),
    ],
)
def test_the_form_decides(body: bytes, route: Route) -> None:
    """What is not certain, one engine decides."""
    assert parse(Route.INVOCATIONS, body).route is route


async def test_a_chat_whose_prompt_is_ids() -> None:
    """As on its own route, one engine serves it."""
    async with world() as w:
        ours, plain = await both(
            w, INVOCATIONS, chat(kv_transfer_params={"prompt_token_ids": [300, 301, 302]})
        )
        assert ours.json["usage"]["prompt_tokens"] == 3
        assert still(ours) == still(plain)
