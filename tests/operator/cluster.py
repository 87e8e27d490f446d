"""What an operator works on in fast tests: the fake API server, with a controller whose pods are
ready at once, and garbage collection. And operators in the test's process, which end as killed ones
do.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from pdproxy.settings.kubernetes import Kubernetes
from pdproxy.upstream.kubernetes import KubernetesApi as Client
from pdproxy_operator.kinds import WRITTEN
from pdproxy_operator.names import APPLIED, DELETION_COST
from pdproxy_operator.resources import API_VERSION, Proxy, Runtime
from pdproxy_operator.run import Operator, Options
from tests.fakes.kubernetes_api import KubernetesApi, kubernetes_api
from tests.unit.test_informer import kubeconfig

NAMESPACE = "llm"
Object = dict[str, Any]
_SINCE = "2026-01-01T00:00:00Z"
_LOOK = 0.005
"""Seconds between two looks of the controller."""


class Cluster:
    """`stuck`: images whose pods never get ready; `collects`: whether what has lost its owner is
    deleted. `api`: the server.
    """

    def __init__(self, api: KubernetesApi, folder: Path) -> None:
        self.api = api
        self.stuck: set[str] = set()
        self.collects = True
        self._folder = folder
        self._numbers = 0
        for kind in WRITTEN:
            api.kinds.setdefault(kind.api, set()).add(kind.plural)

    def put(self, *some: Runtime | Proxy) -> None:
        """Have resources as their user wants them."""
        for one in some:
            kind = "PDRuntime" if isinstance(one, Runtime) else "PDProxy"
            plural = "pdruntimes" if isinstance(one, Runtime) else "pdproxies"
            fields = msgspec.to_builtins(one)
            known = self.api.objects.get((plural, NAMESPACE, one.metadata.name), {})
            meta = {"labels": fields["metadata"]["labels"]}
            status = {"status": known["status"]} if "status" in known else {}
            self.api.put(
                one.metadata.name,
                NAMESPACE,
                plural,
                apiVersion=API_VERSION,
                kind=kind,
                metadata=meta,
                spec={key: value for key, value in fields["spec"].items() if value is not None},
                **status,
            )

    def of(self, plural: str) -> dict[str, Object]:
        """Return all objects of a kind, by name."""
        return {key[2]: one for key, one in self.api.objects.items() if key[0] == plural}

    def shown(self) -> dict[tuple[str, str], Object]:
        """Return all that the operator has made and says, without what chance and time say."""
        found = {}
        for (plural, _, name), one in sorted(self.api.objects.items()):
            if plural in ("pods", "events", "leases"):
                continue
            shown = copy.deepcopy(one)
            for key in ("uid", "resourceVersion", "generation", "creationTimestamp"):
                shown["metadata"].pop(key)
            for owner in shown["metadata"].get("ownerReferences", ()):
                owner.pop("uid")
            shown["metadata"].get("annotations", {}).pop(APPLIED, None)  # a hash with the uid
            status = shown.get("status", {})
            status.pop("observedGeneration", None)
            for condition in status.get("conditions", ()):
                condition.pop("lastTransitionTime")
                condition.pop("observedGeneration", None)
            if "conditions" in status:  # nobody knows what proxies would say, and when
                known = [one for one in status["conditions"] if one["status"] != "Unknown"]
                status["conditions"] = known
            found[plural, name] = shown
        return found

    # what Kubernetes does

    async def control(self) -> None:
        """Have pods for all Deployments, and delete what has lost its owner, until cancelled."""
        while True:
            uids = {one["metadata"]["uid"] for one in self.api.objects.values()}
            for (plural, namespace, name), one in list(self.api.objects.items()):
                owners = one["metadata"].get("ownerReferences", ())
                is_left = owners and not any(owner["uid"] in uids for owner in owners)
                if is_left and self.collects:
                    self.api.delete(name, namespace, plural)
                elif plural in ("deployments", "leaderworkersets"):
                    self._control(plural, name, one)
            await asyncio.sleep(_LOOK)

    def _control(self, plural: str, name: str, one: Object) -> None:
        spec = one["spec"]
        template = spec.get("template") or spec["leaderWorkerTemplate"]["workerTemplate"]
        image = template["spec"]["containers"][0]["image"]
        pods = {
            pod: int(value["metadata"].get("annotations", {}).get(DELETION_COST, 0))
            for pod, value in self.of("pods").items()
            if value["metadata"]["labels"]["of"] == name
        }
        wanted = spec.get("replicas", 1)
        for pod in sorted(pods, key=pods.__getitem__)[: max(0, len(pods) - wanted)]:
            self.api.delete(pod, NAMESPACE)
        for _ in range(wanted - len(pods)):
            self._numbers += 1
            ready = "False" if image in self.stuck else "True"
            self.api.put(
                f"{name}-{self._numbers}",
                NAMESPACE,
                metadata={
                    "labels": {**template["metadata"]["labels"], "of": name},
                    "ownerReferences": [{"uid": one["metadata"]["uid"], "controller": True}],
                },
                spec={"nodeName": "node", "containers": []},
                status={
                    "phase": "Running",
                    "podIP": "127.0.0.1",
                    "conditions": [
                        {"type": kind, "status": status, "lastTransitionTime": _SINCE}
                        for kind, status in (("PodScheduled", "True"), ("Ready", ready))
                    ],
                },
            )
        status = {"replicas": wanted, "observedGeneration": one["metadata"]["generation"]}
        if one.get("status") != status:
            key = (plural, NAMESPACE, name)
            self.api._store(key, {**copy.deepcopy(one), "status": status})

    # operators

    def operator(
        self,
        *,
        leader_elect: bool = False,
        secret: str | None = None,
        namespaces: tuple[str, ...] = (),
    ) -> Operator:
        """Return an operator that does not run yet."""
        path = kubeconfig(self._folder, self.api)
        times = Kubernetes(kubeconfig=path, timeout=5)
        options = Options(
            namespaces, times.kubeconfig, None, leader_elect, "127.0.0.1", 0, None, "info", "text"
        )
        return Operator(options, Client(times), times, secret)

    @asynccontextmanager
    async def operating(self, **options: Any) -> AsyncIterator[Operator]:
        """Have an operator run. `options`: of `operator`."""
        made = self.operator(**options)
        task = asyncio.create_task(made.run())
        try:
            yield made
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def killed_at_random(self, chance: random.Random, most: int) -> None:
        """Have an operator run for a random number of turns of the loop, `most` at most."""
        async with self.operating():
            for _ in range(chance.randrange(most)):
                await asyncio.sleep(0)

    async def calm(self, seconds: float = 0.3) -> None:
        """Wait until nothing is written for a while."""

        async def looked() -> bool:
            before = self.api.version
            await asyncio.sleep(seconds)
            return self.api.version == before

        async with asyncio.timeout(60):
            while not await looked():
                pass


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    """Have a cluster whose controller runs."""
    async with kubernetes_api() as api:
        made = Cluster(api, folder)
        task = asyncio.create_task(made.control())
        try:
            yield made
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
