"""An API server of Kubernetes for tests: collections of objects with the rules of list and watch,
and of writes (`kubernetes_writes`).

There is one version for all objects, which each change raises. Events are kept for a while: a watch
of an older version is refused, as HTTP status or as an event, and so are pages of an older list.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

from aiohttp import web

from tests.fakes.kubernetes_writes import (
    OF_SERVER,
    WITH_STATUS,
    ConflictError,
    Owned,
    is_other_spec,
    merged,
)

PODS = "/api/v1"
POOLS = "/apis/inference.networking.k8s.io/v1"
_PATH = re.compile(
    r"(?P<group>/api/v1|/apis/[^/]+/v[0-9a-z]+)(/namespaces/(?P<namespace>[^/]+))?/(?P<kind>[a-z]+)"
    r"(/(?P<name>[^/]+)(/(?P<part>status|scale))?)?"
)
_GROUP = re.compile(r"(/api/v1|/apis/[^/]+/v[0-9a-z]+)")
_SET = re.compile(r"(\S+) (in|notin) \(([^()]*)\)")
Object = dict[str, Any]
Key = tuple[str, str, str]


class Change(NamedTuple):
    """One change. `before`: the object before it, None: there was none; `after`: None: it was
    deleted.
    """

    version: int
    key: Key
    before: Object | None
    after: Object | None


class KubernetesApi:
    """`window`: how many changes are kept. `tokens`: who may ask, None: everybody.

    `expired`: how a watch of a version that is gone is refused: status or event. `ahead`: how one
    of a version that is not there yet is: refused or silent. `forbidden`: namespaces that nobody
    may read. `fault`: away (connections are closed), silent (nothing is answered), garbage (no
    UTF-8), deep (lists in lists), unavailable (503), busy (429), long (an event without an end),
    at_once (watches end at once). `bookmarks`: seconds between them, None: none are sent. `most`:
    objects of a page at most.
    """

    def __init__(self) -> None:
        self.objects: dict[Key, Object] = {}
        self.version = 100
        self.window = 1000
        self.tokens: set[str] | None = None
        self.expired = "status"
        self.ahead = "refused"
        self.forbidden: set[str] = set()
        self.fault = ""
        self.bookmarks: float | None = None
        self.most = 500
        self.url = ""
        self.asked: list[tuple[str, Mapping[str, str]]] = []
        self.requests: list[tuple[str, str]] = []
        """Methods and paths of all requests."""
        self.written: list[tuple[str, str, Object]] = []
        """Methods, paths and bodies of writes that have changed something."""
        self.absent: set[str] = set()
        """Kinds that this cluster does not have, as in paths."""
        self.kinds: dict[str, set[str]] = {}
        """The kinds of each group's version that are named to who asks, by its path."""
        self.refuses: dict[str, str] = {}
        """What is said instead of taking objects of a kind, as in paths."""
        self.owned: dict[Key, Owned] = {}
        self.answered: Counter[str] = Counter()
        """Lists and watches that were answered."""
        self._changes: deque[Change] = deque()
        self._uid = 0
        self._changed = asyncio.Event()
        self._watching: set[asyncio.Transport] = set()
        self._still: set[asyncio.Transport] = set()
        """Connections on which nothing is sent any more."""
        self._snapshots: dict[int, list[tuple[Key, Object]]] = {}

    # what a test does

    def put(
        self, name: str, namespace: str = "default", plural: str = "pods", **fields: Any
    ) -> Object:
        """Make an object, or have one with other fields, as a test wants it. `plural`: its kind, as
        in paths.
        """
        key = (plural, namespace, name)
        metadata = {**fields.pop("metadata", {}), "name": name, "namespace": namespace}
        return self._store(key, {**fields, "metadata": metadata})

    def _store(self, key: Key, after: Object) -> Object:
        """Have another version of an object, or a new one."""
        before = self.objects.get(key)
        self.version += 1
        metadata = after["metadata"]
        if before is None:
            self._uid += 1
            metadata |= {"uid": f"uid-{self._uid}", "generation": 1}
            metadata.setdefault("creationTimestamp", _now())
        else:
            was = before["metadata"]
            metadata["uid"] = was["uid"]
            metadata["generation"] = was["generation"] + is_other_spec(before, after)
            metadata["creationTimestamp"] = was["creationTimestamp"]
        metadata["resourceVersion"] = str(self.version)
        self.objects[key] = after
        self._note(Change(self.version, key, before, after))
        return after

    def delete(self, name: str, namespace: str = "default", plural: str = "pods") -> None:
        """Delete an object."""
        self.version += 1
        key = (plural, namespace, name)
        self.owned.pop(key, None)
        self._note(Change(self.version, key, self.objects.pop(key), None))

    def forget(self) -> None:
        """Compact: no change so far is kept, and no list."""
        self._changes.clear()
        self._snapshots.clear()

    def go_back(self, version: int) -> None:
        """Be a server that was put back to an earlier state of its storage."""
        self.forget()
        self.version = version
        self.cut()

    def cut(self) -> None:
        """Cut all connections."""
        for transport in list(self._watching):
            transport.abort()

    def be_still(self) -> None:
        """Have the watches that are open now get nothing any more, as if a machine between had
        gone.
        """
        self._still |= self._watching

    @property
    def watches(self) -> int:
        """Open watches that get events."""
        return len(self._watching - self._still)

    def _note(self, change: Change) -> None:
        self._changes.append(change)
        while len(self._changes) > self.window:
            self._changes.popleft()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # what it answers

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        self.asked.append((request.path, dict(request.query)))
        self.requests.append((request.method, request.path))
        transport = request.transport
        assert transport is not None
        if self.fault == "away":
            transport.abort()
        if self.fault in ("away", "silent"):
            await asyncio.sleep(3600)
        if self.fault == "garbage":
            return web.Response(body=b'{"metadata": {"resourceVersion": "\xff"}, "items": []}')
        if self.fault == "deep":
            return web.Response(body=b'{"kind": ' + b"[" * 10_000 + b"]" * 10_000 + b"}")
        if self.fault == "unavailable":
            return web.Response(status=503, text="no leader")
        if self.fault == "busy":
            return web.Response(status=429, text="Too many requests", headers={"retry-after": "1"})
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.tokens is not None and bearer not in self.tokens:
            return _status(401, "Unauthorized")
        if _GROUP.fullmatch(request.path):
            return self._discovered(request.path)
        match = _PATH.fullmatch(request.path)
        if match is None or match["kind"] in self.absent:
            return _status(404, "the server could not find the requested resource")
        namespace, kind = match["namespace"], match["kind"]
        if (namespace or "*") in self.forbidden:
            return _status(403, f"{kind} is forbidden: no {request.query} in {namespace}")
        if match["name"] is not None or request.method != "GET":
            key = (kind, namespace or "", match["name"] or "")
            return await self._of_one(request, key, match["part"])
        selects = _selector(request.query.get("labelSelector", ""))

        def fits(key: Key, one: Object | None) -> bool:
            labels = ((one or {}).get("metadata") or {}).get("labels") or {}
            here = key[0] == kind and namespace in (None, key[1])
            named = request.query.get("fieldSelector", f"metadata.name={key[2]}")
            return (
                here and one is not None and named == f"metadata.name={key[2]}" and selects(labels)
            )

        if request.query.get("watch") == "1":
            return await self._watch(request, transport, fits)
        return self._list(request, fits)

    def _discovered(self, path: str) -> web.Response:
        """Say which kinds a version of a group has."""
        names = self.kinds.get(path, set()) - self.absent
        if not names:
            return _status(404, "the server could not find the requested resource")
        return web.json_response({"resources": [{"name": name} for name in sorted(names)]})

    async def _of_one(self, request: web.Request, key: Key, part: str | None) -> web.Response:
        """Answer a request for one object, or a write."""
        content = await request.read()
        body = json.loads(content) if content else {}
        if not key[2]:
            key = (*key[:2], body["metadata"]["name"])
            if key in self.objects:
                return _status(409, f"{key[0]} {key[2]!r} already exists")
            self.written.append(("POST", request.path, body))
            self.owned[key] = Owned()
            self.owned[key].update({}, body, _manager(request))
            body["metadata"]["namespace"] = key[1]
            return web.json_response(self._store(key, body), status=201)
        live = self.objects.get(key)
        is_apply = request.headers.get("content-type") == "application/apply-patch+yaml"
        if live is None and not (is_apply and part is None):
            return _status(404, f"{key[0]} {key[2]!r} not found")
        if request.method == "GET":
            assert live is not None
            return web.json_response(_scale(live) if part == "scale" else live)
        given = body.get("preconditions", body.get("metadata", {}))
        for name in ("uid", "resourceVersion"):
            if name in given and given[name] != (live or {"metadata": {}})["metadata"].get(name):
                return _status(409, f"the object has been modified: another {name}")
        if key[0] in self.refuses and part is None:
            return _status(422, self.refuses[key[0]])
        if request.method == "DELETE":
            self.written.append(("DELETE", request.path, body))
            self.delete(key[2], key[1], key[0])
            return web.json_response({"kind": "Status", "status": "Success"})
        try:
            after = self._changed_one(request, key, part, live, body)
        except ConflictError as error:
            return _status(409, f"Apply failed with 1 conflict: {error}")
        status = 201 if live is None else 200
        if live is None or after != live:
            self.written.append((request.method, request.path, body))
            live = self._store(key, after)
        return web.json_response(_scale(live) if part == "scale" else live, status=status)

    def _changed_one(
        self, request: web.Request, key: Key, part: str | None, live: Object | None, body: Object
    ) -> Object:
        """Return an object as a write wants it. Raises ConflictError."""
        owned = self.owned.setdefault(key, Owned())
        manager = _manager(request)
        before: Object = live or {
            **{name: body[name] for name in ("apiVersion", "kind")},
            "metadata": {"name": key[2], "namespace": key[1]},
        }
        if part == "status":
            body = {"status": body["status"]}
        elif part == "scale":
            body = {"spec": {"replicas": body["spec"]["replicas"]}}
        elif key[0] in WITH_STATUS:
            body = {name: value for name, value in body.items() if name != "status"}
        if request.headers.get("content-type") == "application/apply-patch+yaml":
            force = request.query.get("force") == "true"
            return owned.apply(before, body, f"{manager}/{part or ''}", force=force)
        if request.method == "PUT":
            kept = {"status": before["status"]} if "status" in before else {}
            after = {**body, **(kept if key[0] in WITH_STATUS else {})}
        else:
            after = merged(before, body)
        after["metadata"] = {
            **after.get("metadata", {}),
            **{name: before["metadata"][name] for name in OF_SERVER if name in before["metadata"]},
        }
        owned.update(before, after, manager)
        return after

    def _list(self, request: web.Request, fits: Callable[[Key, Object], bool]) -> web.Response:
        token = request.query.get("continue")
        limit = min(int(request.query.get("limit") or self.most), self.most)
        if token is None:
            version, begin = self.version, 0
            found = [(key, one) for key, one in sorted(self.objects.items()) if fits(key, one)]
            self._snapshots[version] = found
        else:
            version, begin = map(int, token.split("-"))
            if version not in self._snapshots:
                return _status(410, "The provided continue parameter is too old")
            found = self._snapshots[version]
        items = [one for _, one in found[begin : begin + limit]]
        metadata = {"resourceVersion": str(version)}
        if begin + limit < len(found):
            metadata["continue"] = f"{version}-{begin + limit}"
        self.answered["list"] += 1
        return web.json_response({"kind": "List", "metadata": metadata, "items": items})

    async def _watch(
        self,
        request: web.Request,
        transport: asyncio.Transport,
        fits: Callable[[Key, Object | None], bool],
    ) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        ahead = since > self.version
        if ahead and self.ahead == "refused":
            message = f"Timeout: Too large resource version: {since}, current: {self.version}"
            return _status(504, message)
        oldest = self._changes[0].version if self._changes else self.version + 1
        gone = since < oldest - 1
        if gone and self.expired == "status":
            return _status(410, f"too old resource version: {since} ({oldest})")
        answer = web.StreamResponse(headers={"content-type": "application/json"})
        await answer.prepare(request)
        self._watching.add(transport)
        self.answered["watch"] += 1

        async def send(kind: str, one: Object) -> None:
            if transport not in self._still:
                await answer.write(json.dumps({"type": kind, "object": one}).encode() + b"\n")

        try:
            if gone:
                message = f"too old resource version: {since} ({oldest})"
                await send("ERROR", {"kind": "Status", "code": 410, "message": message})
                return answer
            if self.fault == "at_once":
                return answer
            if self.fault == "long":
                while not transport.is_closing():
                    await answer.write(b"x" * 2**20)
            end = asyncio.get_running_loop().time() + float(request.query["timeoutSeconds"])
            await self._follow(since, end, fits, send)
        except ConnectionError:
            pass
        finally:
            self._watching.discard(transport)
            self._still.discard(transport)
        return answer

    async def _follow(self, since: int, end: float, fits: Any, send: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            changed = self._changed
            for change in [one for one in self._changes if one.version > since]:
                since = change.version
                was, is_now = fits(change.key, change.before), fits(change.key, change.after)
                if is_now:
                    await send("MODIFIED" if was else "ADDED", change.after)
                elif was:
                    gone = json.loads(json.dumps(change.after or change.before))
                    gone["metadata"]["resourceVersion"] = str(change.version)
                    await send("DELETED", gone)
            left = end - loop.time()
            if left <= 0:
                return
            try:
                wait = min(left, self.bookmarks or left)
                await asyncio.wait_for(changed.wait(), wait)
            except TimeoutError:
                if self.bookmarks and loop.time() < end:
                    since = max(since, self.version)
                    await send("BOOKMARK", {"metadata": {"resourceVersion": str(since)}})


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _manager(request: web.Request) -> str:
    return str(request.query.get("fieldManager") or request.headers.get("user-agent", ""))


def _scale(one: Object) -> Object:
    metadata = {name: one["metadata"][name] for name in OF_SERVER if name in one["metadata"]}
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": metadata,
        "spec": {"replicas": one["spec"].get("replicas", 1)},
    }


def _status(code: int, message: str) -> web.Response:
    return web.json_response(
        {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "message": message,
            "code": code,
        },
        status=code,
    )


def _requirements(selector: str) -> Iterator[str]:
    yield from filter(None, re.split(r",(?![^()]*\))", selector))


def _selector(text: str) -> Callable[[Mapping[str, str]], bool]:
    """The pods' labels that a selector selects."""

    def one(requirement: str, labels: Mapping[str, str]) -> bool:
        if match := _SET.fullmatch(requirement):
            values = match[3].split(",")
            return (labels.get(match[1]) in values) is (match[2] == "in")
        if "!=" in requirement:
            key, _, value = requirement.partition("!=")
            return labels.get(key) != value
        if "=" in requirement:
            key, _, value = requirement.partition("=")
            return labels.get(key) == value
        if requirement.startswith("!"):
            return requirement[1:] not in labels
        return requirement in labels

    return lambda labels: all(one(requirement, labels) for requirement in _requirements(text))


@asynccontextmanager
async def kubernetes_api(tls: ssl.SSLContext | None = None) -> AsyncIterator[KubernetesApi]:
    """A server at a port of this machine."""
    api = KubernetesApi()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    api.url = f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield api
    finally:
        api.cut()
        await runner.cleanup()
