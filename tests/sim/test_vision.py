"""Engines with a model that sees: what real ones do with pictures, and with KV handles beside
them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from pdproxy_lab.sim.facts import KvEventsConfig, SimFacts
from pdproxy_lab.sim.request import EngineRequest, Medium, Picture, SamplingParams
from pdproxy_lab.sim.server import SimServer
from tests.fakes.pictures import part, png
from tests.sim.engines import PROMPT, Engines
from tests.sim.moments import FAST
from tests.sim.raw import Answer, ask, chat, get, post, until

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
A, B, SMALL, LARGE = png("a"), png("b"), png("a", 28, 112), png("a", 300, 300)
"""A and B have one size. Their tokens: 4, 4, 4 and 64."""
STORY = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
SEES = replace(FAST, vision=True, handshake_timeout=20.0, enable_prompt_tokens_details=True)
GRID = {"image_grid_thw": [1, 4, 4]}


@dataclass
class Seers:
    """A prefill and a decode engine, and one without a connector."""

    p: SimServer
    d: SimServer
    plain: SimServer

    async def handle(self, *content: Any, **more: Any) -> dict[str, Any]:
        """P's handle of a message."""
        found = await said(self.p, *content, max_tokens=1, kv_transfer_params=PREFILL, **more)
        assert found.status == 200, found.body
        return dict(found.json["kv_transfer_params"])

    async def meet(self) -> None:
        """Have them exchange KV once: later, a refusal of D frees P's KV at once."""
        found = await said(self.d, "x", kv_transfer_params=await self.handle("x"))
        assert found.status == 200, found.body


@pytest.fixture
async def seers() -> AsyncIterator[Seers]:
    facts = [replace(SEES, role=role) for role in ("prefill", "decode", "aggregated")]
    facts[2] = replace(facts[2], connector="none")
    async with (
        SimServer(facts[0], chance=1) as p,
        SimServer(facts[1], chance=2) as d,
        SimServer(facts[2], chance=3) as plain,
    ):
        yield Seers(p, d, plain)
        assert not [*p.crashes, *d.crashes, *plain.crashes]


async def said(sim: SimServer, *content: Any, **more: Any) -> Answer:
    """The answer to a message of texts, pictures and whole parts."""
    parts = [one if isinstance(one, dict) else part(one) for one in content]
    return await asked(sim, [{"role": "user", "content": parts}], **more)


async def asked(sim: SimServer, messages: list[dict[str, Any]], **more: Any) -> Answer:
    return (await ask(sim.port, chat(messages=messages, **more))).answer


def text(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    if answer.chunks:
        return "".join(one for one in answer.texts if one not in (None, "role", "[DONE]"))
    return str(answer.json["choices"][0]["message"]["content"])


def details(answer: Answer) -> dict[str, Any]:
    return dict(answer.json["usage"]["prompt_tokens_details"])


def encoded(sim: SimServer) -> int:
    return sim.engine.stats.encoder_inputs


def of_the_cache(sim: SimServer) -> tuple[int, int]:
    return sim.engine.stats.mm_cache_queries, sim.engine.stats.mm_cache_hits


# -- one engine


async def test_answers_depend_on_the_pictures(seers: Seers) -> None:
    """By content, order and place. A picture takes tokens by its size, is encoded once, and the
    prefix cache tells it from others.
    """
    sim = seers.plain
    first = await said(sim, A, STORY)
    assert details(first)["multimodal_tokens"] == {"image": 4}
    others = [
        await said(sim, *content, STORY) for content in ((B,), (SMALL,), (A, B), (B, A), (A, A))
    ]
    assert len({text(one) for one in (first, *others)}) == 6
    assert encoded(sim) == 3
    again = await said(sim, A, STORY)
    assert (text(again), details(again)["cached_tokens"]) == (text(first), 48)
    salted = await said(sim, A, STORY, cache_salt="s")
    assert (text(salted), details(salted)["cached_tokens"]) == (text(first), 0)
    assert encoded(sim) == 3
    tokens = [
        details(await said(sim, png(0, *size)))["multimodal_tokens"]["image"]
        for size in ((1, 1), (140, 84), (141, 84), (2000, 2000))
    ]
    assert tokens == [4, 15, 18, 64]
    page = (await ask(sim.port, get("/metrics"))).answer.body.decode()
    queries, hits = of_the_cache(sim)
    assert queries == hits + len(sim.engine.pictures)
    assert f'vllm:mm_cache_queries_total{{engine="0",model_name="sim"}} {queries}.0' in page
    assert f'vllm:mm_cache_hits_total{{engine="0",model_name="sim"}} {hits}.0' in page


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64",
        "data:image/png,AAAA",
        "data:image/png;base64,",
        "data:image/png;base64,%%%%",
        "data:image/png;base64,iVBORw0KGgo=",
        "ftp://host/picture.png",
    ],
)
async def test_what_cannot_be_read_is_refused(seers: Seers, url: str) -> None:
    """Also by a decode engine with a handle, whose KV is free then."""
    await seers.meet()
    handle = await seers.handle(STORY, A)
    bad = {"type": "image_url", "image_url": {"url": url}}
    for sim, more in ((seers.plain, {}), (seers.d, {"kv_transfer_params": handle})):
        refused = await said(sim, STORY, bad, **more)
        assert refused.status == 400
        words = "The URL must be" if url.startswith("ftp") else "Failed to load image"
        assert refused.json["error"]["message"].startswith(words)
    await until(lambda: not seers.p.engine.handles)


async def test_other_media_are_refused(seers: Seers) -> None:
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    refused = await said(seers.plain, STORY, video)
    assert (refused.status, b"At most 0 video(s)" in refused.body) == (400, True)


async def test_a_uuid_stands_for_the_picture(seers: Seers) -> None:
    """What comes with it is read once. Without it there is nothing to answer about."""
    sim, named = seers.plain, {**part(A), "uuid": "u"}
    nothing = {"type": "image_url", "image_url": None, "uuid": "u"}
    missing = await said(sim, STORY, nothing)
    assert missing.status == 400
    assert "Cache miss for image at index 0" in missing.json["error"]["message"]
    first = text(await said(sim, STORY, named))
    assert first == text(await said(sim, STORY, A))
    for other in (nothing, {**part(LARGE), "uuid": "u"}):
        assert text(await said(sim, STORY, other)) == first
    assert of_the_cache(sim) == (5, 2)


def test_events_of_blocks_name_the_pictures(engines: Engines) -> None:
    """Each with its place in the block; it may begin before the block."""
    engine = engines.add(
        SimFacts(kv_events=KvEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0"))
    )
    engine.core.add(
        EngineRequest(
            id="one",
            prompt=PROMPT[:48],
            media=(Medium(10, Picture("m", 20, 7)), Medium(30, Picture("n", 1, 8))),
            sampling=SamplingParams(max_tokens=1, temperature=0),
            cache_salt="s",
        ),
        0.0,
    )
    step = engine.core.begin(0.0)
    assert step is not None
    engine.core.finish(step, 0.0)
    (event,) = engine.core.kv_events.take()
    assert event["extra_keys"] == [(("m", 10), "s"), (("m", -6), ("n", 14)), None]
    assert event["token_ids"] == list(PROMPT[:48])


# -- a prefill and a decode engine


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "content", [(STORY, A), (A, STORY, LARGE, "and", A), (A,)], ids=["one", "three", "only"]
)
async def test_decode_encodes_nothing_of_what_prefill_has_computed(
    seers: Seers, content: tuple[Any, ...], stream: bool
) -> None:
    """Ids beside the handle are not read."""
    whole = text(await said(seers.plain, *content))
    handle = {**await seers.handle(*content), "prompt_token_ids": [5, 6, 7, 8]}
    assert text(await said(seers.d, *content, kv_transfer_params=handle, stream=stream)) == whole
    sources = seers.d.engine.stats.prompt_tokens_by_source
    assert sources["external_kv_transfer"] == handle["remote_num_tokens"]
    assert (encoded(seers.p), encoded(seers.d)) == (len(set(content) & {A, LARGE}), 0)
    assert of_the_cache(seers.d)[0] == sum(isinstance(one, bytes) for one in content)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_other_routes_see_and_move_kv(seers: Seers, path: str) -> None:
    url = part(A)["image_url"]["url"]
    body: dict[str, Any] = {"model": "sim", "temperature": 0}
    if path == "/v1/responses":
        limit, told = "max_output_tokens", "input"
        content = [{"type": "input_text", "text": STORY}, {"type": "input_image", "image_url": url}]
    else:
        limit, told = "max_tokens", "messages"
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        content = [{"type": "text", "text": STORY}, {"type": "image", "source": source}]
    body[told] = [{"role": "user", "content": content}]

    async def answered(sim: SimServer, tokens: int = 4, **more: Any) -> dict[str, Any]:
        found = (await ask(sim.port, post(path, **{**body, limit: tokens}, **more))).answer
        assert found.status == 200, found.body
        return dict(found.json)

    whole = await answered(seers.plain)
    handle = (await answered(seers.p, 1, kv_transfer_params=PREFILL))["kv_transfer_params"]
    moved = await answered(seers.d, kv_transfer_params=handle)
    said_by = [one.get("content") or one["output"][0]["content"] for one in (whole, moved)]
    assert said_by[0] == said_by[1]
    assert (encoded(seers.p), encoded(seers.d)) == (1, 0)


async def test_decode_encodes_a_picture_that_ends_the_prompt(seers: Seers) -> None:
    """The last token is computed again, for its output."""
    ends = {"add_generation_prompt": False, "continue_final_message": True}
    whole = text(await said(seers.plain, STORY, A, **ends))
    handle = await seers.handle(STORY, A, **ends)
    assert text(await said(seers.d, STORY, A, kv_transfer_params=handle, **ends)) == whole
    assert encoded(seers.d) == 1


async def test_another_picture_of_the_same_size_poisons_the_cache(seers: Seers) -> None:
    """The handle's picture is answered about, and later, alone, again."""
    first, second = [text(await said(seers.plain, one, STORY)) for one in (A, B)]
    assert first != second
    handle = await seers.handle(A, STORY)
    assert text(await said(seers.d, B, STORY, kv_transfer_params=handle)) == first
    alone = await said(seers.d, B, STORY)
    assert (text(alone), details(alone)["cached_tokens"]) == (first, 48)


async def test_a_picture_of_another_size_kills_decode_or_gives_garbage(seers: Seers) -> None:
    small, large = png("c", 56, 56), LARGE
    handle = await seers.handle(STORY, large)
    wrong = text(await said(seers.d, STORY, small, kv_transfer_params=handle))
    assert wrong != text(await said(seers.plain, STORY, small))
    handle = await seers.handle(STORY, small)
    died = await said(seers.d, STORY, large, kv_transfer_params=handle)
    assert (died.status, seers.d.engine.dead) == (500, True)


async def test_a_uuid_that_two_engines_know_differently(seers: Seers) -> None:
    """Or that one of them does not know at all: its refusal frees P's KV."""
    await seers.meet()
    named = {**part(A), "uuid": "u"}
    handle = await seers.handle(STORY, named)
    nothing = {"type": "image_url", "image_url": None, "uuid": "u"}
    refused = await said(seers.d, STORY, nothing, kv_transfer_params=handle)
    assert (refused.status, b"Cache miss" in refused.body) == (400, True)
    await until(lambda: not seers.p.engine.handles)
    await said(seers.d, {**part(LARGE), "uuid": "u"})
    died = await said(
        seers.d, STORY, named, kv_transfer_params=await seers.handle(STORY, named, cache_salt="s")
    )
    assert (died.status, seers.d.engine.dead) == (500, True)


def embedded(**more: Any) -> dict[str, Any]:
    return {"type": "image_embeds", "image_embeds": {**GRID, **more}}


async def test_metadata_need_an_engine_that_loads_kv(seers: Seers) -> None:
    """Others refuse them. With a handle they are as good as the picture, and no processor works;
    its identifier tells the prefix cache which one it is. Without KV the core ends at them.
    """
    for sim in (seers.plain, seers.p):
        refused = await said(sim, STORY, embedded())
        assert (refused.status, b"--enable-mm-embeds" in refused.body) == (400, True)
    handle = await seers.handle(A, STORY)
    whole = text(await said(seers.plain, A, STORY))
    (identifier,) = seers.p.engine.pictures
    named = {**embedded(), "uuid": identifier}
    assert text(await said(seers.d, named, STORY, kv_transfer_params=handle)) == whole
    assert (encoded(seers.d), of_the_cache(seers.d)) == (0, (0, 0))
    again = await said(seers.d, A, STORY)
    assert (text(again), details(again)["cached_tokens"]) == (whole, 48)
    mixed = await said(seers.d, A, named)
    assert (mixed.status, b"Mixing raw image" in mixed.body) == (400, True)
    assert (await said(seers.d, embedded(image_embeds="AAAA"))).status == 200
    died = await said(seers.d, embedded())
    assert (died.status, seers.d.engine.dead) == (500, True)
