"""The operator before a real API server: rollouts that go well and badly, scaling by hand and by
demand, mistakes that reach no pod or that conditions name, and deletion.
"""

# Run by `.ci/full kubernetes`.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from pdproxy_operator.names import PROXY as OF_PROXY
from pdproxy_operator.names import RUNTIME as OF_RUNTIME
from tests.fakes.client import Client
from tests.fakes.world import COMPLETIONS, completion
from tests.kubernetes.build import Built, ensure
from tests.kubernetes.deployments import ends
from tests.kubernetes.fleet import CLIENTS, streaming
from tests.kubernetes.kinds import CONFIG_MAP, DEPLOYMENT, PROXY, RUNTIME, SERVICE
from tests.kubernetes.machines import PORT, metric
from tests.kubernetes.operated import Operated, example, operated
from tests.kubernetes.test_operator_fleet import ARGS, SOON, lives

PAGES = 20.0
"""Seconds in which the operator has asked the proxies for their metrics again."""
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def built() -> Built:
    return ensure()


@pytest.fixture
async def made(built: Built, tmp_path: Path) -> AsyncIterator[Operated]:
    async with operated(tmp_path, built) as found:
        yield found


async def serving(made: Operated, **of_runtimes: object) -> None:
    """Have the example serve."""
    await made.create(*example(**{"args": ARGS, "env": SOON, **of_runtimes}))
    await made.until_said(PROXY, "qwen", "PairsComplete", "True")
    await made.find_proxies("qwen")


async def test_a_fleet_lives(made: Operated) -> None:
    """What the ordinary suite shows before an API server of the tests."""
    await lives(made)


async def test_a_typo_in_a_kv_flag_reaches_no_pod(made: Operated) -> None:
    await serving(made)
    before = await made.engines("qwen-decode")
    for flag in ('--kv-transfer-confg={"kv_role":"kv_consumer"}', "--kv_transfer_config={}"):
        with pytest.raises(aiohttp.ClientError, match="use connector and kvTransferConfig"):
            await made.change(RUNTIME, "qwen-decode", args=[*ARGS, flag])
    with pytest.raises(aiohttp.ClientError, match="Unsupported value"):
        await made.change(RUNTIME, "qwen-decode", connector="nixle")
    assert await made.engines("qwen-decode") == before


async def test_engines_without_a_kv_configuration_are_named(tmp_path: Path) -> None:
    """Decode engines compute prompts again: answers are right, and slow. (The definition refuses
    the flag: only an API server that does not know it takes such engines.)
    """
    async with operated(tmp_path) as made:
        await made.create(*example(args=[*ARGS, "--connector=none"], env=SOON))

        async def ready() -> bool:
            await made.find_proxies("qwen")
            return len(made.proxies) == 2

        await made.until(ready, "proxies")
        async with streaming(made, 4):
            began = asyncio.get_running_loop().time()
            said = await made.until_said(RUNTIME, "qwen-prefill", "KVTransferring", "False")
            took = asyncio.get_running_loop().time() - began
        print(f"KVTransferring False in {took:.0f} s: {said}")
        assert took < 60


async def test_an_engine_that_can_not_start_stops_a_rollout(made: Operated) -> None:
    """One pair goes on, and the old spec brings all back."""
    await serving(made, startSeconds=60)
    async with streaming(made, 8):
        await made.change(RUNTIME, "qwen-decode", args=[*ARGS, "--num-gpu-blocks=none"])
        said = await made.until_said(RUNTIME, "qwen-decode", "Degraded", "True")
        print(f"Degraded: {said}")
        assert "qwen-decode-" in said.message
        assert (await made.said(PROXY, "qwen", "PairsComplete")).status == "True"
        await made.change(RUNTIME, "qwen-decode", args=ARGS)
        await made.until_said(RUNTIME, "qwen-decode", "Degraded", "False")

        async def whole() -> bool:
            engines = await made.engines("qwen-prefill") | await made.engines("qwen-decode")
            return len(engines) == 4 and len({*engines.values()}) == 1

        await made.until(whole, "all engines come back")
    assert set(made.seen) == {"right"}, made.seen


async def test_the_idlest_engine_goes(made: Operated) -> None:
    await serving(made)
    await made.change(RUNTIME, "qwen-decode", replicas=3)

    async def has(count: int) -> bool:
        pods = await made.there.pods(**{OF_RUNTIME: "qwen-decode"})
        return len([pod for pod in pods if not ends(pod)]) == count

    async def three() -> bool:
        return len(await made.there.hosts(**{OF_RUNTIME: "qwen-decode"})) == 3

    await made.until(three, "three decode engines")
    host = made.proxies[0]
    client = Client(*await asyncio.open_connection(host, PORT))
    client.post(COMPLETIONS, completion(stream=True, max_tokens=400))

    running = "vllm:num_requests_running"

    async def busy_ones() -> list[str]:
        pods = await made.there.pods(**{OF_RUNTIME: "qwen-decode"})
        return [
            pod["metadata"]["name"]
            for pod in pods
            if await metric(pod["status"]["podIP"], running) > 0
        ]

    async def known() -> bool:
        return len(await busy_ones()) == 1

    await made.until(known, "an engine with a stream")
    (busy,) = await busy_ones()
    await asyncio.sleep(PAGES)
    await made.change(RUNTIME, "qwen-decode", replicas=1)

    async def one() -> bool:
        return await has(1)

    await made.until(one, "one decode engine")
    (left,) = [
        pod["metadata"]["name"]
        for pod in await made.there.pods(**{OF_RUNTIME: "qwen-decode"})
        if not ends(pod)
    ]
    assert left == busy
    answer = await client.answer()
    client.close()
    assert (answer.status, answer.ended) == (200, True)


async def test_a_deleted_proxy_leaves_the_engines(made: Operated) -> None:
    await serving(made)
    before = await made.engines("qwen-prefill") | await made.engines("qwen-decode")
    await made.api.of(PROXY).delete("qwen")

    async def gone() -> bool:
        named = [
            one
            for kind in (CONFIG_MAP, DEPLOYMENT, SERVICE)
            for one in await made.api.of(kind).list()
        ]
        of_proxy = [one for one in named if OF_PROXY in one["metadata"]["labels"]]
        return not of_proxy and not await made.there.pods(**{OF_PROXY: "qwen"})

    await made.until(gone, "what belongs to the proxy")
    await asyncio.sleep(3)
    assert await made.engines("qwen-prefill") | await made.engines("qwen-decode") == before


async def test_demand_raises_decode_engines(made: Operated) -> None:
    """Streams whose KV fills decode engines need more of these, and no more prefill engines."""
    autoscaling = {"minReplicas": 2, "maxReplicas": 4}
    await serving(
        made, autoscaling=autoscaling, args=[*ARGS, "--num-gpu-blocks=64", "--max-model-len=512"]
    )
    async with streaming(made, CLIENTS):

        async def more() -> bool:
            return len(await made.there.hosts(**{OF_RUNTIME: "qwen-decode"})) > 2

        await made.until(more, "more decode engines")
    assert (await made.one(RUNTIME, "qwen-prefill"))["spec"]["replicas"] == 2
    assert set(made.seen) == {"right"}, made.seen
