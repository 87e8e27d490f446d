"""What the operator writes to the API, and how.

Owns the forms of writes: server-side apply as one manager, patches of status and scale, deletions
of exactly the object that was seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from pdproxy.upstream.kubernetes import UNREADABLE, ApiConnection, ApiError, KubernetesApi
from pdproxy_operator.kinds import EVENTS, PODS, Kind, kind_of
from pdproxy_operator.names import MANAGER
from pdproxy_operator.own import OwnedMetadata
from pdproxy_operator.resources import Name, Object

APPLY = "application/apply-patch+yaml"  # JSON is YAML
MERGE = "application/merge-patch+json"
CONNECTIONS = 4
"""Writes at once."""


class _Answer(msgspec.Struct):
    metadata: OwnedMetadata = OwnedMetadata()


class Api:
    """Writes. `counted` gets the kind and the verb of each. While `may_write` returns False none is
    sent: this operator is not, or is no longer, the one that acts.
    """

    def __init__(
        self,
        api: KubernetesApi,
        counted: Callable[[str, str], None],
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._api = api
        self._counted = counted
        self._may_write = may_write
        self._places = asyncio.Semaphore(CONNECTIONS)
        self._idle: list[ApiConnection] = []

    def __repr__(self) -> str:
        return f"<Api {self._api}>"

    async def close(self) -> None:
        """Close all connections."""
        idle, self._idle = self._idle, []
        for one in idle:
            await one.drop()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[ApiConnection]:
        """Yield a connection of one's own. After a failure it is made anew: what it needs to ask
        may have been replaced.
        """
        async with self._places:
            one = self._idle.pop() if self._idle else self._api.connection()
            try:
                yield one
            except ApiError as error:
                if error.status is None or error.status == 401:
                    await one.drop()
                raise
            except asyncio.CancelledError:
                await one.drop()
                raise
            finally:
                self._idle.append(one)

    async def _send(
        self, verb: str, method: str, kind: Kind, path: str, body: Object, content: str = MERGE
    ) -> str:
        """Write, and return the version of the object."""
        if not self._may_write():
            raise ApiError("this operator does not act any more")
        parameters = {} if method == "DELETE" else {"fieldManager": MANAGER}
        if content == APPLY:
            parameters["force"] = "true"
        async with self._connection() as connection:
            encoded = msgspec.json.encode(body)
            answer = await connection.send(method, path, parameters, encoded, content)
        self._counted(kind.kind, verb)
        return _metadata(path, answer).resource_version

    async def find(self, kind: Kind, name: Name) -> OwnedMetadata | None:
        """Return an object of this name, whoever has made it, None: there is none."""
        path = kind.path(*name)
        async with self._connection() as connection:
            try:
                found = await connection.get(path, {})
            except ApiError as error:
                if error.status == 404:
                    return None
                raise
        return _metadata(path, found)

    async def apply(self, wanted: Object) -> str:
        """Have an object be as it is wanted, whoever has changed the fields that it names. Others'
        fields stay. Return its version.
        """
        kind = kind_of(wanted)
        metadata = wanted["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"])
        return await self._send("apply", "PATCH", kind, path, wanted, APPLY)

    async def apply_status(self, kind: Kind, metadata: OwnedMetadata | Any, status: Object) -> str:
        """Have the status of exactly this object be so. Return its version."""
        path = kind.path(metadata.namespace, metadata.name, "status")
        named = {"name": metadata.name, "namespace": metadata.namespace, "uid": metadata.uid}
        body = {
            "apiVersion": kind.version,
            "kind": kind.kind,
            "metadata": named,
            "status": status,
        }
        return await self._send("patch", "PATCH", kind, path, body, APPLY)

    async def scale(self, kind: Kind, namespace: str, name: str, replicas: int) -> str:
        """Have an object have so many replicas, without any other field of it. Return the
        version.
        """
        path = kind.path(namespace, name, "scale")
        return await self._send("patch", "PATCH", kind, path, {"spec": {"replicas": replicas}})

    async def delete(self, kind: Kind, metadata: OwnedMetadata) -> None:
        """Delete exactly this object, and with it what it controls. One that is gone is no
        failure, nor is another one of its name.
        """
        path = kind.path(metadata.namespace, metadata.name)
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {"uid": metadata.uid},
            "propagationPolicy": "Background",
        }
        try:
            await self._send("delete", "DELETE", kind, path, body, "application/json")
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def annotate(self, pod: OwnedMetadata, annotations: dict[str, str]) -> None:
        """Have a pod have these annotations."""
        path = PODS.path(pod.namespace, pod.name)
        metadata = {"uid": pod.uid, "annotations": annotations}
        try:
            await self._send("patch", "PATCH", PODS, path, {"metadata": metadata})
        except ApiError as error:
            if error.status not in (404, 409):  # it is gone, or another one has its name
                raise

    async def create_event(self, event: Object) -> None:
        """Write an Event. One that is there already is no failure."""
        path = EVENTS.path(event["metadata"]["namespace"])
        try:
            await self._send("create", "POST", EVENTS, path, event, "application/json")
        except ApiError as error:
            if error.status != 409:
                raise


def _metadata(path: str, answer: bytes) -> OwnedMetadata:
    try:
        return msgspec.json.decode(answer, type=_Answer).metadata
    except UNREADABLE as error:
        raise ApiError(f"{path}: an answer that can't be read: {error}") from None
