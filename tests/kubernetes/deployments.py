"""A small controller of Deployments: it makes and deletes pods as Kubernetes' own does, by
`maxUnavailable` and `maxSurge`. There are no ReplicaSets: pods belong to the Deployment.

A pod that is being deleted counts no more: its successor starts while it still drains.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from fractions import Fraction
from math import ceil
from typing import Any

from tests.kubernetes.kinds import DEPLOYMENT, KINDS, OWN, POD, Kind
from tests.kubernetes.objects import Api, Object, Objects

LOOK = 0.05
"""Seconds between two looks at the pods."""
VERSION = "pod-template-hash"
"""The label that says of which template a pod was made."""
COST = "controller.kubernetes.io/pod-deletion-cost"


class Deployment:
    """Some pods of one template. `template`: metadata and spec; `nodes`: the machines for its pods,
    in turns. Change these and `replicas` at any time. `min_ready`: `minReadySeconds`, for which a
    pod must be ready before the next old one is deleted. `surge`: pods more than `replicas` while
    they are replaced, `unavailable`: pods that may be missing then.
    """

    def __init__(
        self,
        pods: Objects,
        name: str,
        replicas: int,
        template: Mapping[str, Any],
        nodes: Sequence[str],
        min_ready: float,
        uid: str = "",
    ) -> None:
        self._pods = pods
        self.name, self.replicas, self.template = name, replicas, template
        self.nodes, self.min_ready = nodes, min_ready
        self.surge, self.unavailable = 0, 1
        self.uid = uid or name
        self._numbers = itertools.count(1)
        self._ready_since: dict[str, float] = {}
        """By uids, since when pods are ready."""

    async def run(self) -> None:
        """Have the pods be as they should, until cancelled."""
        while True:
            await self.reconcile(await self._pods.list())
            await asyncio.sleep(LOOK)

    async def settled(self) -> bool:
        """Return whether all pods are of the present template and ready, and none is ending."""
        pods = self._own(await self._pods.list())
        return len(pods) == self.replicas and all(
            self._is_new(pod) and is_ready(pod) and not ends(pod) for pod in pods
        )

    async def reconcile(self, pods: Sequence[Object]) -> None:
        """Make and delete pods once. `pods`: all that there are."""
        live = self._live(pods)
        new = [pod for pod in live if self._is_new(pod)]
        available = self._available(live)
        room = self.replicas + self.surge - len(live)
        for _ in range(min(self.replicas - len(new), room)):
            await self._create()
        gone = sorted(live, key=lambda pod: (self._is_new(pod), is_ready(pod), _cost(pod)))
        for pod in gone[: max(0, -room)]:
            await self._pods.delete(pod["metadata"]["name"])
        if room >= 0:
            for pod in self._old_to_delete(live, available):
                await self._pods.delete(pod["metadata"]["name"])

    def status(self, pods: Sequence[Object]) -> dict[str, int]:
        """Return the numbers of the status."""
        live = self._live(pods)
        available = len(self._available(live))
        return {
            "replicas": len(live),
            "updatedReplicas": sum(map(self._is_new, live)),
            "readyReplicas": sum(map(is_ready, live)),
            "availableReplicas": available,
            "unavailableReplicas": max(0, self.replicas - available),
        }

    def _old_to_delete(self, live: Sequence[Object], available: Sequence[str]) -> list[Object]:
        """Those of other templates that may go now: first those that are not available anyway."""
        least = self.replicas - self.unavailable
        old: dict[bool, list[Object]] = {False: [], True: []}
        for pod in live:
            if not self._is_new(pod):
                old[pod["metadata"]["uid"] in available].append(pod)
        not_there = len(live) - len(available) - len(old[False])  # of the new ones
        broken = old[False][: max(0, len(live) - least - not_there)]
        return [*broken, *old[True][: max(0, len(available) - least)]]

    def _own(self, pods: Sequence[Object]) -> list[Object]:
        return [pod for pod in pods if self.uid in owners(pod)]

    def _live(self, pods: Sequence[Object]) -> list[Object]:
        return [pod for pod in self._own(pods) if not ends(pod)]

    def _available(self, live: Sequence[Object]) -> list[str]:
        """The uids of pods that have been ready for long enough."""
        now = asyncio.get_running_loop().time()
        ready = [pod["metadata"]["uid"] for pod in live if is_ready(pod)]
        self._ready_since = {uid: self._ready_since.get(uid, now) for uid in ready}
        return [uid for uid, at in self._ready_since.items() if now - at >= self.min_ready]

    def _version(self) -> str:
        text = json.dumps(self.template, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def _is_new(self, pod: Object) -> bool:
        return bool(pod["metadata"]["labels"][VERSION] == self._version())

    async def _create(self) -> None:
        metadata, spec = self.template["metadata"], self.template["spec"]
        number = next(self._numbers)
        name = f"{self.name}-{self.uid[:8]}-{number}"
        owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": self.name, "uid": self.uid}
        await self._pods.create(
            {
                "metadata": {
                    "name": name,
                    "namespace": "default",
                    "labels": {**metadata["labels"], VERSION: self._version()},
                    "annotations": {**metadata.get("annotations", {})},
                    "ownerReferences": [{**owner, "controller": True}],
                },
                "spec": {**spec, "nodeName": self.nodes[number % len(self.nodes)]},
            }
        )


class Controllers:
    """The Deployments that are objects of an API server, and what belongs to objects that are gone.
    `pace`: how many times shorter `minReadySeconds` are.
    """

    def __init__(self, api: Api, nodes: Sequence[str], pace: float = 1.0) -> None:
        self._api = api
        self._nodes = nodes
        self._pace = pace
        self._deployments: dict[str, Deployment] = {}
        self.deleted: list[str] = []
        """What was deleted since its owner had gone: kinds and names."""

    async def run(self) -> None:
        """Do all of it, until cancelled."""
        for number in itertools.count():
            await self._reconcile()
            if number % 10 == 0:
                await self._collect()
            await asyncio.sleep(LOOK)

    async def _reconcile(self) -> None:
        found = await self._api.of(DEPLOYMENT).list()
        pods = await self._api.of(POD).list()
        for one in found:
            deployment = self._of(one)
            await deployment.reconcile(pods)
            status = _status(one, deployment.status(pods), deployment.replicas)
            if status != one.get("status"):
                await self._api.of(DEPLOYMENT).set_status(one, status)
        live = {one["metadata"]["uid"] for one in found}
        self._deployments = {uid: one for uid, one in self._deployments.items() if uid in live}

    def _of(self, one: Object) -> Deployment:
        """Return the controller of a Deployment as it is now."""
        metadata, spec = one["metadata"], one["spec"]
        uid, replicas = metadata["uid"], spec.get("replicas", 1)
        if uid not in self._deployments:
            pods = self._api.of(POD)
            made = Deployment(pods, metadata["name"], 0, {}, self._nodes, 0.0, uid)
            self._deployments[uid] = made
        found = self._deployments[uid]
        found.replicas, found.template = replicas, spec["template"]
        found.min_ready = spec.get("minReadySeconds", 0) / self._pace
        rolling = spec.get("strategy", {}).get("rollingUpdate", {})
        found.surge = ceil(_part(rolling.get("maxSurge", "25%"), replicas))
        found.unavailable = int(_part(rolling.get("maxUnavailable", "25%"), replicas))
        return found

    async def _collect(self) -> None:
        """Delete what belongs to objects that are gone."""
        listed = [(kind, one) for kind in _COLLECTED for one in await self._api.of(kind).list()]
        live = {one["metadata"]["uid"] for _, one in listed}
        for kind, one in listed:
            belongs = owners(one)
            if belongs and live.isdisjoint(belongs) and not ends(one):
                self.deleted.append(f"{kind.kind} {one['metadata']['name']}")
                await self._api.of(kind).delete(one["metadata"]["name"])


_COLLECTED: Sequence[Kind] = [*OWN, *(kind for kind in KINDS if kind.kind != "Event")]


def _part(value: str | int, whole: int) -> Fraction:
    """Return a number, or so many percent of the whole."""
    if isinstance(value, int):
        return Fraction(value)
    return Fraction(int(value.removesuffix("%")) * whole, 100)


def _status(one: Object, numbers: Mapping[str, int], replicas: int) -> dict[str, Any]:
    before = {each["type"]: each for each in one.get("status", {}).get("conditions", ())}
    is_available = numbers["availableReplicas"] >= replicas
    is_done = is_available and numbers["updatedReplicas"] == numbers["replicas"] == replicas
    conditions = []
    for kind, status, reason in (
        ("Available", is_available, "MinimumReplicasAvailable" if is_available else "TooFew"),
        ("Progressing", True, "NewReplicaSetAvailable" if is_done else "ReplicaSetUpdated"),
    ):
        made = {"type": kind, "status": str(status), "reason": reason}
        if (old := before.get(kind)) is None or old["status"] != made["status"]:
            made["lastTransitionTime"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        else:
            made["lastTransitionTime"] = old["lastTransitionTime"]
        conditions.append(made)
    generation = one["metadata"].get("generation", 1)
    return {**numbers, "observedGeneration": generation, "conditions": conditions}


def owners(one: Object) -> set[str]:
    """Return the uids of those to which an object belongs."""
    return {owner["uid"] for owner in one["metadata"].get("ownerReferences", ())}


def is_ready(pod: Object) -> bool:
    """Whether a pod's kubelet says that it is ready."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def ends(one: Object) -> bool:
    """Whether an object is being deleted."""
    return "deletionTimestamp" in one["metadata"]


def _cost(pod: Object) -> int:
    return int(pod["metadata"].get("annotations", {}).get(COST, "0"))


async def ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
