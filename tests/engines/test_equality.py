"""Through the proxy, every request is answered as by one plain engine, and its prompt's KV really moved from P to D."""

import asyncio
import json
import secrets
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from .client import Answer, ask
from .compare import differs, mask
from .counters import Counters
from .engine import MODEL
from .fleet import Fleet
from .proxy import Proxy
from .shapes import CHAT, COMPLETIONS, SHAPES, Shape, question, story

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]

SOURCE = "vllm:prompt_tokens_by_source_total"
USED = "vllm:kv_cache_usage_perc"
SETTLED = 5.0  # seconds for counters to show what happened and for P to free its blocks
STRICT_TRIES = 3


@pytest.fixture(params=["1p1d", "2p2d"])
def proxy(request: pytest.FixtureRequest) -> Proxy:
    """One proxy after the other: a pair alone, and two of each to choose from."""
    return request.getfixturevalue(f"proxy_{request.param}")


@dataclass
class Moved:
    """Counters taken before a request, and what they rose by since."""

    fleet: Fleet
    proxy: Proxy
    plain: Counters
    decodes: list[Counters]
    front: Counters
    held: list[float]

    @classmethod
    def now(cls, fleet: Fleet, proxy: Proxy) -> "Moved":
        """Take all counters."""
        decodes = [engine.counters() for engine in fleet.decodes]
        held = [engine.counters().sum(USED) for engine in fleet.prefills]
        return cls(fleet, proxy, fleet.plain.counters(), decodes, proxy.counters(), held)

    def since(self, alone: str) -> dict[str, float]:
        """What rose: the prompt's tokens as the plain engine counts them, whence D had them, how often it went alone."""
        now = Moved.now(self.fleet, self.proxy)

        def decoded(source: str) -> float:
            pairs = zip(now.decodes, self.decodes, strict=True)
            return sum(new.sum(SOURCE, source=source) - old.sum(SOURCE, source=source) for new, old in pairs)

        def front(**labels: str) -> float:
            return now.front.sum("pdproxy_alone_total", **labels) - self.front.sum("pdproxy_alone_total", **labels)

        name = "vllm:prompt_tokens_total"
        return {
            "prompt": now.plain.sum(name) - self.plain.sum(name),
            "pulled": decoded("external_kv_transfer"),
            "computed": decoded("local_compute"),
            "alone": front(),
            "expected_reason": front(reason=alone) if alone else 0,
        }


async def _both(shape: Shape, fleet: Fleet, proxy: Proxy) -> tuple[Answer, Answer]:
    nonce = secrets.token_hex(6)
    headers = {"X-Request-Id": nonce} if shape.header_id else None
    body = shape.make(nonce)
    plain = await ask(fleet.plain.url, shape.path, body, headers)
    return plain, await ask(proxy.url, shape.path, body, headers)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_answer_is_the_plain_engines(fleet: Fleet, proxy: Proxy, shape: Shape) -> None:
    """Status, body and events are the plain engine's; the KV moved, or the proxy says why it went alone; P is clean."""
    for attempt in range(STRICT_TRIES):
        before = Moved.now(fleet, proxy)
        plain, other = await _both(shape, fleet, proxy)
        assert plain.status == shape.status, plain.body[:500]
        assert not differs(plain, other, strict=False)
        await _settle(shape, before)
        if not (why := differs(plain, other)):
            break
        assert attempt + 1 < STRICT_TRIES, f"cut into other chunks {STRICT_TRIES} times: {why}"
    if shape.pinned_id:
        first = plain.chunks[0] if plain.streamed else plain.json
        assert (other.chunks[0] if other.streamed else other.json)["id"] == first["id"]


async def _settle(shape: Shape, before: Moved) -> None:
    """The counters show within seconds how the answer came about; then P holds no more than before."""
    if shape.alone:
        wanted = {"pulled": 0, "alone": 1, "expected_reason": 1}
    elif shape.status == 200:
        wanted = {"pulled": before.since("")["prompt"], "computed": 0, "alone": 0}
    else:
        wanted = {"pulled": 0}
    deadline = time.monotonic() + SETTLED
    while True:
        rose = before.since(shape.alone)
        held = [engine.counters().sum(USED) for engine in before.fleet.prefills]
        if rose | wanted == rose and all(now <= then for now, then in zip(held, before.held, strict=True)):
            return
        assert time.monotonic() < deadline, f"wanted {wanted}, counters rose by {rose}, P's KV: {before.held} -> {held}"
        await asyncio.sleep(0.1)


async def test_cached_prompt_is_reported_as_cached(fleet: Fleet, proxy_1p1d: Proxy) -> None:
    """Asked again, a prompt counts as cached on P just as on the plain engine: usage says the same both times."""
    nonce = secrets.token_hex(6)
    body = {"model": MODEL, "messages": question(nonce), "temperature": 0, "max_tokens": 5}
    seen = []
    for _ in range(2):
        plain, other = await ask(fleet.plain.url, CHAT, body), await ask(proxy_1p1d.url, CHAT, body)
        assert not differs(plain, other)
        seen.append(other.json["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert seen[0] == 0
    assert seen[1] >= 64


async def test_streamed_refusal_gets_a_status(fleet: Fleet, proxy: Proxy) -> None:
    """A grammar that can't be compiled: the plain engine says 200 and an error event, the proxy a status of the same error.

    Nothing was generated yet, so an honest status is still possible, and clients only look for errors there.
    """
    body = {"model": MODEL, "prompt": story(secrets.token_hex(6)), "stream": True}
    body["structured_outputs"] = {"regex": "[unclosed"}
    plain, other = await ask(fleet.plain.url, COMPLETIONS, body), await ask(proxy.url, COMPLETIONS, body)
    assert (plain.status, plain.events[-1]) == (200, "[DONE]")
    assert other.status == 400
    assert mask(other.json) == mask(plain.chunks[0])


def _refusal(answer: Answer) -> dict[str, Any]:
    """An error body less its words and the place they speak of."""
    body = answer.json
    if "error" not in body:
        return {"detail": body["detail"]}
    assert body["error"]["message"]
    return {key: value for key, value in body["error"].items() if key not in {"message", "param"}}


RAW: dict[str, tuple[bytes, dict[str, str]]] = {
    "empty": (b"", {}),
    "not-json": (b'{"model": "tiny", "prompt": ', {}),
    "not-an-object": (b"[1, 2]", {}),
    "bad-utf8": (b'{"model": "tiny", "prompt": "\xff\xfe"}', {}),
    "no-prompt": (b'{"model": "tiny"}', {}),
    "wrong-content-type": (b'{"model": "tiny", "prompt": "a", "messages": []}', {"Content-Type": "text/plain"}),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
async def test_unreadable_body_is_refused_alike(
    fleet: Fleet, proxy: Proxy, raw: tuple[bytes, dict[str, str]], path: str
) -> None:
    """What isn't a request at all is refused as by an engine, in OpenAI's form; the words may be the proxy's."""
    plain, other = await ask(fleet.plain.url, path, *raw), await ask(proxy.url, path, *raw)
    assert plain.status >= 400
    assert other.status == plain.status
    assert _refusal(other) == _refusal(plain)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models", None),
        ("GET", "/v1/no-such-route", None),
        ("GET", COMPLETIONS, None),
    ],
)
async def test_other_routes_answer_alike(
    fleet: Fleet, proxy: Proxy, method: str, path: str, body: dict[str, Any] | None
) -> None:
    """The routes around generating say what the plain engine says; ids of permissions are minted anew each time."""
    answers = []
    async with aiohttp.ClientSession() as session:
        for url in (fleet.plain.url, proxy.url):
            async with session.request(method, url + path, json=body) as response:
                answers.append((response.status, _without_minted(json.loads(await response.read()))))
    assert answers[0] == answers[1]


def _without_minted(value: Any) -> Any:
    """A model list's cards carry a fresh permission id and a time."""
    if isinstance(value, dict):
        return {key: _without_minted(item) for key, item in value.items() if key not in {"created", "permission"}}
    return [_without_minted(item) for item in value] if isinstance(value, list) else value
