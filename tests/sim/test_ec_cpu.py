"""Engines that encode pictures into their memory, and engines that read outputs from there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from pdproxy_lab.sim.core import Core
from pdproxy_lab.sim.ec_connector import ROW_BYTES, WIDTH
from pdproxy_lab.sim.ec_cpu import PATIENCE, ECCpu, FetchOutput
from pdproxy_lab.sim.facts import ECRole, SimFacts
from pdproxy_lab.sim.request import EngineRequest, Medium, Picture, SamplingParams
from pdproxy_lab.sim.server import SimServer
from tests.fakes.pictures import asking
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
from tests.sim.engines import Engines
from tests.sim.raw import Raw, chat, until

ROWS = 70
"""That an engine keeps: all of LARGE, and one of the others."""


def reading(ec_role: ECRole = "ec_producer", *, rows: int = ROWS, **more: Any) -> SimFacts:
    extra = {"ec_cpu_bytes": rows * ROW_BYTES, "ec_enable_nixl": True, **more.pop("extra", {})}
    return with_ec("ECCPUConnector", ec_role, extra, **more)


@dataclass
class Trio:
    """An encoder, a prefill engine that reads from it, and an engine alone."""

    e: SimServer
    p: SimServer
    plain: SimServer


@pytest.fixture
async def trio() -> AsyncIterator[Trio]:
    kinds = [
        reading(),
        reading("ec_consumer", role="prefill", extra={"consumer_ack_timeout_s": 0.1}),
        replace(SEES, connector="none"),
    ]
    async with AsyncExitStack() as stack:
        sims = [
            await stack.enter_async_context(SimServer(kind, chance=number))
            for number, kind in enumerate(kinds)
        ]
        yield Trio(*sims)
        assert not [crash for sim in sims for crash in sim.crashes]


async def test_prefill_reads_what_the_encoder_keeps(trio: Trio) -> None:
    """The answer says where; it goes into the consumer's request as it is. A picture that is named
    by its size alone is as good as itself.
    """
    items = await encoded(trio.e, LARGE, A, LARGE)
    large, small = items.values()
    assert large == {
        "item_indices": [0, 2],
        "metadata": {"image_grid_thw": [1, 2, 128]},
        "peer_host": "127.0.0.1",
        "peer_port": trio.e.engine.ec_port,
        "size_bytes": 64 * ROW_BYTES,
        "shape": [64, WIDTH],
    }
    assert (small["item_indices"], small["shape"]) == ([1], [4, WIDTH])
    assert counts(trio.e) == (2, 0, 2)
    whole = text(await said(trio.plain, STORY, LARGE, A, LARGE))
    for content in ((LARGE, A, LARGE), sized(items)):
        moved = await said(trio.p, STORY, *content, ec_transfer_params=items)
        assert text(moved) == whole
        assert counts(trio.p) == (0, 2, 0)
    handle = await said(
        trio.p, STORY, LARGE, ec_transfer_params=items, max_tokens=1, kv_transfer_params=PREFILL
    )
    assert handle.json["kv_transfer_params"]["do_remote_prefill"]


async def test_without_the_answer_prefill_encodes(trio: Trio) -> None:
    (name,) = await encoded(trio.e, A)
    unknown: list[Any] = [None, {}, {"other": {"peer_host": "127.0.0.1"}}, {name: {}}]
    for params in unknown:
        assert (await said(trio.p, A, STORY, ec_transfer_params=params)).status == 200
    assert counts(trio.p) == (1, 0, 0)


async def test_what_needs_space_goes_first(trio: Trio) -> None:
    """An encoder announces no output that it has dropped, not even the picture's size. Who asks for
    it nevertheless encodes the picture, or fails without one.
    """
    items = await encoded(trio.e, A, B)
    (large,) = (await encoded(trio.e, LARGE)).values()
    (first,) = (await encoded(trio.e, A)).values()
    (second,) = (await encoded(trio.e, B)).values()
    assert (large["shape"], second["shape"]) == ([64, WIDTH], [4, WIDTH])
    assert first == {"item_indices": [0], "metadata": {}}
    failed = await said(trio.p, STORY, sized(items)[0], ec_transfer_params=items)
    assert (failed.status, failed.json["error"]["code"]) == (500, 500)
    assert text(await said(trio.p, STORY, A, ec_transfer_params=items)) == text(
        await said(trio.plain, STORY, A)
    )
    assert counts(trio.p) == (1, 0, 0)
    assert not trio.p.engine.dead


async def test_an_output_that_fits_nowhere_kills(trio: Trio) -> None:
    async with SimServer(reading(rows=60)) as sim:
        died = await said(sim, LARGE)
        assert (died.status, sim.engine.dead) == (500, True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": [5, WIDTH]},
        {"shape": [4]},
        {"shape": None},
        {"size_bytes": ROW_BYTES},
        {"size_bytes": "many"},
        {"peer_port": "here"},
    ],
)
async def test_what_makes_no_sense_is_not_read(trio: Trio, wrong: dict[str, Any]) -> None:
    """The engine encodes the picture itself, if it has one."""
    ((name, item),) = (await encoded(trio.e, A)).items()
    params = {name: {**item, **wrong}}
    assert (await said(trio.p, STORY, A, ec_transfer_params=params)).status == 200
    assert counts(trio.p) == (1, 0, 0)


async def test_another_version_is_refused(trio: Trio) -> None:
    """Whoever names only the size fails, also where the engine has encoded the picture."""
    items = await encoded(trio.e, A)
    kind = reading("ec_consumer", role="prefill", version="0.33.0")
    async with SimServer(kind) as other:
        assert (await said(other, STORY, A, ec_transfer_params=items)).status == 200
        failed = await said(other, STORY, *sized(items), ec_transfer_params=items)
        assert (counts(other), failed.status) == ((1, 0, 0), 500)


@pytest.mark.parametrize("state", ["down", "frozen", "dead"])
async def test_prefill_asks_until_the_encoder_answers(trio: Trio, state: str) -> None:
    """Others go on meanwhile. What a restarted encoder does not have, prefill encodes."""
    items = await encoded(trio.e, A)
    if state == "down":
        await trio.e.kill()
    elif state == "frozen":
        await trio.e.freeze()
    else:
        trio.e.engine.kill_core()
    waiting = asyncio.create_task(said(trio.p, STORY, A, ec_transfer_params=items))
    await until(lambda: trio.p.engine.stats.deferred)
    assert (await said(trio.p, STORY)).status == 200
    await asyncio.sleep(0.2)  # more than one answer takes
    assert not waiting.done()
    if state == "frozen":
        await trio.e.thaw()
    else:
        await trio.e.restart()
    assert text(await waiting) == text(await said(trio.plain, STORY, A))
    assert counts(trio.p) == ((0, 1, 0) if state == "frozen" else (1, 0, 0))


async def test_a_request_that_waits_can_leave(trio: Trio) -> None:
    items = await encoded(trio.e, A)
    (item,) = items.values()
    item["peer_port"] = free_port()
    client = await Raw.connect(trio.p.port)
    client.send(chat(messages=[asking(STORY, A)], ec_transfer_params=items))
    await until(lambda: trio.p.engine.stats.deferred)
    client.leave()
    await until(lambda: not trio.p.engine.stats.waiting)
    assert trio.p.engine._cores[0].ec_connector.next_timer() is None


# -- in virtual time


PICTURE = Picture("m", 20, 7)
SIZE_ONLY = Picture("m", 20, None)
SOURCE = {
    "peer_host": "127.0.0.1",
    "peer_port": 1,
    "size_bytes": 20 * ROW_BYTES,
    "shape": [20, WIDTH],
}


class Consumer:
    """A core whose requests read from a producer that never answers."""

    def __init__(self, rows: int = ROWS) -> None:
        engine = Engines().add(reading("ec_consumer", rows=rows, connector="none"))
        self.core: Core = engine.core
        self.stats = engine.stats
        assert isinstance(self.core.ec_connector, ECCpu)
        self.ec = self.core.ec_connector
        self.ended: dict[str, str] = {}

    def add(self, name: str, *pictures: Picture, now: float = 0.0, start: int = 300) -> None:
        media = [Medium(20 * place, picture) for place, picture in enumerate(pictures)]
        self.core.add(
            EngineRequest(
                id=name,
                prompt=tuple(range(start, start + 100)),
                media=tuple(media),
                sampling=SamplingParams(max_tokens=1, temperature=0),
                ec_transfer_params={one.identifier: SOURCE for one in pictures},
            ),
            now,
        )

    def run(self, now: float) -> None:
        while (step := self.core.begin(now)) is not None:
            for output in self.core.finish(step, now):
                self.ended[output.request_id] = str(output.finish_reason)

    @property
    def fetches(self) -> list[str]:
        found = [one.identifier for one in self.core.commands if isinstance(one, FetchOutput)]
        self.core.commands.clear()
        return found


def test_patience_ends() -> None:
    """Each request's own, however often the producer is asked."""
    consumer = Consumer()
    consumer.add("raw", PICTURE)
    consumer.run(0.0)
    consumer.add("sized", SIZE_ONLY, now=10.0, start=500)
    consumer.run(10.0)
    assert consumer.fetches == ["m"]
    consumer.ec.unanswered("m")
    consumer.run(30.0)
    assert consumer.fetches == ["m"]
    assert consumer.core.next_timer() == PATIENCE
    consumer.run(PATIENCE)
    assert consumer.ended == {"raw": "length"}
    assert consumer.core.next_timer() == 10.0 + PATIENCE
    consumer.run(10.0 + PATIENCE)
    assert consumer.ended == {"raw": "length", "sized": "error"}
    assert (consumer.stats.encoder_inputs, consumer.stats.waiting) == (1, 0)
    assert consumer.core.next_timer() is None


def test_what_comes_waits_for_space() -> None:
    """An output that is being read holds its space until it has come."""
    consumer = Consumer(rows=30)
    consumer.add("two", PICTURE, Picture("n", 20, 8))
    consumer.run(0.0)
    assert consumer.fetches == ["m"]
    consumer.ec.unanswered("m")
    consumer.run(1.0)
    assert consumer.fetches == ["m"]
    consumer.run(PATIENCE)
    assert consumer.ended == {"two": "length"}
    assert consumer.stats.encoder_inputs == 2


def test_kv_that_is_here_needs_no_output() -> None:
    """Nothing is read for a picture whose KV the prefix cache has."""
    consumer = Consumer()
    consumer.add("first", PICTURE)
    consumer.run(0.0)
    consumer.run(PATIENCE)
    assert consumer.fetches == ["m"]
    consumer.add("again", PICTURE, now=PATIENCE)
    consumer.run(PATIENCE)
    assert (consumer.fetches, consumer.ended["again"]) == ([], "length")
