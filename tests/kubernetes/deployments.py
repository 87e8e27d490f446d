"""A small controller of Deployments: it makes and deletes pods as Kubernetes' own does with
`maxUnavailable: 1, maxSurge: 0`, which is how engines are replaced where no GPU is spare.

A pod that is being deleted counts no more: its successor starts while it still drains.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tests.kubernetes.kubelet import Pod, Pods

LOOK = 0.05
"""Seconds between two looks at the pods."""
VERSION = "pdproxy.test/version"
"""The label that says from which version of its template a pod was made."""


class PodsOfController(Pods, Protocol):
    """The API server's collection of pods, as a controller uses it."""

    async def create(self, pod: Pod) -> None:
        """Make a pod."""

    async def delete(self, name: str) -> None:
        """Have a pod deleted: its kubelet ends it."""


class Deployment:
    """Some pods of one template. `template`: metadata and spec; `nodes`: the machines for its pods,
    in turns. Change these and `replicas` at any time. `min_ready`: `minReadySeconds`, for which a
    pod must be ready before the next old one is deleted.
    """

    def __init__(
        self,
        pods: PodsOfController,
        name: str,
        replicas: int,
        template: Mapping[str, Any],
        nodes: Sequence[str],
        min_ready: float,
    ) -> None:
        self._pods = pods
        self.name, self.replicas, self.template = name, replicas, template
        self.nodes = nodes
        self._numbers = itertools.count(1)
        self._versions = [template]
        self._min_ready = min_ready
        self._ready_since: dict[str, float] = {}
        """By uids, since when pods are ready."""

    async def run(self) -> None:
        """Have the pods be as they should, until cancelled."""
        while True:
            await self._reconcile()
            await asyncio.sleep(LOOK)

    async def settled(self) -> bool:
        """Return whether all pods are of the present template and ready, and none is ending."""
        pods = await self._own()
        return len(pods) == self.replicas and all(
            self._is_new(pod) and is_ready(pod) and not _ends(pod) for pod in pods
        )

    async def _own(self) -> list[Pod]:
        pods = await self._pods.list()
        return [pod for pod in pods if pod["metadata"]["labels"]["app"] == self.name]

    def _version(self) -> str:
        if self.template not in self._versions:
            self._versions.append(self.template)
        return str(self._versions.index(self.template))

    def _is_new(self, pod: Pod) -> bool:
        return bool(pod["metadata"]["labels"][VERSION] == self._version())

    async def _reconcile(self) -> None:
        live = [pod for pod in await self._own() if not _ends(pod)]
        old = [pod for pod in live if not self._is_new(pod)]
        now = asyncio.get_running_loop().time()
        ready = [pod["metadata"]["uid"] for pod in live if is_ready(pod)]
        self._ready_since = {uid: self._ready_since.get(uid, now) for uid in ready}
        available = [uid for uid, at in self._ready_since.items() if now - at >= self._min_ready]
        for _ in range(len(live), self.replicas):
            await self._create()
        surplus = sorted(live, key=lambda pod: (self._is_new(pod), is_ready(pod)))
        for pod in surplus[: max(0, len(live) - self.replicas)]:
            await self._pods.delete(pod["metadata"]["name"])
        if old and len(live) == self.replicas == len(available):
            await self._pods.delete(old[0]["metadata"]["name"])

    async def _create(self) -> None:
        metadata, spec = self.template["metadata"], self.template["spec"]
        labels = {**metadata["labels"], "app": self.name, VERSION: self._version()}
        number = next(self._numbers)
        name = f"{self.name}-{number}"
        await self._pods.create(
            {
                "metadata": {"name": name, "labels": labels},
                "spec": {**spec, "nodeName": self.nodes[number % len(self.nodes)]},
            }
        )


def is_ready(pod: Pod) -> bool:
    """Whether a pod's kubelet says that it is ready."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _ends(pod: Pod) -> bool:
    return "deletionTimestamp" in pod["metadata"]
