"""Kubernetes in small, on this machine: kubelets run the pods of an API server, controllers make
them from Deployments, and Services have names.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.client import Answer, Client, request
from tests.fakes.samples import read, total
from tests.kubernetes.deployments import Controllers, ended, is_ready
from tests.kubernetes.kinds import POD
from tests.kubernetes.kubelet import Kubelet, addresses
from tests.kubernetes.names import names
from tests.kubernetes.objects import Api, Object

PACE = 10.0
"""Seconds of the pods' probes and of `minReadySeconds` are so many times shorter."""
NODES = ("machine-1", "machine-2")
PATIENCE = 120.0
PORT = 8000


@dataclass
class Machines:
    """What a test sees of them."""

    api: Api
    kubelets: list[Kubelet]
    controllers: Controllers
    tasks: list[asyncio.Task[None]]

    async def pods(self, **labels: str) -> list[Object]:
        """Return the pods with these labels."""
        found = await self.api.of(POD).list()
        return [pod for pod in found if labels.items() <= pod["metadata"]["labels"].items()]

    async def hosts(self, **labels: str) -> list[str]:
        """Return the addresses of such pods that are ready."""
        return [pod["status"]["podIP"] for pod in await self.pods(**labels) if is_ready(pod)]

    async def until(self, holds: Callable[[], Awaitable[bool]], seconds: float = PATIENCE) -> None:
        """Wait until it holds. Fails if a part of this has failed."""
        async with asyncio.timeout(seconds):
            while not await holds():
                for task in self.tasks:
                    if task.done():
                        task.result()
                for kubelet in self.kubelets:
                    kubelet.look()
                await asyncio.sleep(0.1)


async def ask(host: str, path: str) -> Answer:
    """Return the answer of a pod."""
    client = Client(*await asyncio.open_connection(host, PORT))
    try:
        client.send(request("GET", path, b""))
        return await client.answer()
    finally:
        client.close()


async def metric(host: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples at a pod; -1.0 while it does not answer."""
    with contextlib.suppress(OSError, EOFError):
        page = (await ask(host, "/metrics")).body.decode()
        return total(read(page, name), name, labels)
    return -1.0


@asynccontextmanager
async def machines(
    api: Api, kubeconfig: str, folder: Path, pace: float = PACE
) -> AsyncIterator[Machines]:
    """Two machines. `kubeconfig`: by which pods reach the API server."""
    hosts = addresses()
    async with AsyncExitStack() as stack:
        env = await stack.enter_async_context(names(api, folder / "names"))
        env["KUBECONFIG"] = kubeconfig
        kubelets = [
            await stack.enter_async_context(Kubelet(api, node, hosts, folder, env, pace))
            for node in NODES
        ]
        controllers = Controllers(api, NODES, pace)
        tasks = [asyncio.create_task(controllers.run())]
        stack.push_async_callback(ended, tasks)
        yield Machines(api, kubelets, controllers, tasks)
