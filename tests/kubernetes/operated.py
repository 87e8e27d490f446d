"""The operator before an API server, with machines on which its pods run, and clients that stream
from its proxies.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pdproxy_operator import definitions
from pdproxy_operator.names import PROXY, REVISION, RUNTIME
from tests.fakes.forked import Forked, command
from tests.fakes.kubernetes_api import kubernetes_api
from tests.fakes.ports import free_port
from tests.kubernetes.build import Built
from tests.kubernetes.cluster import DEFINITIONS, Cluster
from tests.kubernetes.fleet import ENVIRONMENT
from tests.kubernetes.kinds import KINDS, OWN, Kind, front_of
from tests.kubernetes.kinds import PROXY as PROXIES
from tests.kubernetes.kinds import RUNTIME as RUNTIMES
from tests.kubernetes.machines import PORT, Machines, machines
from tests.kubernetes.objects import Api, FakeApi, Object, RealApi
from tests.operator.filled import filled, schema_of
from tests.unit.test_informer import kubeconfig

EXAMPLE = Path(__file__).parents[2] / "configs" / "kubernetes" / "operator-2p2d.yaml"
SETTINGS: Any = {
    "limits": {"attempts": 1, "continuations": 0},
    "deadlines": {"probe": 30},
    "health": {"stalled_after": 0},
    "outliers": {"interval": 0},
}
"""The proxies' settings where no second attempt is to hide what was lost, and where engines of a
busy machine are as good as others.
"""
KIND = {kind.kind: kind for kind in OWN}
_LEGS = re.compile(r"prefill=http://([0-9.]+):\d+ decode=http://([0-9.]+):\d+")


class Said(NamedTuple):
    """A condition: `status` is "" if there is none."""

    status: str
    reason: str
    message: str


@dataclass
class Operated:
    """What a test sees of it. `proxies` and `port`: where its clients ask."""

    api: Api
    there: Machines
    folder: Path
    kubeconfig: str
    fills: bool
    """Whether defaults must be filled in here: the fake API server knows no definition."""
    seen: Counter[str] = field(default_factory=Counter)
    """Requests of clients, by how they have ended."""
    proxies: Sequence[str] = ()
    port: int = PORT
    operator: Forked | None = None

    async def create(self, *objects: Object) -> None:
        """Make PDRuntimes and PDProxies."""
        for one in objects:
            kind = KIND[one["kind"]]
            made = filled(dict(one), schema_of(kind.plural)) if self.fills else one
            await self.api.of(kind).create(made)

    async def change(self, kind: Kind, name: str, **spec: Any) -> None:
        """Change fields of a spec."""
        await self.api.of(kind).change(name, {"spec": spec})

    async def one(self, kind: Kind, name: str) -> Object:
        """Return an object."""
        return next(
            one for one in await self.api.of(kind).list() if one["metadata"]["name"] == name
        )

    async def said(self, kind: Kind, name: str, condition: str) -> Said:
        """Return a condition of an object."""
        found = (await self.one(kind, name)).get("status", {}).get("conditions", ())
        for one in found:
            if one["type"] == condition:
                return Said(one["status"], one["reason"], one["message"])
        return Said("", "", "")

    async def until_said(self, kind: Kind, name: str, condition: str, status: str) -> Said:
        """Wait until a condition has a status."""

        async def holds() -> bool:
            return (await self.said(kind, name, condition)).status == status

        await self.until(holds, f"{kind.kind} {name}: {condition} {status}")
        return await self.said(kind, name, condition)

    async def until(self, holds: Any, what: str = "") -> None:
        """Wait until it holds. Fails with what the objects say, and if a part has ended."""

        async def looked() -> bool:
            assert self.operator is None or self.operator.returncode is None, "the operator ended"
            return bool(await holds())

        try:
            await self.there.until(looked)
        except TimeoutError:
            raise AssertionError(f"{what}: {await self.told()}") from None

    async def told(self) -> str:
        """Return all conditions, and the pods."""
        lines = [""]
        for kind in OWN:
            for one in await self.api.of(kind).list():
                for said in one.get("status", {}).get("conditions", ()):
                    words = (said["type"], said["status"], said["reason"], said["message"])
                    lines.append(f"{kind.kind} {one['metadata']['name']}: {' '.join(words)}")
        for pod in await self.there.pods():
            lines.append(f"{pod['metadata']['name']}: {pod.get('status', {}).get('conditions')}")
        return "\n".join(lines)

    async def engines(self, runtime: str) -> dict[str, str]:
        """Return the revisions of a runtime's pods, by their names."""
        pods = await self.there.pods(**{RUNTIME: runtime})
        return {pod["metadata"]["name"]: pod["metadata"]["labels"][REVISION] for pod in pods}

    async def find_proxies(self, name: str) -> None:
        """Have clients ask the proxies that are ready."""
        self.proxies = await self.there.hosts(**{PROXY: name})

    def pairs(self) -> Iterator[tuple[str, str]]:
        """The revisions of both engines of each request that was split, as the proxies' logs have
        them.
        """
        ran = {host: pod for one in self.there.kubelets for host, pod in one.ran.items()}
        for log in self.folder.glob("*.log"):
            for match in _LEGS.finditer(log.read_text()):
                first, second = (
                    ran[host]["metadata"]["labels"][REVISION] for host in match.groups()
                )
                yield first, second

    def start(self) -> None:
        """Start the operator."""
        listen = f"127.0.0.1:{free_port()}"
        with (self.folder / "operator.txt").open("ab") as log:
            self.operator = command(
                *("operator", "--kubeconfig", self.kubeconfig, "--listen", listen),
                env=ENVIRONMENT,
                stderr=log,
            )

    async def stop(self) -> None:
        """Kill the operator."""
        if (process := self.operator) is not None:
            self.operator = None
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@asynccontextmanager
async def operated(folder: Path, built: Built | None = None) -> AsyncIterator[Operated]:
    """An operator that runs. `built`: the programs of a real API server, None for the fake one."""
    async with AsyncExitStack() as stack:
        api: Api
        if built is None:
            server = await stack.enter_async_context(kubernetes_api())
            config, api = kubeconfig(folder, server), FakeApi(server)
            for kind in (*KINDS, *OWN):
                server.kinds.setdefault(kind.path, set()).add(kind.plural)
        else:
            cluster = Cluster(built, folder)
            await stack.enter_async_context(cluster.running())
            front = await stack.enter_async_context(front_of(cluster))
            for text in map(definitions.text_of, definitions.NAMES):
                await cluster.ask("POST", DEFINITIONS, yaml.safe_load(text))
            for kind in (*KINDS, *OWN):
                await served(cluster, kind)
            config, api = kubeconfig(folder, front), RealApi(cluster)  # type: ignore[arg-type]
        there = await stack.enter_async_context(machines(api, config, folder))
        made = Operated(api, there, folder, config, fills=built is None)
        made.start()
        stack.push_async_callback(made.stop)
        yield made


async def served(cluster: Cluster, kind: Kind) -> None:
    """Wait until the API server knows a kind: a definition takes a moment."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError):
                await cluster.ask("GET", f"{kind.there}/{kind.plural}", expected={200})
                return
            await asyncio.sleep(0.1)


def example_objects() -> list[Any]:
    """Return the objects of the example."""
    return list(yaml.safe_load_all(EXAMPLE.read_text()))


def example(**of_runtimes: Any) -> list[Any]:
    """Return the objects of the example for simulated engines: two prefill and two decode engines,
    and two proxies. `of_runtimes`: more of the specs.
    """
    found = example_objects()
    for one in found:
        spec = one["spec"]
        if one["kind"] == RUNTIMES.kind:
            spec |= {"simulated": True, "image": "pdproxy:0.1.0", "model": {"name": "tiny"}}
            spec |= of_runtimes
        elif one["kind"] == PROXIES.kind:
            spec["config"] = SETTINGS
    return found
