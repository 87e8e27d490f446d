"""What the chart renders runs: engines and proxies begin as their pods say, the proxies find the
engines by the labels of the pods, prompts are split, and engines that end wait for the proxies.
"""

# The pods' containers are processes of this machine (tests/kubernetes).

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.chart.render import of_kind, rendered
from tests.chart.sets import SETS
from tests.fakes.client import Answer, Client
from tests.fakes.kubernetes_api import kubernetes_api
from tests.fakes.samples import read, total
from tests.fakes.world import COMPLETIONS, completion
from tests.kubernetes.kinds import CONFIG_MAP, DEPLOYMENT, SERVICE
from tests.kubernetes.machines import PORT, ask, machines, metric
from tests.kubernetes.objects import FakeApi
from tests.unit.test_informer import kubeconfig

VALUES = SETS["2p2d of simulated engines"]
KINDS = {kind.kind: kind for kind in (CONFIG_MAP, DEPLOYMENT, SERVICE)}
COMPONENT = "app.kubernetes.io/component"


async def generated(host: str) -> Answer:
    prompt = "A prompt that is longer than a block of KV. " * 4
    client = Client(*await asyncio.open_connection(host, PORT))
    try:
        client.post(COMPLETIONS, completion(model="sim", prompt=prompt, max_tokens=4))
        return await client.answer()
    finally:
        client.close()


async def test_engines_alone_make_a_2p2d_that_splits_prompts(tmp_path: Path) -> None:
    async with kubernetes_api() as server:
        api = FakeApi(server)
        objects = rendered(VALUES)
        for one in objects:
            if (kind := KINDS.get(one["kind"])) is not None:
                await api.of(kind).create(one)
        async with machines(api, kubeconfig(tmp_path, server), tmp_path) as there:

            async def all_up() -> bool:
                found = await there.hosts(**{COMPONENT: "proxy"})
                up = [await metric(host, "pdproxy_node_up") for host in found]
                count = [await metric(host, "pdproxy_replicas") for host in found]
                return up == [4.0, 4.0] and count == [2.0, 2.0]

            await there.until(all_up)
            host, _ = await there.hosts(**{COMPONENT: "proxy"})
            for _ in range(4):
                assert (await generated(host)).status == 200
            page = (await ask(host, "/metrics")).body.decode()
            by = {
                sample.labels["served"]: sample.value
                for family in read(page, "pdproxy_prompt_tokens")
                for sample in family.samples
                if sample.name == "pdproxy_prompt_tokens_total"
            }
            assert {served for served, count in by.items() if count} == {"split"}
            assert total(read(page, "pdproxy_source"), "pdproxy_source_left_out", {}) == 0

            async def one_less() -> bool:
                return len(await there.pods(**{COMPONENT: "decode"})) == 1

            (decode,) = of_kind(objects, "Deployment", "pdproxy-decode")
            decode["spec"]["replicas"] = 1
            await api.of(DEPLOYMENT).create(decode)
            await there.until(one_less)
            assert [code for one in there.kubelets for code in one.codes.values()] == [0]
