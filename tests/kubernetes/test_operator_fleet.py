"""From two PDRuntimes and a PDProxy to answers: the operator makes pods that run, replaces engines
under streams, and what it made goes when they are deleted.
"""

# `long_operator_fleet.py` has a real API server, scaling, and what is wrong.

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kubernetes.fleet import CLIENTS, STEP, UNREAD, streaming
from tests.kubernetes.kinds import PROXY, RUNTIME
from tests.kubernetes.machines import metric
from tests.kubernetes.operated import Operated, example, operated

ARGS = [f"--decode-step-s={STEP}", "--eos-every=0", "--no-enable-prefix-caching"]
SOON = [{"name": "PAUSE", "value": "0.2"}, {"name": "KV_SECONDS", "value": "1"}]
"""Variables of the preStop hook."""


@pytest.mark.timeout(300)
async def test_two_runtimes_and_a_proxy(tmp_path: Path) -> None:
    async with operated(tmp_path) as made:
        await lives(made)


async def lives(made: Operated) -> None:
    await made.create(*example(args=ARGS, env=SOON))
    await made.until_said(PROXY, "qwen", "PairsComplete", "True")
    await made.find_proxies("qwen")
    before = await made.engines("qwen-prefill")
    async with streaming(made, CLIENTS):

        async def streams() -> bool:
            return made.seen["right"] >= CLIENTS

        await made.until(streams, "each client was served")
        await made.change(RUNTIME, "qwen-decode", args=[*ARGS, "--num-gpu-blocks=8000"])

        async def replaced() -> bool:
            now = await made.engines("qwen-prefill") | await made.engines("qwen-decode")
            gone = now.keys().isdisjoint(before)
            return gone and len(now) == 4 and len({*now.values()}) == 1

        await made.until(replaced, "a rollout")
        for name in ("qwen-prefill", "qwen-decode"):
            await made.until_said(RUNTIME, name, "Progressing", "False")
            await made.until_said(RUNTIME, name, "Discovered", "True")
            await made.until_said(RUNTIME, name, "KVTransferring", "True")
    assert set(made.seen) == {"right"}, made.seen
    ended = "pdproxy_kv_handles_ended_total"
    for host in made.proxies:
        assert {end: await metric(host, ended, end=end) for end in UNREAD} == dict.fromkeys(
            UNREAD, 0.0
        )
    pairs = list(made.pairs())
    assert len({*pairs}) == 2, "of both revisions"
    assert all(first == second for first, second in pairs)
    await made.api.of(PROXY).delete("qwen")
    for name in ("qwen-prefill", "qwen-decode"):
        await made.api.of(RUNTIME).delete(name)

    async def gone() -> bool:
        return not await made.there.pods()

    await made.until(gone, "all pods go")
