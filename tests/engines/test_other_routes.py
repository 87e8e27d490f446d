"""The routes that one engine serves: through the proxy they answer as one plain engine does."""

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import aiohttp
import pytest

from .client import Answer, ask
from .compare import differs
from .engine import MODEL
from .fleet import Fleet
from .proxy import Proxy
from .shapes import story

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]

TEXT = story("other routes")
MESSAGE = {"role": "user", "content": TEXT}
RESPONSES = {"model": MODEL, "input": TEXT, "max_output_tokens": 12, "temperature": 0}
MESSAGES = {"model": MODEL, "messages": [MESSAGE], "max_tokens": 12, "temperature": 0}
OTHER = {"role": "user", "content": story("another conversation")}
BATCH = {
    "model": MODEL,
    "messages": [[MESSAGE], [OTHER], [MESSAGE, OTHER]],
    "max_tokens": 8,
    "temperature": 0,
}
BATCH_FIELDS: list[dict[str, Any]] = [
    {},
    {"messages": [[MESSAGE]]},
    {"return_token_ids": True, "logprobs": True, "top_logprobs": 1},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"max_completion_tokens": 3, "stop": ["e"], "tool_choice": "none", "n": 1, "stream": False},
    {"echo": True},
    {"stream": True, "max_tokens": 1},
    {"n": 2},
    {"use_beam_search": True},
    {"tool_choice": "auto"},
    {"tools": []},
    {"messages": [[MESSAGE], []]},
    {"messages": [MESSAGE]},
    {"messages": [[MESSAGE], [{"role": "user", "content": "x " * 20_000}]]},
    {
        "messages": [
            [MESSAGE],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        ]
    },
    {"temperature": -1},
    {"temperature": "hot"},
    {"max_tokens": 10**8},
    {"max_tokens": 0},
    {"top_logprobs": 2},
    {"continue_final_message": True},
    {"stream_options": {"include_usage": True}},
    {"model": "nope"},
    {"kv_transfer_params": None},
]
CHAT = {"messages": [MESSAGE], "max_tokens": 8, "temperature": 0}
CHAT_FIELDS: list[dict[str, Any]] = [
    {},
    {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}},
    {"model": "nope"},
    {"n": 2, "temperature": 1, "seed": 1},
    {"temperature": "hot"},
    {"temperature": -1},
    {"messages": []},
    {"tools": []},
]
COMPLETION = {"prompt": TEXT, "max_tokens": 8, "temperature": 0}
COMPLETION_FIELDS: list[dict[str, Any]] = [
    {},
    {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}},
    {"prompt": [TEXT, TEXT + " more"]},
    {"prompt": list(range(100, 160))},
    {"messages": "x"},
    {"messages": None},
    {"top_logprobs": 2},
    {"temperature": "hot"},
    {"temperature": -1},
    {"echo": True},
]
NO_INVOCATIONS: list[dict[str, Any]] = [
    {},
    {"input": "x"},
    {"prompt": {"a": 1}},
    {"query": "a", "documents": ["b"]},
    {"requestType": "NEW_SESSION"},
    {"requestType": "NEW_SESSION", "prompt": TEXT},
]
SCORING = {"model": MODEL, "query": TEXT, "items": ["yes", "no"], "label_token_ids": [300, 301]}
POOLING = (
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"model": MODEL, "prompt": TEXT}),
    ("/tokenize", {"model": MODEL, "messages": [MESSAGE], "return_token_strs": True}),
    ("/tokenize", {"model": "nope", "prompt": TEXT}),
    ("/tokenize", {"model": MODEL}),
    ("/detokenize", {"model": MODEL, "tokens": [5, 6, 7]}),
    ("/v1/responses", RESPONSES),
    ("/v1/responses", {**RESPONSES, "stream": True}),
    ("/v1/responses", {**RESPONSES, "instructions": "Be brief.", "input": [MESSAGE]}),
    ("/v1/responses", {**RESPONSES, "model": "nope"}),
    ("/v1/responses", {**RESPONSES, "max_output_tokens": "x"}),
    ("/v1/messages", MESSAGES),
    ("/v1/messages", {**MESSAGES, "stream": True}),
    ("/v1/messages", {**MESSAGES, "system": "Be brief."}),
    ("/v1/messages", {**MESSAGES, "model": "nope"}),
    ("/v1/messages", {"model": MODEL, "messages": [MESSAGE]}),
    ("/v1/messages/count_tokens", {"model": MODEL, "messages": [MESSAGE]}),
    (
        "/v1/decisions",
        {
            "model": MODEL,
            "input": TEXT,
            "questions": [{"type": "predicate", "instructions": "Is it?"}],
        },
    ),
    (
        "/v1/systemone",
        {
            "model": MODEL,
            "state": TEXT,
            "questions": {"a": {"type": "noul", "instructions": "Is it?"}},
        },
    ),
    *((path, {"model": MODEL, "input": "x"}) for path in POOLING),
]
GENERATED: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/chat/completions/batch", {**BATCH, **fields}) for fields in BATCH_FIELDS),
    *(("/invocations", {**CHAT, **fields}) for fields in CHAT_FIELDS),
    *(("/invocations", {**COMPLETION, **fields}) for fields in COMPLETION_FIELDS),
    *(("/invocations", body) for body in NO_INVOCATIONS),
    ("/generative_scoring", SCORING),
    (
        "/generative_scoring",
        {**SCORING, "items": [[5, 6], [7]], "item_first": True, "apply_softmax": False},
    ),
    ("/generative_scoring", {**SCORING, "items": []}),
    ("/generative_scoring", {**SCORING, "items": ["a", 1]}),
    ("/generative_scoring", {**SCORING, "label_token_ids": [10**9]}),
    ("/generative_scoring", {**SCORING, "model": "nope"}),
]
_MADE = re.compile(r"^(resp|msg|chatcmpl|chatcmpl-tool|rs|fc|call|toolu)[-_][0-9a-f-]{8,}$")
_NEW = {"created_at", "created", "completed_at", "signature"}


def masked(value: Any) -> Any:
    """Return a value with ids, times and cached tokens masked, which differ between requests."""
    if isinstance(value, dict):
        return {
            k: "*"
            if k in _NEW or k.startswith(("cached_tokens", "cache_", "input_tokens_per"))
            else masked(v)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [masked(one) for one in value]
    return "*" if isinstance(value, str) and _MADE.match(value) else value


def content_of(answer: Answer) -> Any:
    """Return an answer's content: a stream as its events with consecutive text deltas joined, since
    a busy engine joins them.
    """
    if not answer.streamed:
        return masked(answer.json)
    events: list[tuple[str, Any]] = []
    for event in answer.events:
        name, _, data = event.partition("\ndata: ")
        body = masked(json.loads(data))
        body.pop("sequence_number", None)
        if name.endswith("delta") and events and events[-1][0] == name and "delta" in body:
            before = events[-1][1]["delta"]
            if isinstance(before, str):
                events[-1][1]["delta"] = before + body["delta"]
                continue
            key = before["type"].removesuffix("_delta")
            key = {"input_json": "partial_json"}.get(key, key)
            if key != "signature" and before["type"] == body["delta"]["type"]:
                before[key] += body["delta"][key]
                continue
        events.append((name, body))
    return events


@pytest.mark.parametrize(
    ("path", "body"), SHAPES, ids=[f"{n}{path}" for n, (path, _) in enumerate(SHAPES)]
)
async def test_as_one_plain_engine(
    fleet: Fleet, proxy_1p1d: Proxy, path: str, body: dict[str, Any]
) -> None:
    """Status, content type and content equal the plain engine's."""
    plain = await ask(fleet.plain.url, path, body)
    ours = await ask(proxy_1p1d.url, path, body)
    assert (ours.status, ours.headers.get("Content-Type")) == (
        plain.status,
        plain.headers.get("Content-Type"),
    )
    assert content_of(ours) == content_of(plain)
    assert ours.broken == plain.broken == ""


@pytest.mark.parametrize(
    ("path", "body"), GENERATED, ids=[f"{n}{path}" for n, (path, _) in enumerate(GENERATED)]
)
async def test_generated_as_by_one_plain_engine(
    fleet: Fleet, proxy_1p1d: Proxy, path: str, body: dict[str, Any]
) -> None:
    """Batches, invocations and scores: status, fields and their order, texts and numbers equal the
    plain engine's.
    """
    headers = {"X-Request-Id": "one"}
    plain = await ask(fleet.plain.url, path, body, headers)
    ours = await ask(proxy_1p1d.url, path, body, headers)
    assert not differs(plain, ours, strict=False, warm=True)
    if not plain.streamed:
        assert list(ours.json) == list(plain.json)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        *(
            (body, {})
            for body in (
                b"",
                b"{",
                b"[]",
                b'"x"',
                b"null",
                b"3",
                b"1.5",
                b"\xff",
                b'{"a":"\xff"}',
                b'{"a":1}{}',
            )
        ),
        (b"{}", {"Content-Type": "text/plain"}),
        (b'{"prompt":"a"}', {"X-Amzn-SageMaker-Adapter-Identifier": "nope"}),
    ],
)
async def test_invocations_that_cannot_be_read(
    fleet: Fleet, proxy_1p1d: Proxy, body: bytes, headers: dict[str, str]
) -> None:
    """The words are the plain engine's."""
    plain = await ask(fleet.plain.url, "/invocations", body, headers)
    ours = await ask(proxy_1p1d.url, "/invocations", body, headers)
    assert (ours.status, ours.body) == (plain.status, plain.body)


async def test_an_engine_without_a_tokenizers_description(fleet: Fleet, proxy_1p1d: Proxy) -> None:
    """Without `--enable-tokenizer-info-endpoint`, the answer is the engine's 404."""
    async with aiohttp.ClientSession() as session:
        answers = []
        for url in (fleet.plain.url, proxy_1p1d.url):
            async with session.get(url + "/tokenizer_info") as answer:
                answers.append((answer.status, await answer.read()))
    assert answers[0] == answers[1] == (404, b'{"detail":"Not Found"}')


async def test_the_routes_are_those_of_vllm(fleet: Fleet) -> None:
    """The list of vLLM's routes that other tests use has all that an engine says it has."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(fleet.plain.url + "/openapi.json") as answer,
    ):
        paths = (await answer.json())["paths"]
    found = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    lines = (Path(__file__).parents[1] / "fakes" / "vllm_routes.txt").read_text().splitlines()
    assert found <= {tuple(line.split()) for line in lines if not line.startswith("#")}


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/v1/chat/completions/batch", {}),
        ("PUT", "/invocations", {}),
        ("GET", "/load", {}),
        ("POST", "/load", {}),
        ("HEAD", "/health", {}),
        ("HEAD", "/v1/completions", {}),
        ("GET", "/v1/completions", {}),
        ("GET", "/tokenize", {}),
        ("PUT", "/v1/responses", {}),
        ("POST", "/v1/completions/", {}),
        ("POST", "/tokenize/?x=1", {}),
        ("GET", "//v1/models", {}),
        ("GET", "/v1/nope", {"Origin": "https://site.example"}),
        ("OPTIONS", "/v1/chat/completions", {}),
        (
            "OPTIONS",
            "/v1/chat/completions",
            {"Origin": "https://site.example", "Access-Control-Request-Method": "POST"},
        ),
    ],
)
async def test_http_details(
    fleet: Fleet, proxy_1p1d: Proxy, method: str, path: str, headers: dict[str, str]
) -> None:
    """Unusual requests get the plain engine's status, headers and body, except for its `server`
    header.
    """

    async def one(url: str) -> tuple[int, dict[str, str], bytes]:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url + path, headers=headers, allow_redirects=False) as answer,
        ):
            kept = {k.lower(): v.replace(url, "") for k, v in answer.headers.items()}
            if "location" in kept:
                # pdproxy's is relative, and repeats no Host
                kept["location"] = urljoin(path, kept["location"])
            return (
                answer.status,
                {k: v for k, v in kept.items() if k not in ("date", "server")},
                await answer.read(),
            )

    assert await one(proxy_1p1d.url) == await one(fleet.plain.url)
