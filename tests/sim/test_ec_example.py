"""Engines that encode pictures for others, and engines that load these outputs from a shared
folder.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pdproxy_lab.sim.facts import ECRole, SimFacts
from pdproxy_lab.sim.faults.book import PlannedFault
from pdproxy_lab.sim.server import SimServer
from tests.fakes.pictures import part, url
from tests.sim.encoders import (
    LARGE,
    PREFILL,
    SEES,
    STORY,
    A,
    B,
    counts,
    encoded,
    said,
    sized,
    text,
    with_ec,
)
from tests.sim.raw import ask, chat, completion, get, post


def sharing(folder: Path, ec_role: ECRole = "ec_producer", **more: Any) -> SimFacts:
    return with_ec("ECExampleConnector", ec_role, {"shared_storage_path": str(folder)}, **more)


@dataclass
class Trio:
    """An encoder, a prefill and a decode engine, and one alone."""

    folder: Path
    e: SimServer
    p: SimServer
    d: SimServer
    plain: SimServer

    @property
    def stored(self) -> set[str]:
        """The identifiers of what lies in the folder."""
        return {file.parent.name for file in self.folder.glob("*/encoder_cache.safetensors")}


@pytest.fixture
async def trio(tmp_path: Path) -> AsyncIterator[Trio]:
    kinds = [
        sharing(tmp_path),
        sharing(tmp_path, "ec_consumer", role="prefill"),
        replace(SEES, role="decode"),
        replace(SEES, connector="none"),
    ]
    async with AsyncExitStack() as stack:
        sims = [
            await stack.enter_async_context(SimServer(kind, admin_port=0, chance=number))
            for number, kind in enumerate(kinds)
        ]
        yield Trio(tmp_path, *sims)
        assert not [crash for sim in sims for crash in sim.crashes]


# -- the encoder


async def test_an_encoder_answers_without_a_token(trio: Trio) -> None:
    """It says which pictures there were, in which places; it has no KV, and encodes nothing
    twice, whoever has encoded it.
    """
    answer = await said(trio.e, A, STORY, B, A)
    assert answer.status == 200, answer.body
    (choice,) = answer.json["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    assert (choice["stop_reason"], choice["message"].get("tool_calls")) == (None, None)
    usage = answer.json["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, usage["prompt_tokens"])
    assert answer.json["kv_transfer_params"] is None
    grid = {"image_grid_thw": [1, 2, 8]}
    first, second = answer.json["ec_transfer_params"].items()
    assert first == (first[0], {"item_indices": [0, 2], "metadata": grid})
    assert second == (second[0], {"item_indices": [1], "metadata": grid})
    assert trio.stored == {first[0], second[0]}
    assert counts(trio.e) == (2, 0, 2)
    assert trio.e.engine._cores[0].pool._fresh == 1, "no block was ever taken"
    assert await encoded(trio.e, A) == {first[0]: {"item_indices": [0], "metadata": grid}}
    async with SimServer(sharing(trio.folder)) as other:
        assert await encoded(other, B) == {second[0]: {"item_indices": [0], "metadata": grid}}
        assert counts(other) == (0, 0, 0)
    assert counts(trio.e) == (2, 0, 2)


async def test_limits_and_prompts_in_pieces_change_nothing(tmp_path: Path) -> None:
    """Many tokens are asked for, many choices, and a prompt is longer than a step."""
    async with SimServer(sharing(tmp_path, max_num_batched_tokens=8)) as sim:
        answer = await said(
            sim, STORY, LARGE, STORY, B, max_tokens=50, n=2, logprobs=True, temperature=1
        )
        assert answer.status == 200, answer.body
        assert [one["finish_reason"] for one in answer.json["choices"]] == ["stop", "stop"]
        assert answer.json["usage"]["completion_tokens"] == 0
        assert [one["item_indices"] for one in answer.json["ec_transfer_params"].values()] == [
            [0],
            [1],
        ]
        assert counts(sim) == (2, 0, 2)


async def test_a_stream_of_an_encoder_says_nothing(trio: Trio) -> None:
    """vLLM sends no event without a token: not even a finish reason."""
    answer = await said(trio.e, A, stream=True)
    assert answer.texts == ["role", "[DONE]"]
    assert b"ec_transfer_params" not in answer.body
    assert counts(trio.e) == (1, 0, 1)
    stream = (await ask(trio.e.port, completion(stream=True))).answer
    assert stream.texts == ["[DONE]"]


async def test_a_text_is_encoded_at_once(trio: Trio) -> None:
    for data in (completion(), chat()):
        answer = (await ask(trio.e.port, data)).answer
        assert answer.status == 200, answer.body
        assert answer.json["choices"][0]["finish_reason"] == "stop"
        assert answer.json["usage"]["completion_tokens"] == 0
        assert answer.json["ec_transfer_params"] is None
    assert counts(trio.e) == (0, 0, 0)


async def test_an_encoder_refuses_metadata(trio: Trio) -> None:
    """It would have nothing to encode."""
    grid = {"image_grid_thw": [1, 2, 8]}
    refused = await said(trio.e, {"type": "image_embeds", "image_embeds": grid, "uuid": "u"})
    assert (refused.status, b"--enable-mm-embeds" in refused.body) == (400, True)


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ({"kind": "status", "args": {"status": 500}}, 500),
        ({"kind": "status", "args": {"status": 200, "body": '{"choices":[]}'}}, 200),
        ({"kind": "garbage", "args": {"what": "json"}}, 200),
        ({"kind": "dead_core"}, 500),
    ],
)
async def test_an_encoder_fails_as_other_engines_do(
    trio: Trio, fault: dict[str, Any], status: int
) -> None:
    """Also with an answer that says nothing of pictures."""
    trio.e.faults.add(PlannedFault(**fault))
    answer = await said(trio.e, A)
    assert (answer.status, b"item_indices" in answer.body) == (status, False)


# -- those that load


async def test_prefill_encodes_nothing_that_is_stored(trio: Trio) -> None:
    """Of a raw picture, and of one that is named by its size alone. What its cache has is not
    loaded again; what is not stored, the engine encodes.
    """
    whole = text(await said(trio.plain, STORY, A, LARGE))
    items = await encoded(trio.e, A, LARGE)
    handle = (await said(trio.p, STORY, A, LARGE, max_tokens=1, kv_transfer_params=PREFILL)).json[
        "kv_transfer_params"
    ]
    assert counts(trio.p) == (0, 2, 0)
    assert text(await said(trio.d, STORY, A, LARGE, kv_transfer_params=handle)) == whole
    assert text(await said(trio.p, STORY, *sized(items))) == whole
    assert counts(trio.p) == (0, 2, 0)
    assert text(await said(trio.p, STORY, B)) == text(await said(trio.plain, STORY, B))
    assert counts(trio.p) == (1, 2, 0)
    assert len(trio.stored) == 2


async def test_prefill_loads_what_metadata_name(trio: Trio) -> None:
    """With a name that nobody has stored there is nothing to encode: the engine dies."""
    items = await encoded(trio.e, A)
    (named,) = sized(items)
    assert text(await said(trio.p, named, STORY)) == text(await said(trio.plain, A, STORY))
    assert counts(trio.p) == (0, 1, 0)
    died = await said(trio.p, {**named, "uuid": "unknown"}, STORY)
    assert (died.status, trio.p.engine.dead) == (500, True)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_other_routes_load_too(trio: Trio, path: str) -> None:
    body: dict[str, Any] = {"model": "sim", "temperature": 0}
    if path == "/v1/responses":
        limit, told = "max_output_tokens", "input"
        content: list[dict[str, Any]] = [
            {"type": "input_text", "text": STORY},
            {"type": "input_image", "image_url": url(A)},
        ]
    else:
        limit, told = "max_tokens", "messages"
        data = url(A).partition(",")[2]
        source = {"type": "base64", "media_type": "image/png", "data": data}
        content = [{"type": "text", "text": STORY}, {"type": "image", "source": source}]
    body |= {told: [{"role": "user", "content": content}], limit: 4}
    texts = []
    for sim in (trio.plain, trio.e, trio.p):
        found = (await ask(sim.port, post(path, **body, ec_transfer_params={"x": {}}))).answer
        assert found.status == 200, found.body
        says = found.json.get("ec_transfer_params")
        assert (says is not None) == (sim is trio.e)
        texts.append(found.json.get("content") or found.json["output"][0]["content"])
    assert texts[0] == texts[2]
    assert counts(trio.p) == (0, 1, 0)


async def test_one_engine_may_be_both(tmp_path: Path) -> None:
    """It generates, stores and loads, whatever it is asked."""
    kind = sharing(tmp_path, "ec_both", connector="none")
    async with SimServer(kind) as first, SimServer(kind) as second:
        answer = await said(first, A, STORY)
        assert answer.json["usage"]["completion_tokens"] == 4
        assert len(answer.json["ec_transfer_params"]) == 1
        assert text(await said(second, A, STORY)) == text(answer)
        assert (counts(first), counts(second)) == ((1, 0, 1), (0, 1, 0))


# -- names


async def test_a_uuid_is_the_name_of_the_output(trio: Trio) -> None:
    """So another picture under it gets the first one's output, as in vLLM."""
    assert list(await encoded(trio.e, {**part(A), "uuid": "u"})) == ["u"]
    assert text(await said(trio.p, STORY, {**part(B), "uuid": "u"})) == text(
        await said(trio.plain, STORY, A)
    )
    assert counts(trio.p) == (0, 1, 0)


async def test_a_uuid_of_two_sizes_fails_the_second_request(trio: Trio) -> None:
    """Where the cache has the first one. The engine goes on."""
    (named,) = sized(await encoded(trio.e, A))
    await said(trio.p, STORY, named)
    other = {**named, "image_embeds": {"image_grid_thw": [1, 2, 12]}}
    for content in ((other,), (named, other)):
        failed = await said(trio.p, STORY, *content)
        assert (failed.status, failed.json["error"]["code"]) == (500, 500)
    assert (await said(trio.p, STORY, named)).status == 200


async def test_an_output_with_too_few_rows_kills(trio: Trio) -> None:
    (named,) = sized(await encoded(trio.e, A))
    died = await said(trio.p, {**named, "image_embeds": {"image_grid_thw": [1, 2, 12]}})
    assert (died.status, trio.p.engine.dead) == (500, True)


async def test_a_file_that_is_not_whole_kills(trio: Trio) -> None:
    (identifier,) = await encoded(trio.e, A)
    (trio.folder / identifier / "encoder_cache.safetensors").write_bytes(b"\x92")
    died = await said(trio.p, A)
    assert (died.status, trio.p.engine.dead) == (500, True)


async def test_a_uuid_that_is_no_name_kills(trio: Trio) -> None:
    died = await said(trio.e, {**part(A), "uuid": "u" * 300})
    assert (died.status, trio.e.engine.dead) == (500, True)


async def test_a_uuid_does_not_leave_the_folder(trio: Trio) -> None:
    """As opposed to vLLM."""
    for name in ("../out", "/out", ".."):
        assert list(await encoded(trio.e, {**part(A), "uuid": name})) == [name]
    assert len(trio.stored) == 3


# -- what tests can see


async def test_the_admin_port_counts(trio: Trio) -> None:
    await encoded(trio.e, A, B)
    await said(trio.p, A)
    seen = []
    for sim in (trio.e, trio.p):
        assert sim.admin_url is not None
        state = (await ask(int(sim.admin_url.rpartition(":")[2]), get("/state"))).answer.json
        seen.append(state["encoder"])
    assert seen == [
        {"inputs": 2, "loaded": 0, "stored": 2},
        {"inputs": 0, "loaded": 1, "stored": 0},
    ]
    page = (await ask(trio.e.port, get("/metrics"))).answer.body
    assert b"encoder" not in page
    assert b'enable_prefix_caching="False"' in page
