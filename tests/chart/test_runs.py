"""What the chart renders runs: engines and a proxy begin as their pods say, the proxy finds the
engines by the labels of the pods, and prompts are split.
"""

# The pods' containers are processes of this machine, each pod at a loopback address of its own. The
# API server is the tests' own.

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.chart.render import Objects, of_kind, pod_of, rendered
from tests.chart.sets import SETS
from tests.fakes.client import Answer, exchange, request
from tests.fakes.forked import command
from tests.fakes.kubernetes_api import KubernetesApi, kubernetes_api
from tests.fakes.ports import free_port
from tests.fakes.samples import read, total
from tests.fakes.world import COMPLETIONS, completion
from tests.unit.test_informer import kubeconfig

VALUES = SETS["2p2d of simulated engines"]
NET = f"127.{random.Random().randrange(16, 250)}.0"


async def run(stack: AsyncExitStack, folder: Path, name: str, *words: str) -> None:
    """Run a command of pdproxy until the end of the test."""
    log = stack.enter_context((folder / f"{name}.log").open("wb"))
    process = command(*words, env=os.environ, stderr=log)

    async def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    stack.push_async_callback(end)


@asynccontextmanager
async def release(objects: Objects, api: KubernetesApi, folder: Path) -> AsyncIterator[int]:
    """Run the pods of a release: of each engine as many as its Deployment says, and one proxy,
    whose port is yielded. What differs from the chart: addresses and ports, so that they fit on one
    machine, and where the API server is.
    """
    port, own, number = free_port(), free_port(), 0
    async with AsyncExitStack() as stack:
        for one in of_kind(objects, "Deployment"):
            name, template = one["metadata"]["name"], one["spec"]["template"]
            (container,) = template["spec"]["containers"]
            if container["name"] != "engine":
                continue
            for _ in range(one["spec"]["replicas"]):
                number += 1
                host = f"{NET}.{number}"
                there = {"$(POD_IP)": host, "--host=0.0.0.0": f"--host={host}"}
                words = [*container["command"][1:], *container["args"]]
                for old, new in {**there, "--port=8000": f"--port={port}"}.items():
                    words = [word.replace(old, new) for word in words]
                await run(stack, folder, f"{name}-{number}", *words)
                api.put(
                    f"{name}-{number}",
                    metadata=template["metadata"],
                    spec=template["spec"],
                    status={
                        "phase": "Running",
                        "podIP": host,
                        "conditions": [{"type": "Ready", "status": "True"}],
                    },
                )
        (config,) = of_kind(objects, "ConfigMap", "pdproxy")
        text = config["data"]["pdproxy.yaml"].replace("pods://:8000/", f"pods://:{port}/")
        settings: dict[str, Any] = yaml.safe_load(text.replace("/run/pdproxy", str(folder)))
        settings["listen"]["port"] = own
        settings["kubernetes"]["kubeconfig"] = kubeconfig(folder, api)
        path = folder / "pdproxy.yaml"
        path.write_text(yaml.safe_dump(settings))
        (proxy,) = pod_of(objects)["spec"]["containers"]
        await run(stack, folder, "proxy", *proxy["args"], "--config", str(path))
        yield own


async def ask(port: int, path: str) -> Answer:
    return await exchange(port, request("GET", path, b""))


async def until_up(port: int, engines: int) -> None:
    """Wait until the proxy can use so many engines."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError, EOFError):
                page = (await ask(port, "/metrics")).body.decode()
                if total(read(page, "pdproxy_node_up"), "pdproxy_node_up", {}) == engines:
                    return
            await asyncio.sleep(0.1)


async def test_engines_alone_make_a_2p2d_that_splits_prompts(tmp_path: Path) -> None:
    async with kubernetes_api() as api, release(rendered(VALUES), api, tmp_path) as port:
        await until_up(port, 4)
        assert (await ask(port, "/ready/proxy")).status == 200
        prompt = "A prompt that is longer than a block of KV. " * 4
        body = completion(model="sim", prompt=prompt, max_tokens=4)
        for _ in range(4):
            assert (await exchange(port, request("POST", COMPLETIONS, body))).status == 200
        page = (await ask(port, "/metrics")).body.decode()
        tokens = read(page, "pdproxy_prompt_tokens")
        by = {
            sample.labels["served"]: sample.value
            for family in tokens
            for sample in family.samples
            if sample.name == "pdproxy_prompt_tokens_total"
        }
        assert {served for served, count in by.items() if count} == {"split"}
        assert total(read(page, "pdproxy_source"), "pdproxy_source_left_out", {}) == 0
