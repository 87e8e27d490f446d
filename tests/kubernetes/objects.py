"""Objects of an API server, for kubelets and controllers: of the fake one, and of a real one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

from tests.fakes.kubernetes_api import KubernetesApi
from tests.fakes.kubernetes_writes import merged
from tests.kubernetes.cluster import GROUP, Cluster
from tests.kubernetes.kinds import Kind, known, stored

Object = Mapping[str, Any]
"""An object of the API, as JSON has it."""
NAMESPACE = "default"
HELD = f"{GROUP}/kubelet"
"""The finalizer that keeps the object of a pod in a real API server until its kubelet has ended the
pod: real pods need none.
"""
ENDING = "2026-01-01T00:00:00Z"


class Objects(Protocol):
    """The API server's collection of one kind."""

    async def list(self) -> list[Object]:
        """Return all of them."""

    async def create(self, one: Object) -> None:
        """Make one."""

    async def change(self, name: str, body: Object) -> None:
        """Change one by a JSON merge patch."""

    async def set_status(self, one: Object, status: Mapping[str, Any]) -> None:
        """Write the status of one. An object that is gone is left alone."""

    async def delete(self, name: str) -> None:
        """Delete one. Of a pod: its kubelet ends it. An object that is gone is left alone."""

    async def remove(self, one: Object) -> None:
        """Delete the object of a pod that has ended."""


class Api(Protocol):
    """An API server."""

    def of(self, kind: Kind) -> Objects:
        """Return its collection of a kind."""


class FakeApi:
    """The fake API server."""

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api

    def of(self, kind: Kind) -> Objects:
        """See `Api`."""
        return _Fake(self._api, kind)


class _Fake:
    def __init__(self, api: KubernetesApi, kind: Kind) -> None:
        self._api, self._kind = api, kind

    async def list(self) -> list[Object]:
        plural = self._kind.plural
        return [one for (kind, *_), one in self._api.objects.items() if kind == plural]

    async def create(self, one: Object) -> None:
        self._put(one)

    async def change(self, name: str, body: Object) -> None:
        self._put(merged(self._found(name), body))

    async def set_status(self, one: Object, status: Mapping[str, Any]) -> None:
        if (found := self._found(one["metadata"]["name"])) is not None:
            self._put({**found, "status": status})

    async def delete(self, name: str) -> None:
        if (found := self._found(name)) is None:
            return
        if self._kind.kind == "Pod":
            self._put({**found, "metadata": {**found["metadata"], "deletionTimestamp": ENDING}})
        else:
            self._api.delete(name, NAMESPACE, self._kind.plural)

    async def remove(self, one: Object) -> None:
        self._api.delete(one["metadata"]["name"], NAMESPACE, self._kind.plural)

    def _found(self, name: str) -> dict[str, Any] | None:
        return self._api.objects.get((self._kind.plural, NAMESPACE, name))

    def _put(self, one: Object) -> None:
        made = copy.deepcopy(dict(one))
        self._api.put(made["metadata"]["name"], NAMESPACE, self._kind.plural, **made)


class RealApi:
    """A real API server, which knows Kubernetes' kinds by other names (`kinds.py`)."""

    def __init__(self, api: Cluster) -> None:
        self._api = api

    def of(self, kind: Kind) -> Objects:
        """See `Api`."""
        return _Real(self._api, kind)


class _Real:
    def __init__(self, api: Cluster, kind: Kind) -> None:
        self._api, self._kind = api, kind
        self._path = f"{kind.there}/namespaces/{NAMESPACE}/{kind.plural}"

    async def list(self) -> list[Object]:
        listed = await self._api.ask("GET", f"{self._kind.there}/{self._kind.plural}")
        found: list[Object] = known(listed["items"])
        return found

    async def create(self, one: Object) -> None:
        metadata = dict(one["metadata"])
        if self._kind.kind == "Pod":
            metadata["finalizers"] = [HELD]
        kind = {"apiVersion": self._kind.version, "kind": self._kind.kind}
        await self._api.ask("POST", self._path, stored({**kind, **one, "metadata": metadata}))

    async def change(self, name: str, body: Object) -> None:
        await self._api.ask("PATCH", f"{self._path}/{name}", body)

    async def set_status(self, one: Object, status: Mapping[str, Any]) -> None:
        more = "/status" if self._kind.has_status else ""
        await self._change(one, {"status": status}, more)

    async def delete(self, name: str) -> None:
        await self._api.ask("DELETE", f"{self._path}/{name}", expected={200, 404})

    async def remove(self, one: Object) -> None:
        await self._change(one, {"metadata": {"finalizers": None}})
        await self.delete(one["metadata"]["name"])

    async def _change(self, one: Object, body: Any, more: str = "") -> None:
        path = f"{self._path}/{one['metadata']['name']}{more}"
        await self._api.ask("PATCH", path, body, expected={200, 404})
