"""The collection of pods of an API server, for kubelets and controllers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from tests.fakes.kubernetes_api import KubernetesApi
from tests.kubernetes.kubelet import Pod

NAMESPACE = "default"


class FakePods:
    """That of the fake API server."""

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

    async def delete(self, name: str, grace: float) -> None:
        """See `PodsOfController`."""
        found = self._found(name)
        assert found is not None
        ending = {
            "deletionTimestamp": "2026-01-01T00:00:00Z",
            "deletionGracePeriodSeconds": grace,
        }
        self._put({**found, "metadata": {**found["metadata"], **ending}})

    def _found(self, name: str) -> dict[str, Any] | None:
        return self._api.objects.get(("pods", NAMESPACE, name))

    def _put(self, pod: Pod) -> None:
        made = copy.deepcopy(dict(pod))
        self._api.put(made["metadata"]["name"], NAMESPACE, **made)
