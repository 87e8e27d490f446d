"""The routes that one engine serves: through the proxy they answer as one plain engine does."""

import json
import re
from typing import Any

import aiohttp
import pytest

from .client import Answer, ask
from .engine import MODEL
from .fleet import Fleet
from .proxy import Proxy
from .shapes import story

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]

TEXT = story("other routes")
MESSAGE = {"role": "user", "content": TEXT}
RESPONSES = {"model": MODEL, "input": TEXT, "max_output_tokens": 12, "temperature": 0}
MESSAGES = {"model": MODEL, "messages": [MESSAGE], "max_tokens": 12, "temperature": 0}
POOLING = ("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")
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
    *((path, {"model": MODEL, "input": "x"}) for path in POOLING),
]
_MADE = re.compile(r"^(resp|msg|chatcmpl|rs)[-_][0-9a-f-]{8,}$")
_TIMES = {"created_at", "created", "completed_at"}


def masked(value: Any) -> Any:
    """Return a value with ids, times and cached tokens masked, which differ between requests."""
    if isinstance(value, dict):
        return {
            k: "*" if k in _TIMES or k.startswith(("cached_tokens", "cache_", "input_tokens_per")) else masked(v)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [masked(one) for one in value]
    return "*" if isinstance(value, str) and _MADE.match(value) else value


def content_of(answer: Answer) -> Any:
    """Return an answer's content: a stream as its events with consecutive text deltas joined, since a busy engine joins them."""
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
            if "text" in before:
                before["text"] += body["delta"]["text"]
                continue
        events.append((name, body))
    return events


@pytest.mark.parametrize(("path", "body"), SHAPES, ids=[f"{n}{path}" for n, (path, _) in enumerate(SHAPES)])
async def test_as_one_plain_engine(fleet: Fleet, proxy_1p1d: Proxy, path: str, body: dict[str, Any]) -> None:
    """Status, content type and content equal the plain engine's."""
    plain = await ask(fleet.plain.url, path, body)
    ours = await ask(proxy_1p1d.url, path, body)
    assert (ours.status, ours.headers.get("Content-Type")) == (plain.status, plain.headers.get("Content-Type"))
    assert content_of(ours) == content_of(plain)
    assert ours.broken == plain.broken == ""


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
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
async def test_http_details(fleet: Fleet, proxy_1p1d: Proxy, method: str, path: str, headers: dict[str, str]) -> None:
    """Unusual requests get the plain engine's status, headers and body, except for its `server` header."""

    async def one(url: str) -> tuple[int, dict[str, str], bytes]:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url + path, headers=headers, allow_redirects=False) as answer,
        ):
            kept = {k.lower(): v.replace(url, "") for k, v in answer.headers.items()}
            return answer.status, {k: v for k, v in kept.items() if k not in ("date", "server")}, await answer.read()

    assert await one(proxy_1p1d.url) == await one(fleet.plain.url)
