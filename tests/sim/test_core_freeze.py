"""An engine whose core is stopped while its API server answers."""

import asyncio

import msgspec
import pytest

from pdproxy_lab.sim.faults.book import fault_of
from pdproxy_lab.sim.faults.kind import FaultError
from pdproxy_lab.sim.server import SimServer
from tests.sim.moments import FAST
from tests.sim.raw import PATIENCE, Raw, ask, completion, get, turns, until


async def test_with_a_frozen_core_the_api_server_answers_and_no_metric_moves(sim):
    await ask(sim.port, completion())
    sim.faults.add("core_freeze@mid_stream")
    client = await Raw.connect(sim.port)
    client.send(completion(stream=True))
    await until(lambda: sim.engine.stops.any)
    assert (await ask(sim.port, get("/health"))).answer.status == 200
    before = (await ask(sim.port, get("/metrics"))).answer.body
    unheard = await Raw.connect(sim.port)
    unheard.send(completion())
    await until(lambda: len(sim.requests) == 3)
    client.leave()
    await asyncio.wait_for(sim.requests[1].left.wait(), PATIENCE)
    await turns()
    after = (await ask(sim.port, get("/metrics"))).answer.body
    assert _of_the_core(after) == _of_the_core(before), (
        "neither the new request nor the aborted one is in the core's counts"
    )
    await sim.thaw_core()
    assert (await unheard.whole()).answer.status == 200
    assert sim.engine.stats.finished["abort"] == 1


def _to_rank(rank):
    return completion().replace(
        b"\r\n\r\n", f"\r\nx-data-parallel-rank: {rank}\r\n\r\n".encode(), 1
    )


def _of_the_core(page):
    """The lines of vLLM's own metrics."""
    return [line for line in page.splitlines() if line.startswith(b"vllm:")]


async def test_a_core_can_go_on_by_itself(sim):
    sim.faults.add("core_freeze@queued:seconds=0.01")
    assert (await ask(sim.port, completion())).answer.status == 200


async def test_one_rank_stands_still_and_the_others_work():
    async with SimServer(msgspec.structs.replace(FAST, data_parallel_size=2)) as sim:
        sim.faults.add("core_freeze@after:rank=1")
        sim.faults.add("core_freeze@after:rank=7,next=1")
        await ask(sim.port, completion())
        await until(lambda: sim.engine.stops.any)
        asked = [_to_rank(rank) for rank in (0, 1)]
        assert (await ask(sim.port, asked[0])).answer.status == 200
        waits = await Raw.connect(sim.port)
        waits.send(asked[1])
        await turns()
        assert not waits.answer.status
        await sim.thaw_core()
        assert (await waits.whole()).answer.status == 200


def test_a_rank_is_a_number():
    with pytest.raises(FaultError, match="no number"):
        fault_of({"kind": "core_freeze", "rank": "first"})
