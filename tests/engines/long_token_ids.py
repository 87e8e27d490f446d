"""`/inference/v1/generate` is answered as by one plain engine, and the prompt's KV moves from P to
D.
"""

# Starts three engines, since with this flag engines derender for other routes, too.

import json
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from .client import Answer, ask
from .engine import MODEL, Role
from .equality import Moved, in_full, loaded_once
from .fleet import Fleet
from .launcher import Launcher
from .prompts import FORGED, story
from .proxy import Proxy
from .test_other_routes import masked

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]

GENERATE = "/inference/v1/generate"
NAMES: dict[str, Role] = {"ids": "plain", "ids-p": "prefill", "ids-d": "decode"}
STREAM = {"stream": True}
USAGE = {"stream_options": {"include_usage": True}}
SPLIT: dict[str, dict[str, Any]] = {
    "whole": {},
    "stream": STREAM,
    "usage": {**STREAM, **USAGE},
    "ids": {**STREAM, "return_token_ids": True},
    "text": {"output_mode": "text"},
    "text-stream": {**STREAM, "output_mode": "text", "params": {"stop": ["e", "harbour"]}},
    "limit-one": {**STREAM, "params": {"max_tokens": 1}},
    "least": {"params": {"min_tokens": 9, "stop_token_ids": [5]}},
    "no-limit": {**STREAM, "params": {"max_tokens": None}},
    "sampled": {"params": {"temperature": 1, "seed": 7, "top_p": 0.9}},
    "logprobs": {"params": {"logprobs": 2}},
    "schema": {"params": {"structured_outputs": {"regex": "[a-z]{3,9}"}}},
    "handle": {"kv_transfer_params": FORGED, "params": {"extra_args": FORGED}},
    "salt": {"cache_salt": "pepper", **STREAM},
    "priority": {"priority": 3},
}
ALONE: list[tuple[str, dict[str, Any]]] = [
    ("prompt_logprobs", {"params": {"prompt_logprobs": 1}}),
    ("unusual", {"params": {"max_tokens": 0}}),
    ("unusual", {"params": {"max_tokens": "12"}}),
    ("unusual", {"params": {"min_tokens": 13}}),
    ("unusual", {**STREAM, "params": {"skip_reading_prefix_cache": True}}),
    ("unusual", USAGE),
    ("unusual", {"sampling_params": None}),
    ("unusual", {"token_ids": []}),
    ("non_text", {"content_parts": [{"type": "image_url", "url": "data:,"}]}),
]
REFUSED: list[dict[str, Any]] = [
    {"model": "nope"},
    {"params": {"temperature": -1}},
    {"params": {"temperature": "hot"}, **STREAM},
    {"params": {"logprobs": 10_000}},
    {"params": {"structured_outputs": {"regex": "("}}},
    {"token_ids": [10**9] * 40},
    {"token_ids": [5] * 20_000},
    {"output_mode": "nope"},
    {"cache_salt": "a@b"},
]


@pytest.fixture(scope="module")
def engines(launcher: Launcher) -> Iterator[Fleet]:
    """A plain, a prefill and a decode engine with the route."""
    engines = Fleet(launcher, flags="--enable-scale-out")
    try:
        engines.launch(NAMES)
        yield engines
    finally:
        engines.end()


@pytest.fixture(scope="module")
def proxy(engines: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """pdproxy in front of them."""
    proxy = Proxy.start(engines.prefills, engines.decodes, tmp_path_factory.mktemp("ids"))
    yield proxy
    assert proxy.stop() == 0, proxy.tail()


async def body_of(engines: Fleet, fields: dict[str, Any]) -> dict[str, Any]:
    """A greedy request whose prompt no engine has in its cache."""
    text = {"model": MODEL, "prompt": story(secrets.token_hex(6))}
    ids = (await ask(engines.plain.url, "/tokenize", text)).json["tokens"]
    fields = dict(fields)
    params = {"temperature": 0, "max_tokens": 12, **fields.pop("params", {})}
    return {"model": MODEL, "token_ids": ids, "sampling_params": params, **fields}


def content_of(answer: Answer) -> Any:
    """An answer's content: of a stream, its choice's ids and text joined, since a busy engine joins
    them, the end of the choice, and what else came.
    """
    if not answer.streamed:
        return masked(answer.json)
    ids: list[int] = []
    text, ends, others = "", [], []
    for event in answer.events:
        found = masked(json.loads(event)) if event != "[DONE]" else event
        choices = found.pop("choices", ()) if isinstance(found, dict) else ()
        if isinstance(found, dict):
            found.pop("weight_versions", None)
        for choice in choices:
            ids += choice.pop("token_ids")
            text += choice.pop("text", "")
            if choice["finish_reason"] is not None:
                ends.append(choice)
        if found not in others:
            others.append(found)
    return ids, text, ends, others


async def compared(engines: Fleet, proxy: Proxy, body: Any) -> None:
    """Fail unless status, type and content equal the plain engine's."""
    headers = {"X-Request-Id": secrets.token_hex(8)}
    plain = await ask(engines.plain.url, GENERATE, body, headers)
    ours = await ask(proxy.url, GENERATE, body, headers)
    assert (ours.status, ours.headers.get("Content-Type")) == (
        plain.status,
        plain.headers.get("Content-Type"),
    ), ours.body
    assert content_of(ours) == content_of(plain)
    assert ours.broken == plain.broken == ""


@pytest.mark.parametrize("fields", SPLIT.values(), ids=SPLIT)
async def test_as_one_plain_engine(engines: Fleet, proxy: Proxy, fields: dict[str, Any]) -> None:
    """The answer is the plain engine's, and the KV has moved."""
    body = await body_of(engines, fields)
    before = Moved.now(engines, proxy, 1)
    await compared(engines, proxy, body)
    await before.settled(lambda increases: in_full(increases) and not increases["alone"])


async def test_several_answers_as_one_plain_engine(engines: Fleet, proxy: Proxy) -> None:
    """They are the plain engine's, and the KV has moved once."""
    body = await body_of(engines, {"params": {"n": 3, "temperature": 1, "seed": 1}})
    before = Moved.now(engines, proxy, 1)
    await compared(engines, proxy, body)
    await before.settled(lambda increases: loaded_once(3)(increases) and not increases["alone"])


@pytest.mark.parametrize(("reason", "fields"), ALONE, ids=str)
async def test_alone_as_one_plain_engine(
    engines: Fleet, proxy: Proxy, reason: str, fields: dict[str, Any]
) -> None:
    """What can't be split is answered as by the plain engine, and counted with its reason."""
    before = proxy.counters().sum("pdproxy_alone_total", reason=reason)
    await compared(engines, proxy, await body_of(engines, fields))
    assert proxy.counters().sum("pdproxy_alone_total", reason=reason) == before + 1


@pytest.mark.parametrize("fields", REFUSED, ids=range(len(REFUSED)))
async def test_refused_as_by_one_plain_engine(
    engines: Fleet, proxy: Proxy, fields: dict[str, Any]
) -> None:
    """A refusal has the plain engine's words, and P holds nothing after it."""
    body = await body_of(engines, fields)
    before = Moved.now(engines, proxy, 1)
    await compared(engines, proxy, body)
    await before.settled(lambda _: True)
