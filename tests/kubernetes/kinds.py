"""Kubernetes' own kinds before an API server that knows none: each is a definition of the tests'
own, and a front gives them the names that clients know.
"""

# Fields are not checked here: tests/chart does that with Kubernetes' own schemas. What is real is
# what an API server does with any object: names, versions, server-side apply, deletion.

from __future__ import annotations

import contextlib
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from tests.fakes.ports import free_port
from tests.kubernetes.cluster import DEFINITIONS, Cluster
from tests.kubernetes.openapi import openapi

_OF = "pdproxy.test"
_OWN = ("apiextensions.k8s.io/v1", "pdproxy.dev/v1alpha1")
"""Versions that the server has by these names."""
_PROTOBUF = "application/vnd.kubernetes.protobuf"


class Kind(NamedTuple):
    """A kind as clients know it. `version`: `v1`, or with its group. `has_status`: whether its
    status is written for itself, at `/status`; `is_scaled`: whether it has `/scale`. `is_own`:
    whether the server knows it by this name, by a definition of pdproxy's; `has_namespaces`:
    whether its objects are in one.
    """

    version: str
    kind: str
    plural: str
    has_status: bool = False
    is_scaled: bool = False
    is_own: bool = False
    has_namespaces: bool = True

    @property
    def group(self) -> str:
        """The group that it has on the server."""
        named = self.version.rpartition("/")[0]
        return named if self.is_own else f"{named.replace('.', '-') or 'core'}.{_OF}"

    @property
    def path(self) -> str:
        """Where clients ask for its version."""
        return f"/apis/{self.version}" if "/" in self.version else f"/api/{self.version}"

    @property
    def there(self) -> str:
        """Where that is on the server."""
        return f"/apis/{self.group}/{self.version.rpartition('/')[2]}"


CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
POD = Kind("v1", "Pod", "pods")
SECRET = Kind("v1", "Secret", "secrets")
SERVICE = Kind("v1", "Service", "services")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments", has_status=True, is_scaled=True)
RUNTIME = Kind("pdproxy.dev/v1alpha1", "PDRuntime", "pdruntimes", has_status=True, is_own=True)
PROXY = Kind("pdproxy.dev/v1alpha1", "PDProxy", "pdproxies", has_status=True, is_own=True)
KINDS = (
    CONFIG_MAP,
    Kind("v1", "Event", "events"),
    POD,
    SECRET,
    SERVICE,
    Kind("v1", "ServiceAccount", "serviceaccounts"),
    DEPLOYMENT,
    Kind("coordination.k8s.io/v1", "Lease", "leases"),
    Kind("events.k8s.io/v1", "Event", "events"),
    Kind("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes"),
    Kind(
        *("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets"),
        has_status=True,
        is_scaled=True,
    ),
    Kind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors"),
    Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    Kind("rbac.authorization.k8s.io/v1", "ClusterRole", "clusterroles", has_namespaces=False),
    Kind(
        "rbac.authorization.k8s.io/v1",
        "ClusterRoleBinding",
        "clusterrolebindings",
        has_namespaces=False,
    ),
    Kind("rbac.authorization.k8s.io/v1", "Role", "roles"),
    Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
)
"""Those of Kubernetes and of others: the tests define them."""
OWN = (RUNTIME, PROXY)
_THERE = {one.version: one.there.removeprefix("/apis/") for one in KINDS}
_HERE = {there: here for here, there in _THERE.items()}


def _definition(kind: Kind) -> dict[str, Any]:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version: dict[str, Any] = {
        "name": kind.version.rpartition("/")[2],
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
    }
    names = {"kind": kind.kind, "plural": kind.plural, "singular": kind.kind.lower()}
    paths = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}
    subresources: dict[str, Any] = {"status": {}} if kind.has_status else {}
    version["subresources"] = {**subresources, **({"scale": paths} if kind.is_scaled else {})}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{kind.group}"},
        "spec": {
            "group": kind.group,
            "scope": "Namespaced" if kind.has_namespaces else "Cluster",
            "names": names,
            "versions": [version],
        },
    }


def _renamed(thing: Any, names: dict[str, str]) -> Any:
    """Return a body with each `apiVersion` by its other name."""
    if isinstance(thing, list):
        return [_renamed(one, names) for one in thing]
    if not isinstance(thing, dict):
        return thing
    return {
        key: names.get(value, value)
        if key == "apiVersion" and isinstance(value, str)
        else _renamed(value, names)
        for key, value in thing.items()
    }


def stored(thing: Any) -> Any:
    """Return a body of a client as the server takes it."""
    return _renamed(thing, _THERE)


def known(thing: Any) -> Any:
    """Return what the server says as clients know it."""
    return _renamed(thing, _HERE)


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """Return the fields of a message of protobuf that have a length."""
    found: dict[int, list[bytes]] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        tag = number()
        size = number()
        if tag & 7 == 2:
            found.setdefault(tag >> 3, []).append(message[at : at + size])
            at += size
    return found


def _map(entries: list[bytes]) -> dict[str, bytes]:
    pairs = [_fields(entry) for entry in entries]
    return {pair[1][0].decode(): pair.get(2, [b""])[0] for pair in pairs}


def _json_of(body: bytes, method: str) -> bytes:
    """Return what Helm sends in protobuf: Secrets that hold releases, and options of deletions."""
    if method == "DELETE":
        return b""
    secret = _fields(_fields(body.removeprefix(b"k8s\0"))[2][0])
    meta = _fields(secret[1][0])
    metadata: dict[str, Any] = {"name": meta[1][0].decode()}
    metadata["labels"] = {key: value.decode() for key, value in _map(meta.get(11, [])).items()}
    if version := meta.get(6, [b""])[0]:
        metadata["resourceVersion"] = version.decode()
    data = {key: b64encode(value).decode() for key, value in _map(secret.get(2, [])).items()}
    kind = {"apiVersion": "v1", "kind": "Secret", "type": secret[3][0].decode()}
    return json.dumps({**kind, "metadata": metadata, "data": data}).encode()


class Front:
    """Where clients ask. `url`: of the front."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._cluster = cluster
        self._session = session

    async def ask(self, request: web.Request) -> web.StreamResponse:
        """Answer a client."""
        if (found := self._discovered(request.path)) is not None:
            return web.json_response(found)
        if any(f"/apis/{version}" in request.path for version in _OWN):  # also openapi/v3/apis
            return await self._passed_on(request)
        paths = {one.path: one.there for one in KINDS}
        path = next((p for p in paths if request.path.startswith(f"{p}/")), None)
        if path is None:
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}
            return web.json_response({**status, "reason": "NotFound"}, status=404)
        body = await request.read()
        kind = request.headers.get("content-type", "application/json")
        if kind == _PROTOBUF:
            kind, body = "application/json", _json_of(body, request.method)
        there = self._cluster.server + request.path_qs.replace(path, paths[path], 1)
        if body:
            thing = stored(json.loads(body))
            if request.method == "PUT" and "resourceVersion" not in thing["metadata"]:
                # of its own kinds a server takes that, of definitions not
                async with self._session.get(there) as answer:
                    now = await answer.json()
                thing["metadata"]["resourceVersion"] = now["metadata"]["resourceVersion"]
            body = json.dumps(thing).encode()
        async with self._session.request(
            request.method,
            there,
            data=body or None,
            headers={"content-type": kind, "accept": "application/json"},
        ) as answer:
            if "watch" in request.query and answer.status == 200:
                return await _followed(answer, request)
            text = await answer.read()
            return web.json_response(known(json.loads(text)), status=answer.status)

    async def _passed_on(self, request: web.Request) -> web.StreamResponse:
        kept = ("accept", "content-type")
        async with self._session.request(
            request.method,
            self._cluster.server + request.path_qs,
            data=await request.read() or None,
            headers={key: request.headers[key] for key in kept if key in request.headers},
        ) as answer:
            passed = web.StreamResponse(status=answer.status)
            passed.content_type = answer.content_type
            with contextlib.suppress(ConnectionError):  # the client has left
                await passed.prepare(request)
                async for part in answer.content.iter_any():
                    await passed.write(part)
            return passed

    def _discovered(self, path: str) -> Any:
        versions = {one.path: one.version for one in KINDS}
        if path == "/version":
            return {"major": "1", "minor": "36", "gitVersion": "v1.36.4", "platform": "linux/amd64"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups = []
            grouped = {one.version for one in KINDS if "/" in one.version}
            for version in sorted(grouped.union(_OWN)):
                one = {"groupVersion": version, "version": version.rpartition("/")[2]}
                name = version.rpartition("/")[0]
                groups.append({"name": name, "versions": [one], "preferredVersion": one})
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        if path in versions:
            verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
            of = [one for one in KINDS if one.path == path]
            found = [
                {
                    "name": one.plural,
                    "kind": one.kind,
                    "namespaced": one.has_namespaces,
                    "verbs": verbs,
                }
                for one in of
            ]
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": versions[path],
                "resources": found,
            }
        return openapi(path)

    async def objects(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Return all objects that are there, by kind and name."""
        found = {}
        for kind in KINDS:
            listed = await self._cluster.ask("GET", f"{kind.there}/{kind.plural}")
            for one in listed["items"]:
                found[kind.kind, one["metadata"]["name"]] = known(one)
        return found


async def _followed(answer: aiohttp.ClientResponse, request: web.Request) -> web.StreamResponse:
    """Pass on a watch, line by line."""
    passed = web.StreamResponse(headers={"content-type": "application/json"})
    await passed.prepare(request)
    with contextlib.suppress(ConnectionError, aiohttp.ClientError):
        async for line in answer.content:
            await passed.write(json.dumps(known(json.loads(line))).encode() + b"\n")
    return passed


@asynccontextmanager
async def front_of(cluster: Cluster) -> AsyncIterator[Front]:
    """Have a front of a cluster that runs."""
    for kind in KINDS:
        with contextlib.suppress(aiohttp.ClientError):  # it is there already
            await cluster.ask("POST", DEFINITIONS, _definition(kind))
    connector = aiohttp.TCPConnector(ssl=cluster.tls, limit=0)
    limits = aiohttp.ClientTimeout(total=None, sock_connect=5)
    async with aiohttp.ClientSession(
        connector=connector, timeout=limits, read_bufsize=2**22
    ) as session:
        front = Front(cluster, session)
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", front.ask)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(front.url.rpartition(":")[2])).start()
        try:
            yield front
        finally:
            await runner.cleanup()
