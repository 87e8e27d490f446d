"""Engines that push what they encode to the engine that will use it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from pdproxy_lab.sim.ec_connector import ROW_BYTES, EncoderOutput
from pdproxy_lab.sim.ec_mooncake import KEPT, ECMooncake
from pdproxy_lab.sim.facts import ECRole, SimFacts
from pdproxy_lab.sim.request import EngineRequest, Medium, Picture, SamplingParams
from pdproxy_lab.sim.server import SimServer
from pdproxy_lab.sim.stats import Stats
from tests.fakes.ports import free_port
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
from tests.sim.engines import OTHER, PROMPT, Engines
from tests.sim.raw import until

WAIT = 0.5
"""Seconds for which a consumer waits for a push where one never comes."""


def pushing(ec_role: ECRole = "ec_producer", wait: float = 60.0, **more: Any) -> SimFacts:
    extra = {"push_wait_timeout_s": wait, "control_timeout_s": 30.0}
    return with_ec("ECMooncakeConnector", ec_role, extra, **more)


def named(*names: str) -> dict[str, Any]:
    return {"ec_items": [{"transfer_id": name} for name in names]}


@dataclass
class Trio:
    """An encoder, a prefill engine that it pushes to, and an engine alone."""

    e: SimServer
    p: SimServer
    plain: SimServer

    @property
    def consumer(self) -> dict[str, str]:
        """What tells the encoder where to push."""
        return {"consumer_zmq": f"tcp://127.0.0.1:{self.p.engine.ec_port}"}

    async def push(self, *content: Any, names: tuple[str, ...]) -> dict[str, Any]:
        """Encode pictures, and wait until they were pushed; return the consumer's parameters."""
        params = {**self.consumer, **named(*names)}
        before = self.e.engine.stats.encoder_outputs_stored
        items = await encoded(self.e, *content, ec_transfer_params=params)
        await until(lambda: self.e.engine.stats.encoder_outputs_stored == before + len(names))
        placed = {index: name for name, one in items.items() for index in one["item_indices"]}
        return {
            "ec_items": [
                {"mm_hash": placed[index], "transfer_id": name} for index, name in enumerate(names)
            ]
        }


@pytest.fixture
async def trio() -> AsyncIterator[Trio]:
    kinds = [
        pushing(),
        pushing("ec_consumer", WAIT, role="prefill"),
        replace(SEES, connector="none"),
    ]
    async with AsyncExitStack() as stack:
        sims = [
            await stack.enter_async_context(SimServer(kind, chance=number))
            for number, kind in enumerate(kinds)
        ]
        yield Trio(*sims)
        assert not [crash for sim in sims for crash in sim.crashes]


async def test_prefill_uses_what_was_pushed(trio: Trio) -> None:
    """One id for each place of a picture. Raw pictures, and those named by their size alone."""
    params = {**trio.consumer, **named("1", "2", "3")}
    items = await encoded(trio.e, LARGE, A, LARGE, ec_transfer_params=params)
    large, small = items.values()
    assert large == {
        "item_indices": [0, 2],
        "metadata": {"image_grid_thw": [1, 2, 128]},
        "transfer_id": "3",
    }
    assert small["transfer_id"] == "2"
    await until(lambda: counts(trio.e) == (2, 0, 3))
    names = [next(iter(items)), list(items)[1], next(iter(items))]
    used = {
        "ec_items": [
            {"mm_hash": name, "transfer_id": str(place)} for place, name in enumerate(names, 1)
        ]
    }
    whole = text(await said(trio.plain, STORY, LARGE, A, LARGE))
    moved = await said(
        trio.p,
        STORY,
        *sized(items),
        ec_transfer_params=used,
        max_tokens=1,
        kv_transfer_params=PREFILL,
    )
    assert moved.json["kv_transfer_params"]["do_remote_prefill"]
    assert text(await said(trio.p, STORY, LARGE, A, LARGE, ec_transfer_params=used)) == whole
    assert counts(trio.p) == (0, 2, 0)


async def test_prefill_may_wait_before_the_encoder_is_asked(trio: Trio) -> None:
    """It waits, others go on, and it begins as the push comes."""
    async with SimServer(pushing("ec_consumer", role="prefill")) as p:
        waiting = asyncio.create_task(said(p, STORY, A, ec_transfer_params=named("t")))
        await until(lambda: p.engine.stats.deferred)
        assert (await said(p, STORY)).status == 200
        consumer = {"consumer_zmq": f"tcp://127.0.0.1:{p.engine.ec_port}"}
        await encoded(trio.e, A, ec_transfer_params={**consumer, **named("t")})
        assert text(await waiting) == text(await said(trio.plain, STORY, A))
        assert counts(p) == (0, 1, 0)
        assert p.engine.stats.deferred == 0


@pytest.mark.parametrize("params", [None, {}, named("nobody")])
async def test_without_a_push_a_request_fails(trio: Trio, params: dict[str, Any] | None) -> None:
    """After the time that is set. It never encodes the picture."""
    failed = await said(trio.p, STORY, A, ec_transfer_params=params)
    assert (failed.status, failed.json["error"]["code"]) == (500, 500)
    assert counts(trio.p) == (0, 0, 0)
    assert trio.p.engine.stats.finished["error"] == 1
    assert (await said(trio.p, STORY)).status == 200


async def test_a_push_under_another_name_is_found_by_its_picture(trio: Trio) -> None:
    await trio.push(A, names=("t",))
    assert (await said(trio.p, STORY, A, ec_transfer_params=named("other"))).status == 200
    assert counts(trio.p) == (0, 1, 0)


async def test_a_name_is_good_for_one_request_and_one_picture(trio: Trio) -> None:
    """What the cache has needs none any more."""
    used = await trio.push(A, names=("t",))
    for _ in range(2):
        assert (await said(trio.p, STORY, A, ec_transfer_params=used)).status == 200
    assert counts(trio.p) == (0, 1, 0)
    await encoded(trio.e, B, ec_transfer_params={**trio.consumer, **named("t")})
    over = await said(trio.p, STORY, B, ec_transfer_params=named("t"))
    assert (over.status, counts(trio.p)) == (500, (0, 1, 0))
    assert counts(trio.e) == (2, 0, 1)


async def test_an_encoder_pushes_only_where_it_is_told(trio: Trio) -> None:
    """Whether anybody listens there changes nothing of its answer."""
    for params in (None, named("t"), {"consumer_zmq": "nowhere"}):
        ((_, item),) = (await encoded(trio.e, A, ec_transfer_params=params)).items()
        assert item.get("transfer_id") == ("t" if params == named("t") else None)
    consumer = {"consumer_zmq": f"tcp://127.0.0.1:{free_port()}"}
    await encoded(trio.e, A, ec_transfer_params=consumer)
    assert counts(trio.e) == (1, 0, 0)


async def test_a_push_waits_for_a_consumer_that_restarts(trio: Trio) -> None:
    params = {**trio.consumer, **named("t")}
    await trio.p.kill()
    await encoded(trio.e, A, ec_transfer_params=params)
    await trio.p.restart()
    await until(lambda: counts(trio.e) == (1, 0, 1))
    assert (await said(trio.p, STORY, A, ec_transfer_params=named("t"))).status == 200


async def test_a_full_consumer_refuses_pushes(trio: Trio) -> None:
    """What is used makes space, and so does the end of a request that did not need it."""
    config = {"ec_buffer_size": 5 * ROW_BYTES}
    async with SimServer(pushing("ec_consumer", WAIT, role="prefill", config=config)) as p:
        full = Trio(trio.e, p, trio.plain)
        used = await full.push(A, names=("1",))
        params = {**full.consumer, **named("2")}
        await encoded(trio.e, B, ec_transfer_params=params)
        failed = await said(p, STORY, B, ec_transfer_params=named("2"))
        assert (failed.status, counts(p)) == (500, (0, 0, 0))
        assert (await said(p, STORY, A, ec_transfer_params=used)).status == 200
        await full.push(B, names=("3",))
        assert (await said(p, STORY, B, ec_transfer_params=named("3"))).status == 200
        unused = await full.push(A, names=("4",))
        assert (await said(p, STORY, A, ec_transfer_params=unused)).status == 200
        await full.push(B, names=("5",))


@pytest.mark.parametrize("items", [["t"], {"t": 1}, 7])
async def test_names_that_are_none_kill(trio: Trio, items: Any) -> None:
    for sim in (trio.e, trio.p):
        answer = await said(sim, STORY, A, ec_transfer_params={"ec_items": items})
        assert (answer.status, sim.engine.dead) == (500, True)


def test_a_request_that_fails_while_its_kv_comes_keeps_its_blocks() -> None:
    """Until the KV has come. An id of it may name another picture's push."""
    engines = Engines()
    p = engines.add(replace(SEES, role="prefill"))
    d = engines.add(pushing("ec_consumer", role="decode"))
    run = engines.ask(d, kv=engines.handle(p), id="r")
    assert d.stats.deferred == 1
    d.core.ec_connector.unavailable.add("r")
    engines.ask(d, OTHER, 1)
    engines.run(engines.now + 1)
    assert run.over == "error"
    assert (d.dead, d.core.pool.usage, p.core.pool.usage) == (False, 0, 0)


def test_an_id_is_pushed_once() -> None:
    """By whichever request."""
    core = Engines().add(pushing()).core
    for name, transfer_id in (("first", "t"), ("second", "t"), ("third", "u")):
        core.add(
            EngineRequest(
                id=name,
                prompt=PROMPT,
                media=(Medium(0, Picture("m", 20, 7)),),
                sampling=SamplingParams(max_tokens=1),
                ec_transfer_params={"consumer_zmq": "tcp://127.0.0.1:7", **named(transfer_id)},
            ),
            0.0,
        )
    step = core.begin(0.0)
    assert step is not None
    assert [output.finish_reason for output in core.finish(step, 0.0)] == ["stop"] * 3
    assert [command.transfer_id for command in core.commands] == ["t", "u"]


def test_what_nobody_uses_is_dropped() -> None:
    config = pushing("ec_consumer", role="prefill").ec_transfer_config
    assert config is not None
    connector = ECMooncake(config, Stats(), deque())
    assert connector.pushed("t", "m", EncoderOutput(7, 20), 0.0)
    assert not connector.pushed("t", "other", EncoderOutput(7, 20), 0.0)
    connector.tick(KEPT - 1)
    assert connector.has("m")
    assert connector.next_timer() == KEPT
    connector.tick(KEPT)
    assert not connector.has("m")
    assert connector.pushed("t", "m", EncoderOutput(7, 20), KEPT), "the name is over: dropped"
    assert not connector.has("m")
    connector.tick(2 * KEPT)
    assert connector.next_timer() is None
