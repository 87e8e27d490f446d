"""A fleet of engines in pods: an API server, kubelets, Deployments of engines, proxies that follow
the pods, and clients that stream all the while.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pdproxy_lab.sim.tokenizer import BuiltInTokenizer
from tests.chart.generate import HOOK
from tests.fakes.client import Answer, Client, request
from tests.fakes.forked import Forked, command
from tests.fakes.kubernetes_api import kubernetes_api
from tests.fakes.ports import free_port
from tests.fakes.samples import read, total
from tests.fakes.world import COMPLETIONS, PROMPT, completion
from tests.kubernetes.build import Built
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.deployments import Deployment, ended
from tests.kubernetes.kinds import POD
from tests.kubernetes.kubelet import Kubelet, addresses
from tests.kubernetes.objects import Api, FakeApi, Objects, RealApi
from tests.sim.engines import plain
from tests.unit.test_informer import kubeconfig

PATIENCE = 60.0
ROLE = "pdproxy.dev/role"
BOTH = ("prefill", "decode")
CLIENTS = 50
UP, MEMBERS = "pdproxy_node_up", "pdproxy_node_state"
TOKENS = 12
STEP = 0.1
"""Seconds of an engine's step: 50 streams are slow enough for a busy machine."""
LATENCY = 0.5
"""Seconds until KV has been read: behind the end of a prefill engine's part of the request."""
ONCE = {"limits": {"attempts": 1, "continuations": 0}}
"""The proxies' settings where no second attempt is to hide what was lost."""
GRACE = 60.0
UNREAD = ("lost", "expired", "stuck", "released", "aborted")
"""Ends of KV handles that no decode engine has read whole."""
MIN_READY = 2.0
"""Seconds: the proxies know of a pod and have probed it before the next one is deleted."""
NODES = ("machine-1", "machine-2")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PDPROXY_")}
EXPECTED = BuiltInTokenizer().decode(
    plain(tuple(BuiltInTokenizer().encode(PROMPT)), TOKENS, model="tiny", eos_every=0)
)


class Streamed(Protocol):
    """What streams come from."""

    @property
    def proxies(self) -> Sequence[str]:
        """Their addresses."""

    port: int
    seen: Counter[str]


@dataclass
class Fleet:
    """What a test sees of it. `port`: of all pods and proxies, each of which has an address of its
    own.
    """

    pods: Objects
    kubelets: dict[str, Kubelet]
    prefill: Deployment
    decode: Deployment
    proxies: Sequence[str]
    port: int
    controllers: list[asyncio.Task[None]] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    """Requests of clients, by how they have ended."""

    async def ask(self, host: str, path: str) -> Answer:
        client = Client(*await asyncio.open_connection(host, self.port))
        try:
            client.send(request("GET", path, b""))
            return await client.answer()
        finally:
            client.close()

    async def metric(self, host: str, name: str, **labels: str) -> float:
        """The sum of a metric's samples at a proxy or an engine."""
        page = (await self.ask(host, "/metrics")).body.decode()
        return total(read(page, name), name, labels)

    async def of_proxies(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples at all proxies."""
        return sum([await self.metric(one, name, **labels) for one in self.proxies])

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not await holds():
                for task in self.controllers:
                    if task.done():
                        task.result()
                for kubelet in self.kubelets.values():
                    kubelet.look()
                await asyncio.sleep(0.1)

    async def settled(self) -> None:
        """Wait until all pods are as they should be, and each proxy uses all of them, and none
        besides.
        """
        wanted = float(self.prefill.replicas + self.decode.replicas)

        async def holds() -> bool:
            if not (await self.prefill.settled() and await self.decode.settled()):
                return False
            return await self.all_have(UP, wanted) and await self.all_have(MEMBERS, wanted)

        await self.until(holds)

    async def all_have(self, name: str, value: float) -> bool:
        """Return whether a metric has this value, all samples together, at each proxy."""
        with contextlib.suppress(OSError, EOFError):
            return all([await self.metric(one, name) == value for one in self.proxies])
        return False  # a proxy begins

    def change(self, *roles: str, **more: Any) -> None:
        """Have the engines of these roles be replaced by others. `more`: see `template`."""
        for one in (self.prefill, self.decode):
            if one.name in roles:
                one.template = template(one.name, self.port, self.proxies, seed="1", **more)

    async def unread(self) -> float:
        """Return how many KV handles nobody has read."""
        ended = "pdproxy_kv_handles_ended_total"
        return sum([await self.of_proxies(ended, end=end) for end in UNREAD])

    async def served(self, count: int) -> bool:
        """Return whether so many requests were served."""
        return self.seen["right"] >= count


def template(
    role: str,
    port: int,
    proxies: Sequence[str],
    *,
    hook: bool = True,
    variables: Mapping[str, str] | None = None,
    **more: str,
) -> Any:
    """The template of a role's pods. `hook`: whether they have a preStop hook; `variables`: of the
    hook, in place of the usual ones; `more`: options of the engine.
    """
    options = {
        "model": "tiny",
        "eos-every": "0",
        "decode-step-s": str(STEP),
        "transfer-latency-s": str(LATENCY),
        "side-channel-host": "$(POD_IP)",
        "host": "$(POD_IP)",
        "port": str(port),
        "role": role,
        **more,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    usual = {
        "ENGINE_PORT": str(port),
        "PDPROXY_SERVICES": " ".join(f"http://{one}:{port}" for one in proxies),
        "PAUSE": "0.3",
    }
    own = {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    values = {**usual, **(variables or {})}.items()
    env = [{"name": "POD_IP", **own}, *({"name": name, "value": one} for name, one in values)]
    container = {
        "name": "engine",
        "command": ["pdproxy", "sim", "--no-enable-prefix-caching", *words],
        "env": env,
        "ports": [{"name": "http", "containerPort": port}],
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": port},
            "periodSeconds": 0.2,
            "timeoutSeconds": 2,
        },
    }
    if hook:
        container["lifecycle"] = {"preStop": {"exec": {"command": ["/bin/sh", str(HOOK)]}}}
    return {
        "metadata": {"labels": {ROLE: role}},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": GRACE},
    }


def _settings(host: str, port: int, config: str, settings: Mapping[str, Any]) -> str:
    """A proxy's settings: engines are the pods that have a role."""
    return json.dumps(
        {
            "listen": {"host": host, "port": port, "linger": 0},
            **settings,
            "kubernetes": {"kubeconfig": config},
            "pools": [
                {
                    "connector": "nixl",
                    "nodes": [{"url": f"pods://default:{port}/{ROLE}", "role": "by_label"}],
                }
            ],
        }
    )


@asynccontextmanager
async def fleet(
    folder: Path,
    *,
    settings: Mapping[str, Any] = ONCE,
    built: Built | None = None,
    **more: Any,
) -> AsyncIterator[Fleet]:
    """Two prefill and two decode engines on two machines, and two proxies. `settings`: of the
    proxies; `built`: the programs of a real API server, None for the fake one; `more`: see
    `template`.
    """
    port, hosts = free_port(), addresses()
    proxies = [next(hosts), next(hosts)]
    async with AsyncExitStack() as stack:
        objects: Api
        if built is None:
            api = await stack.enter_async_context(kubernetes_api())
            config, objects = kubeconfig(folder, api), FakeApi(api)
        else:
            real = Cluster(built, folder)
            await stack.enter_async_context(real.running())
            config = kubeconfig(folder, real)  # type: ignore[arg-type]  # it has a url
            objects = RealApi(real)
        kubelets = {
            node: await stack.enter_async_context(Kubelet(objects, node, hosts, folder))
            for node in NODES
        }
        pods = objects.of(POD)
        deployments = [
            Deployment(pods, role, 2, template(role, port, proxies, **more), NODES, MIN_READY)
            for role in BOTH
        ]
        made = Fleet(pods, kubelets, deployments[0], deployments[1], proxies, port)
        made.controllers += [asyncio.create_task(one.run()) for one in deployments]
        stack.push_async_callback(ended, made.controllers)
        for one in proxies:
            path = folder / f"{one}.json"
            path.write_text(_settings(one, port, config, settings))
            log = stack.enter_context(path.with_suffix(".log").open("wb"))
            process = command("serve", "--config", str(path), env=ENVIRONMENT, stderr=log)
            stack.push_async_callback(_killed, process)
        await made.settled()
        yield made


async def until_settled(*deployments: Deployment) -> None:
    """Wait until all pods of these are as they should be."""
    async with asyncio.timeout(PATIENCE):
        while not all([await one.settled() for one in deployments]):
            await asyncio.sleep(0.1)


async def _killed(process: Forked) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


@asynccontextmanager
async def streaming(made: Streamed, clients: int) -> AsyncIterator[None]:
    """Let so many clients stream, each from one of the proxies. How requests end is counted in
    `seen`: "right", or what was wrong.
    """
    over = asyncio.Event()

    async def ask(number: int) -> None:
        host = made.proxies[number % len(made.proxies)]
        await asyncio.sleep(number * STEP / 2)  # at any moment streams are at each point
        while not over.is_set():
            client = Client(*await asyncio.open_connection(host, made.port))
            client.post(COMPLETIONS, completion(stream=True, max_tokens=TOKENS))
            try:
                answer = await client.answer()
            except (OSError, EOFError) as error:
                made.seen[repr(error)] += 1
            else:
                is_right = answer.status == 200 and answer.ended and answer.text == EXPECTED
                wrong = f"{answer.status} {answer.body[-300:]!r}"
                made.seen["right" if is_right else wrong] += 1
            client.close()

    tasks = [asyncio.create_task(ask(number)) for number in range(clients)]
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(*tasks)
