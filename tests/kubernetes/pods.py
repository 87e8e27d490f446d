"""The collection of pods of an API server, for kubelets and controllers: of the fake one, and of a
real one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from tests.fakes.kubernetes_api import KubernetesApi
from tests.kubernetes.cluster import CORE, GROUP, Cluster
from tests.kubernetes.kubelet import Pod

NAMESPACE = "default"
HELD = f"{GROUP}/kubelet"
"""The finalizer that keeps the object of a pod in a real API server until its kubelet has ended the
pod: real pods need none.
"""


class FakePods:
    """Those of the fake API server."""

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api

    async def list(self) -> list[Pod]:
        """See `Pods`."""
        return [one for (kind, *_), one in self._api.objects.items() if kind == "pods"]

    async def set_status(self, pod: Pod, status: Mapping[str, Any]) -> None:
        """See `Pods`."""
        if (found := self._found(pod["metadata"]["name"])) is not None:
            self._put({**found, "status": status})

    async def remove(self, pod: Pod) -> None:
        """See `Pods`."""
        self._api.delete(pod["metadata"]["name"], NAMESPACE)

    async def create(self, pod: Pod) -> None:
        """See `PodsOfController`."""
        self._put(pod)

    async def delete(self, name: str) -> None:
        """See `PodsOfController`."""
        found = self._found(name)
        assert found is not None
        ending = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
        self._put({**found, "metadata": {**found["metadata"], **ending}})

    def _found(self, name: str) -> dict[str, Any] | None:
        return self._api.objects.get(("pods", NAMESPACE, name))

    def _put(self, pod: Pod) -> None:
        made = copy.deepcopy(dict(pod))
        self._api.put(made["metadata"]["name"], NAMESPACE, **made)


class RealPods:
    """Those of a real API server."""

    def __init__(self, api: Cluster) -> None:
        self._api = api
        self._path = f"{CORE}/namespaces/{NAMESPACE}/pods"

    async def list(self) -> list[Pod]:
        """See `Pods`."""
        found: list[Pod] = (await self._api.ask("GET", self._path))["items"]
        return found

    async def set_status(self, pod: Pod, status: Mapping[str, Any]) -> None:
        """See `Pods`."""
        await self._change(pod, {"status": status})

    async def remove(self, pod: Pod) -> None:
        """See `Pods`."""
        await self._change(pod, {"metadata": {"finalizers": None}})
        path = f"{self._path}/{pod['metadata']['name']}"
        await self._api.ask("DELETE", path, expected={200, 404})

    async def create(self, pod: Pod) -> None:
        """See `PodsOfController`."""
        metadata = {**pod["metadata"], "finalizers": [HELD]}
        body = {"apiVersion": f"{GROUP}/v1", "kind": "Pod", **pod, "metadata": metadata}
        await self._api.ask("POST", self._path, body)

    async def delete(self, name: str) -> None:
        """See `PodsOfController`."""
        await self._api.ask("DELETE", f"{self._path}/{name}")

    async def _change(self, pod: Pod, body: Any) -> None:
        path = f"{self._path}/{pod['metadata']['name']}"
        await self._api.ask("PATCH", path, body, expected={200, 404})
