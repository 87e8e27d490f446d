"""Half of all streams lose their engine at once: a share goes on at once, the others in their turn,
and all end rightly.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy.observe.events import StreamContinued
from pdproxy.settings.limits import Limits
from pdproxy_lab.sim.journal import Journal
from tests.chaos.load import loaded, stream
from tests.chaos.options import Options
from tests.chaos.virtual.network import VirtualNetwork
from tests.fakes.virtual import run

SHARE = 0.1
HARDWARE = Hardware(
    prefill_tokens_per_s=20_000.0,
    decode_step_s=0.2,
    decode_step_per_seq_s=0.0,
    link_bytes_per_s=1e12,
)
PROMPT = "the river and the mountain and the harbour and the ledger and the copper and the window"


def half_lost(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `count` streams on two decode engines, and kill one of these in their middle."""

    async def course(network: VirtualNetwork) -> None:
        limits = Limits(max_inflight=count, max_queue=0, retry_share=SHARE, min_retries=1)
        long = dict.fromkeys(
            ("first_token", "between_tokens", "retry", "continuation", "prefill"), 60.0
        )
        options = Options(prefill=1, decode=2)
        size = {"max_num_seqs": 2 * count, "num_gpu_blocks": 64 * count}
        async with loaded(network, monkeypatch, options, HARDWARE, limits, long, **size) as load:
            body = stream(PROMPT, 20)
            await load.learn(body)
            prefill, lost, other = load.world.engines
            for engine in load.world.engines:
                engine.sim.journal = Journal(3 * count)
            retries = load.world.proxy.retries
            asked = [asyncio.ensure_future(load.ask(body, f"s{number}")) for number in range(count)]
            while sum(len(one.sim.requests) for one in (lost, other)) < count:
                await asyncio.sleep(0.01)
            await asyncio.sleep(1.5)  # all have their first data
            assert abs(len(lost.sim.requests) - len(other.sim.requests)) <= 1
            assert len(prefill.sim.requests) == count
            await lost.run(lost.sim.kill())
            begun = most = waited = 0
            while not all(one.done() for one in asked):
                begun = len(prefill.sim.requests) - count
                results = Counter(
                    event.result
                    for event in load.trace.events
                    if isinstance(event, StreamContinued)
                )
                most = max(most, begun - results["continued"])
                waited = max(waited, retries.waiting)
                await asyncio.sleep(0.005)
            assert [wrong for wrong in (one.result() for one in asked) if wrong] == []
            assert results == {"continued": count // 2}
            assert begun == count // 2
            assert 1 < most <= SHARE * count
            assert waited >= count // 2 - 2 * SHARE * count
            assert (retries.running, retries.waiting, retries.refused) == (0, 0, 0)

    run(course)


def test_half_of_two_hundred_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """`long_half_lost` does the same with a thousand."""
    half_lost(200, monkeypatch)
