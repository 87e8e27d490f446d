"""Flags of an engine and fields of a request that change what vLLM answers: through the proxy they
change the same.
"""

# Starts one engine, with `--enable-force-include-usage` and a store of responses; what other tests
# need of flags is on it, too.

import secrets
from typing import Any

import aiohttp
import pytest

from .client import Answer, ask
from .compare import differs
from .engine import MODEL, Engine
from .fleet import Fleet
from .proxy import Proxy
from .shapes import CHAT, COMPLETIONS, question, story
from .test_other_routes import content_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]

RESPONSES = "/v1/responses"
RUNNING = {"include_usage": True, "continuous_usage_stats": True}
SEVERAL = {"n": 2, "temperature": 0.9, "seed": 5}


def completion(**fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": story(secrets.token_hex(6)),
        "temperature": 0,
        "max_tokens": 10,
        **fields,
    }


def chat(**fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": question(secrets.token_hex(6)),
        "temperature": 0,
        "max_tokens": 10,
        **fields,
    }


def responses(**fields: Any) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "input": "Which way to the sea?",
        "max_output_tokens": 6,
        "temperature": 0,
        **fields,
    }
    return {name: value for name, value in body.items() if value is not ...}


async def get(url: str) -> Answer:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return Answer(answer.status, dict(answer.headers), await answer.read())


async def same(plain: str, proxy: str, path: str, body: dict[str, Any]) -> Answer:
    """Ask both until they agree: a late engine puts two tokens into one event. Return the proxy's
    answer.
    """
    why = "not asked"
    for _ in range(3):
        ours, theirs = await ask(proxy, path, body), await ask(plain, path, body)
        why = differs(theirs, ours, warm=True)
        if not why:
            return ours
    raise AssertionError(why)


@pytest.mark.parametrize(
    "options", [None, {"include_usage": False}, {"include_usage": True}, RUNNING], ids=str
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, completion()),
        (CHAT, chat()),
        (COMPLETIONS, completion(**SEVERAL)),
        (CHAT, chat(**SEVERAL)),
        (COMPLETIONS, completion(prompt=[story("first"), story("second"), story("third")])),
        (COMPLETIONS, completion(echo=True)),
        (CHAT, chat(return_token_ids=True, logprobs=True)),
    ],
    ids=["completion", "chat", "choices", "choices of a chat", "list", "echo", "ids"],
)
async def test_forced_usage(
    flagged: Engine,
    proxy_flagged: Proxy,
    path: str,
    body: dict[str, Any],
    options: dict[str, bool] | None,
) -> None:
    """Each event and the stream's end have it, whatever the client asks for, and it is what the
    engine itself reports.
    """
    ours = await same(
        flagged.url, proxy_flagged.url, path, {**body, "stream": True, "stream_options": options}
    )
    assert all(chunk["usage"]["prompt_tokens"] for chunk in ours.chunks)
    assert ours.chunks[-1]["choices"] == []


async def test_whole_answers_of_an_engine_that_forces_usage(
    flagged: Engine, proxy_flagged: Proxy
) -> None:
    """They have a usage anyway."""
    for path, body in ((COMPLETIONS, completion()), (CHAT, chat())):
        assert (await same(flagged.url, proxy_flagged.url, path, body)).json["usage"][
            "completion_tokens"
        ] == 10


async def test_usage_that_nobody_asked_for_is_counted(proxy_flagged: Proxy) -> None:
    """The proxy's own counts are those of the usage event."""
    before = proxy_flagged.counters()
    ours = await ask(proxy_flagged.url, CHAT, chat(stream=True))
    after = proxy_flagged.counters()
    counted = [one.sum("pdproxy_tokens_total", kind="completion") for one in (before, after)]
    assert counted[1] - counted[0] == ours.chunks[-1]["usage"]["completion_tokens"] == 10


async def tokens(fleet: Fleet) -> list[int]:
    """A prompt's ids."""
    body = {"model": MODEL, "messages": question(secrets.token_hex(6))}
    return (await ask(fleet.plain.url, "/tokenize", body)).json["tokens"]


@pytest.mark.parametrize(
    "ids",
    [..., [], [-1], [1.5], [True], "x", {}, [10**7], [5] * 3000, None],
    ids=lambda v: str(v)[:20],
)
@pytest.mark.parametrize(
    "fields", [{}, {"stream": True}, {"return_token_ids": True}, {"max_tokens": 0}], ids=str
)
async def test_ids_in_place_of_messages(
    fleet: Fleet, proxy_1p1d: Proxy, fields: dict[str, Any], ids: Any
) -> None:
    """A chat's prompt is the one that a plain engine reads, and its refusals are the plain
    engine's.
    """
    given = await tokens(fleet) if ids is ... else ids
    body = chat(**fields, kv_transfer_params={"prompt_token_ids": given})
    ours = await _same_refusal_or_answer(fleet.plain.url, proxy_1p1d.url, CHAT, body)
    if ids is ... and ours.status == 200 and not ours.streamed:
        assert ours.json["usage"]["prompt_tokens"] == len(given)


async def test_ids_in_completions_mean_nothing(fleet: Fleet, proxy_1p1d: Proxy) -> None:
    """An engine does not read them there."""
    body = completion(
        return_token_ids=True, kv_transfer_params={"prompt_token_ids": await tokens(fleet)}
    )
    await same(fleet.plain.url, proxy_1p1d.url, COMPLETIONS, body)


async def test_ids_in_responses_and_messages(fleet: Fleet, proxy_1p1d: Proxy) -> None:
    """The routes that one engine serves read them, too."""
    ids = await tokens(fleet)
    message = {"model": MODEL, "messages": question("other"), "max_tokens": 6, "temperature": 0}
    for path, body in ((RESPONSES, responses()), ("/v1/messages", message)):
        body["kv_transfer_params"] = {"prompt_token_ids": ids}
        ours, plain = await ask(proxy_1p1d.url, path, body), await ask(fleet.plain.url, path, body)
        assert (ours.status, content_of(ours)) == (plain.status, content_of(plain))
        counted = ours.json["usage"]  # that of a message counts cached tokens apart
        assert counted["input_tokens"] + counted.get("cache_read_input_tokens", 0) == len(ids)


async def _same_refusal_or_answer(
    plain: str, proxy: str, path: str, body: dict[str, Any]
) -> Answer:
    theirs = await ask(plain, path, body)
    if theirs.status == 200 and not theirs.body.startswith(b'data: {"error"'):
        return await same(plain, proxy, path, body)
    ours = await ask(proxy, path, body)
    # a stream that is refused has status 200
    payload = theirs.events[0].encode() if theirs.streamed else theirs.body
    assert ours.body == payload
    assert ours.status == ours.json["error"]["code"]
    return ours


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"store": True, "stream": True},
        {"store": "on"},
        {"store": None},
        {"store": "perhaps"},
        {"store": [True]},
        {"previous_response_id": "resp_1"},
        {"previous_response_id": "resp_1", "stream": True},
        {"previous_response_id": 7},
        {
            "previous_response_id": "resp_1",
            "previous_input_messages": [{"role": "user", "content": "x"}],
        },
        {"background": True},
        {"background": True, "stream": True},
        {"background": "yes", "store": True, "previous_response_id": "resp_1"},
        {"background": True, "store": False},
        {"background": True, "model": "nope"},
        {"background": True, "temperature": "hot"},
        {"background": "perhaps"},
        {"background": "no"},
        {"background": "off", "store": False},
        {"background": []},
        {"input": ...},
        {"input": ..., "background": True},
        {"input": 5},
        {"temperature": "hot", "max_output_tokens": "x"},
        {"metadata": 1, "store": "yes"},
        {"temperature": -1},
        {"input": "x " * 3000},
    ],
    ids=lambda v: str(v)[:50],
)
async def test_responses_without_a_store(
    fleet: Fleet, proxy_1p1d: Proxy, fields: dict[str, Any]
) -> None:
    """What asks for storage is answered as by an engine that has none: status, type, parameter and
    text.
    """
    body = responses(**fields)
    ours, plain = (
        await ask(proxy_1p1d.url, RESPONSES, body),
        await ask(fleet.plain.url, RESPONSES, body),
    )
    assert ours.status == plain.status
    assert content_of(ours) == content_of(plain)


async def test_an_engine_with_a_store_stores_nothing(flagged: Engine, proxy_flagged: Proxy) -> None:
    """Neither a response nor one in the background; the engine itself would store both."""

    async def stored(name: str) -> int:
        return (await get(f"{flagged.url}{RESPONSES}/{name}")).status

    for fields in ({}, {"store": True}, {"store": "yes"}):
        own, ours = [
            await ask(url, RESPONSES, responses(**fields))
            for url in (flagged.url, proxy_flagged.url)
        ]
        assert (own.status, ours.status) == (200, 200)
        assert (await stored(own.json["id"]), await stored(ours.json["id"])) == (200, 404)
    assert (await ask(flagged.url, RESPONSES, responses(background=True))).json[
        "status"
    ] == "queued"
    refused = await ask(proxy_flagged.url, RESPONSES, responses(background=True))
    assert (refused.status, refused.json["error"]["param"]) == (400, "background")
    known = responses(previous_response_id=own.json["id"], background=True)
    assert (await ask(proxy_flagged.url, RESPONSES, known)).status == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, completion()), (CHAT, chat()), (RESPONSES, responses())]
)
@pytest.mark.parametrize("form", ["TEXT", "json", "xml", None])
async def test_headers(
    fleet: Fleet, proxy_1p1d: Proxy, path: str, body: dict[str, Any], stream: bool, form: str | None
) -> None:
    """The names of the headers are a plain engine's, with the load for clients that name a format
    of it.

    A stream has two more, which ask proxies in front not to buffer it.
    """
    headers = {"endpoint-load-metrics-format": form} if form else {}
    plain, ours = [
        await ask(url, path, {**body, "stream": stream}, headers)
        for url in (fleet.plain.url, proxy_1p1d.url)
    ]
    own = {"date", "server", "x-request-id", "vary"}
    names, theirs = ({name.lower() for name in one.headers} - own for one in (ours, plain))
    assert names == theirs | ({"cache-control", "x-accel-buffering"} if stream else set())
    loads = [
        one.headers.get("endpoint-load-metrics", "").partition("=")[0] for one in (plain, ours)
    ]
    assert loads[0].partition(" ")[0] == loads[1].partition(" ")[0]
    assert bool(loads[1]) is (form in ("TEXT", "json") and not stream and path != RESPONSES)


async def test_the_fields_of_the_models(fleet: Fleet, proxy_1p1d: Proxy) -> None:
    """In vLLM's order."""
    ours, plain = (
        await get(f"{proxy_1p1d.url}/v1/models"),
        await get(f"{fleet.plain.url}/v1/models"),
    )
    assert list(ours.json) == list(plain.json)
    assert [list(card) for card in ours.json["data"]] == [list(card) for card in plain.json["data"]]


async def test_the_tokenizers_description_and_the_load(
    flagged: Engine, proxy_flagged: Proxy
) -> None:
    """The engine describes its tokenizer; the load is the proxy's own, in the engine's form."""
    theirs, ours = (
        await get(flagged.url + "/tokenizer_info"),
        await get(proxy_flagged.url + "/tokenizer_info"),
    )
    assert (ours.status, ours.body) == (theirs.status, theirs.body)
    assert theirs.status == 200
    assert b"tokenizer_class" in theirs.body
    loads = [await get(url + "/load") for url in (flagged.url, proxy_flagged.url)]
    assert [(one.status, one.body) for one in loads] == [(200, b'{"server_load":0}')] * 2
