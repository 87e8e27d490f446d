"""Through the proxy, every request is answered as by one plain engine, and its prompt's KV moves
from P to D.
"""

import asyncio
import json
import os
import secrets
from typing import Any

import aiohttp
import pytest

from .client import Answer, ask
from .compare import differs, mask
from .engine import MODEL
from .equality import equal
from .fleet import Fleet
from .proxy import Proxy
from .shapes import CHAT, COMPLETIONS, SHAPES, Shape, question
from .shapes_refused import REFUSED_IN_THE_STREAM

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]


@pytest.fixture(params=["1p1d", "2p2d"])
def proxy(request: pytest.FixtureRequest) -> Proxy:
    """Both proxies in turn: one with one pair, one with two engines of each role."""
    return request.getfixturevalue(f"proxy_{request.param}")


EVERY = 1 if os.environ.get("PDPROXY_TEST_SHAPES") == "all" else 3
"""The gate takes every third shape, which includes streamed and whole ones; `.ci/full` takes
all.
"""


@pytest.mark.parametrize("shape", SHAPES[::EVERY], ids=str)
async def test_answer_is_the_plain_engines(fleet: Fleet, proxy_1p1d: Proxy, shape: Shape) -> None:
    """Status, body and events equal the plain engine's; the KV moved, or the proxy counts why one
    engine served it; P is free.
    """
    await equal(fleet, proxy_1p1d, shape)


@pytest.mark.parametrize("shape", SHAPES[::8], ids=str)
async def test_answer_of_one_of_two_pairs_is_too(
    fleet: Fleet, proxy_2p2d: Proxy, shape: Shape
) -> None:
    """The same for every eighth shape, with two engines of each role."""
    await equal(fleet, proxy_2p2d, shape, pairs=2)


async def test_cached_prompt_is_reported_as_cached(fleet: Fleet, proxy_1p1d: Proxy) -> None:
    """A repeated prompt counts as cached on P as on the plain engine: the usage is equal both
    times.
    """
    nonce = secrets.token_hex(6)
    body = {"model": MODEL, "messages": question(nonce), "temperature": 0, "max_tokens": 5}
    seen = []
    for _ in range(2):
        plain, other = await ask(fleet.plain.url, CHAT, body), await ask(proxy_1p1d.url, CHAT, body)
        assert not differs(plain, other)
        seen.append(other.json["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert seen[0] == 0
    assert seen[1] >= 64


@pytest.mark.parametrize("shape", REFUSED_IN_THE_STREAM, ids=str)
async def test_streamed_refusal_gets_a_status(
    fleet: Fleet, proxy_1p1d: Proxy, shape: Shape
) -> None:
    """The plain engine refuses with 200 and an error event; the proxy refuses with an error status
    and the same error.

    Nothing was generated yet, so an error status is still possible, and clients check only the
    status.
    """
    body = shape.make(secrets.token_hex(6))
    plain, other = await asyncio.gather(
        *(ask(one.url, shape.path, body) for one in (fleet.plain, proxy_1p1d))
    )
    assert (plain.status, plain.events[-1]) == (200, "[DONE]")
    assert other.status == 400
    assert mask(other.json) == mask(plain.chunks[-1])


def _refusal(answer: Answer) -> dict[str, Any]:
    """Return an error body without its text and `param`."""
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
    "wrong-content-type": (
        b'{"model": "tiny", "prompt": "a", "messages": []}',
        {"Content-Type": "text/plain"},
    ),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
async def test_unreadable_body_is_refused_alike(
    fleet: Fleet, proxy: Proxy, raw: tuple[bytes, dict[str, str]], path: str
) -> None:
    """A body that is not a request is refused as by an engine, in OpenAI's form; the text may be
    the proxy's own.
    """
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
    """The other routes answer as the plain engine does, except for ids of permissions, which are
    new each time.
    """
    answers = []
    async with aiohttp.ClientSession() as session:
        for url in (fleet.plain.url, proxy.url):
            async with session.request(method, url + path, json=body) as response:
                answers.append(
                    (response.status, _without_minted(json.loads(await response.read())))
                )
    assert answers[0] == answers[1]


def _without_minted(value: Any) -> Any:
    """Return a model list without the permission ids and times of its cards."""
    if isinstance(value, dict):
        return {
            key: _without_minted(item)
            for key, item in value.items()
            if key not in {"created", "permission"}
        }
    return [_without_minted(item) for item in value] if isinstance(value, list) else value
