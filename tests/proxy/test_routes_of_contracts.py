"""Each contract on each route that it splits: answers are one engine's, all KV comes from the
prefill engine, and clients see ids of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdproxy.observe.events import ServedAlone
from pdproxy.transfer.registry import ENTRIES
from pdproxy.wire.route import Route
from pdproxy_lab.sim.server import SimServer
from tests.fakes.flagged import FLAGS, MAKE
from tests.fakes.named import body as named_body
from tests.fakes.passed import MESSAGES, RESPONSES
from tests.fakes.pictures import asking, png
from tests.fakes.pool import Pair, pool
from tests.fakes.world import PROMPT
from tests.proxy.registered import Fleet, fleet
from tests.proxy.test_flagged_routes import alone, still

CHAT, GENERATE, COHERE = (route.path for route in (Route.CHAT, Route.GENERATE, Route.COHERE))
OTHERS = (RESPONSES, MESSAGES, GENERATE, COHERE)
STREAM = pytest.mark.parametrize("stream", [False, True])
MODES = {"moriio": ("READ", "WRITE")}
_FINGERPRINT = re.compile(rb'"system_fingerprint":"[^"]*",')
"""It has an engine's settings."""
UNTRIED = {"nixl"}
"""Contracts whose routes have files of their own."""


def _pairs(*, split: bool) -> list[Any]:
    """Each contract with each of these routes that it splits, or does not split."""
    return [
        pytest.param(entry.name, mode, path, id=f"{entry.name}{mode}-{path}")
        for entry in ENTRIES
        if entry.name not in UNTRIED
        for mode in MODES.get(entry.name, ("",))
        for path in OTHERS
        if (Route(path) in entry.capabilities.routes) == split
    ]


@asynccontextmanager
async def running(name: str, mode: str = "", **facts: Any) -> AsyncIterator[Pair | Fleet]:
    """A pair of engines of a contract, and a plain one."""
    facts = {**FLAGS, **facts}
    if name in ("moriio", "p2p-nccl"):
        own = {"transfer_mode": mode} if mode else {}
        everybody = {**own, **facts}
        async with fleet(name, alone=True, everybody=everybody, plain_facts=facts) as found:
            yield found
    else:
        async with pool(name, everybody=facts) as pair:
            yield pair


def _engines(pair: Pair | Fleet) -> tuple[SimServer, SimServer]:
    return (pair.p, pair.d) if isinstance(pair, Pair) else (pair.p[0], pair.d[0])


def body(path: str, **fields: Any) -> dict[str, Any]:
    """A request that can be split."""
    if path == CHAT:
        messages = [{"role": "user", "content": PROMPT}]
        return {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0, **fields}
    return MAKE[path](**fields) if path in MAKE else named_body(path, **fields)


async def same(pair: Pair | Fleet, path: str, asked: dict[str, Any]) -> None:
    """Fail unless the answer is the plain engine's."""
    told = []
    for one in (await pair.ask(path, asked), await pair.asked_plain(path, asked)):
        assert (one.status, one.ended) == (200, True), one.body
        parts = one.events if asked.get("stream") else [one.body]
        told.append([still(_FINGERPRINT.sub(b"", part)) for part in parts])
    assert told[0] == told[1]


@STREAM
@pytest.mark.parametrize(("name", "mode", "path"), _pairs(split=True))
async def test_split_as_by_one_engine(name: str, mode: str, path: str, stream: bool) -> None:
    """The first time, and when engines know each other."""
    async with running(name, mode) as pair:
        p, d = _engines(pair)
        for _ in range(2):
            await same(pair, path, body(path, stream=stream))
        assert not alone(pair.world)
        assert {one.path for one in d.requests} == {path}
        assert len(p.requests) == 2
        assert d.engine.stats.prompt_tokens_by_source["external_kv_transfer"] > 0
        await pair.world.quiet()


@pytest.mark.parametrize(("name", "mode", "path"), _pairs(split=False))
async def test_a_contract_without_the_route_has_one_engine_answer(
    name: str, mode: str, path: str
) -> None:
    """The reason is `route`."""
    async with running(name, mode) as pair:
        assert (await pair.ask(path, body(path))).status == 200
        assert alone(pair.world) == ["route"]


@STREAM
@pytest.mark.parametrize("own", [{}, {"request_id": "mine"}, {"request_id": "m" * 60}])
@pytest.mark.parametrize("name", ["nixl-push", "lmcache-mp"])
async def test_ids_of_a_response(name: str, own: dict[str, str], stream: bool) -> None:
    """Engines read them from the body alone: a leg has one that is minted, the client its own."""
    async with pool(name) as pair:
        answer = await pair.ask(RESPONSES, body(RESPONSES, stream=stream, **own))
        found = json.loads(answer.events[-1].partition(b"data: ")[2]) if stream else answer.json
        shown = found["response"]["id"] if stream else found["id"]
        assert shown == own.get("request_id", shown)
        assert shown.startswith("resp_") or own
        (made,), (loaded,) = (
            [one.json.get("request_id") for one in engine.requests] for engine in (pair.p, pair.d)
        )
        assert made is not None
        assert len(made) >= 32
        assert made not in answer.body.decode()
        assert loaded == (made if name == "nixl-push" else own.get("request_id"))


@pytest.mark.parametrize("given", ["a b", "x" * 200, "é", 5, None])
async def test_an_id_that_no_answer_could_show_is_left_to_one_engine(given: object) -> None:
    """Its answer, or its refusal, is the client's."""
    async with pool("nixl-push") as pair:
        asked = body(RESPONSES, request_id=given)
        ours, plain = await pair.ask(RESPONSES, asked), await pair.asked_plain(RESPONSES, asked)
        assert ours.status == plain.status
        assert ours.json.get("id") == plain.json.get("id")
        assert alone(pair.world) == ["unusual"]


@pytest.mark.parametrize("name", ["nixl-push", "mooncake"])
async def test_a_rank_that_no_header_names(name: str) -> None:
    """Engines do not read it for a response: one of several ranks would get what is for another."""
    async with pool(name, everybody={**FLAGS, "data_parallel_size": 2}) as pair:
        for path in OTHERS:
            await same(pair, path, body(path))
        assert alone(pair.world) == ["route"]


@STREAM
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, COHERE])
@pytest.mark.parametrize(("name", "mode"), [("mooncake", ""), ("moriio", "READ")])
async def test_a_first_token_that_ends_the_prefill(
    name: str, mode: str, path: str, stream: bool
) -> None:
    """The prefill engine keeps no KV then. It has not failed, and no decode engine waits for it."""
    if name == "moriio" and path == RESPONSES:
        return
    async with running(name, mode, eos_every=1) as pair:
        p, d = _engines(pair)
        await same(pair, path, body(path, stream=stream))
        assert (alone(pair.world), len(p.requests)) == (["first_token"], 1)
        assert len(d.requests) == (name == "mooncake")
        assert pair.world.metric("pdproxy_leg_failures_total") == 0
        await pair.world.quiet()


@pytest.mark.parametrize("path", [*OTHERS, CHAT])
async def test_a_prefill_that_ends_by_length(path: str) -> None:
    """Stop rules are the decode engine's. Both are asked at once where no token can end the
    prefill.
    """
    stops: dict[str, Any] = {"stop": ["a"]}
    if path in (MESSAGES, COHERE):
        stops = {"stop_sequences": ["a"]}
    elif path == GENERATE:
        stops = {"params": stops}
    async with running("mooncake") as pair:
        p, d = _engines(pair)
        await same(pair, path, body(path, **stops))
        ((made,), (asked,)) = ([one.json for one in engine.requests] for engine in (p, d))
        name = "sampling_params" if path == GENERATE else None
        made, asked = (one if name is None else one[name] for one in (made, asked))
        stop = "stop_sequences" if path in (MESSAGES, COHERE) else "stop"
        assert (made[stop], asked[stop]) == ([], ["a"])
        at_once = path in (GENERATE, CHAT)
        assert (made.get("min_tokens") == 1) == at_once
        assert pair.world.metric("pdproxy_legs_overlap_seconds_count") == at_once


@pytest.mark.parametrize("name", [entry.name for entry in ENTRIES if not entry.capabilities.media])
async def test_a_contract_without_media_has_one_engine_answer(name: str) -> None:
    """The reason is `non_text`."""
    async with running(name, vision=True) as pair:
        await same(pair, CHAT, body(CHAT, messages=[asking(png("a"), PROMPT)]))
        assert alone(pair.world) == ["non_text"]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (entry.name, mode)
        for entry in ENTRIES
        if entry.capabilities.media and entry.name not in UNTRIED
        for mode in MODES.get(entry.name, ("",))
    ],
)
async def test_pictures(name: str, mode: str) -> None:
    """One engine encodes them, and another picture in the same place is another prompt."""
    async with running(name, mode, vision=True) as pair:
        p, d = _engines(pair)
        for seed in ("a", "b", "a"):
            messages = [asking(png(seed), PROMPT)]
            await same(pair, CHAT, body(CHAT, messages=messages))
        assert not pair.world.events(ServedAlone)
        assert (p.engine.stats.encoder_inputs, d.engine.stats.encoder_inputs) == (2, 0)
