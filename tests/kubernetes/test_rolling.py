"""Engines in pods that are replaced while clients stream."""

# `long_rolling.py` has other versions, more and fewer engines, and machines that are lost.

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kubernetes.fleet import BOTH, CLIENTS, fleet, streaming


@pytest.mark.timeout(300)
async def test_a_rolling_replacement_costs_no_request_and_no_kv(tmp_path: Path) -> None:
    """One pod of each role at a time. Each request is served at the first attempt, with the KV of a
    prefill engine.
    """
    async with fleet(tmp_path) as made:
        async with streaming(made, CLIENTS):
            made.change(*BOTH)
            await made.settled()
        assert set(made.seen) == {"right"}, made.seen
        loaded = await made.of_proxies("pdproxy_kv_handles_ended_total", end="loaded")
        assert (loaded, await made.unread()) == (made.seen["right"], 0)
        hooks = [code for one in made.kubelets.values() for code in one.codes.values()]
        assert hooks == [0] * 4


@pytest.mark.timeout(300)
async def test_without_the_hook_a_replacement_costs_requests(tmp_path: Path) -> None:
    """What the test before would see."""
    async with fleet(tmp_path, hook=False) as made:
        async with streaming(made, CLIENTS):
            made.change(*BOTH, hook=False)
            await made.settled()
        assert set(made.seen) > {"right"}, made.seen
