"""All objects that matter to the operator, as the API server gave them last.

Owns them, the groups that they belong to, and what is wrong with following them. A PDRuntime or a
PDProxy that can't be read is named: what does not depend on it goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from pdproxy.fleet.informer import ApiCollection, Counts, Informer
from pdproxy.kit.text import truncate
from pdproxy.settings.kubernetes import Kubernetes
from pdproxy.upstream.kubernetes import UNREADABLE, ApiConnection, ApiError, KubernetesApi
from pdproxy.wire.kubernetes import Renamed
from pdproxy_operator.followed import Changes, Followed, Unread
from pdproxy_operator.kinds import PODS, PROXIES, RUNTIMES, WRITTEN, Kind
from pdproxy_operator.names import MANAGED_BY, MANAGER, PROXY, RUNTIME
from pdproxy_operator.own import OwnObject, OwnPod
from pdproxy_operator.resources import (
    Name,
    Proxy,
    ProxySpec,
    ProxyStatus,
    Runtime,
    RuntimeSpec,
    RuntimeStatus,
    Selector,
    name_of,
    selects,
)

logger = logging.getLogger("pdproxy.operator")
CAUGHT_UP = 2.0
"""Seconds for which the writes of a reconciliation are waited for to come back, at most."""
ASK_AGAIN = 10.0
"""Seconds until a cluster is asked again whether it has a kind, after a failure."""


class Group(NamedTuple):
    """What is reconciled at once: a PDProxy with the pools whose rollouts are its own, or a
    PDRuntime that no PDProxy selects.
    """

    kind: Literal["PDProxy", "PDRuntime"]
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


class Store:
    """Follows all of it. `namespaces`: which, empty: all. `changed` gets the groups that are
    concerned by a change, and whether a user has made it.
    """

    def __init__(
        self,
        api: KubernetesApi,
        times: Kubernetes,
        namespaces: Sequence[str],
        changed: Callable[[Group, bool], None],
    ) -> None:
        self._api = api
        self._times = times
        self._changed = changed
        self.counts = Counts()
        self.complete = asyncio.Event()
        """Set once all objects are known, as they are or were."""
        self._runtimes: dict[str, dict[str, Runtime]] = {}
        self._proxies: dict[str, dict[str, Proxy]] = {}
        """By namespace and name, as all others."""
        self.unreadable: dict[Group, Unread] = {}
        """PDRuntimes and PDProxies whose spec can't be read."""
        places: list[str | None] = list(namespaces) or [None]
        self._resources: list[Followed[Unread]] = [
            Followed(kind, place, partial(self._take, kind), self._known)
            for kind in (PROXIES, RUNTIMES)
            for place in places
        ]
        self._pods: list[Followed[OwnPod]] = [
            Followed(PODS, place, self._moved, self._known) for place in places
        ]
        self._own: dict[Kind, list[Followed[OwnObject]]] = {
            kind: [Followed(kind, place, self._moved, self._known) for place in places]
            for kind in WRITTEN
        }

    def __repr__(self) -> str:
        return f"<Store of {sum(map(len, self._runtimes.values()))} PDRuntimes>"

    # following

    async def run(self) -> None:
        """Follow all of it, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for resources in self._resources:
                tasks.create_task(self._follow(resources, Unread, ""))
            managed = f"{MANAGED_BY}={MANAGER}"
            for pods in self._pods:
                tasks.create_task(self._follow(pods, OwnPod, managed))
            for kind, followed in self._own.items():
                for one in followed:
                    follow = self._follow_optional if kind.is_optional else self._follow
                    tasks.create_task(follow(one, OwnObject, managed))

    async def _follow(self, one: Followed[Any], kind: type[Any], selector: str) -> None:
        collection = ApiCollection(kind, one.kind.path(one.namespace), selector)
        connection = self._api.connection()
        await Informer(collection, connection, self._times, one.take, self.counts).run()

    async def _follow_optional(self, one: Followed[Any], kind: type[Any], selector: str) -> None:
        """Follow objects of a kind while the cluster has it: whether it has is asked from time to
        time.
        """
        connection = self._api.connection()
        following: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            while True:
                pause = self._times.relist * random.uniform(0.8, 1.2)
                try:
                    is_there = await _is_served(connection, one.kind)
                except ApiError as error:
                    is_there, pause = following is not None, min(pause, ASK_AGAIN)
                    if following is None:
                        one.problem = str(error)
                else:
                    if following is not None and not is_there:
                        following.cancel()
                        following = None
                    if not is_there:
                        one.miss()
                await connection.drop()
                if is_there and following is None:
                    following = tasks.create_task(self._follow(one, kind, selector))
                await asyncio.sleep(pause)

    # what there is

    def problems(self) -> list[str]:
        """Return what is wrong with following objects, a sentence each."""
        return [f"{one.kind.plural}: {one.problem}" for one in self._all() if one.problem]

    @property
    def heard_at(self) -> float:
        """When all of it was known to be as the API has it, in seconds of the event loop."""
        return min(one.heard_at for one in self._all())

    def _all(self) -> Iterator[Followed[Any]]:
        yield from self._resources
        yield from self._pods
        for followed in self._own.values():
            yield from followed

    def runtimes(self, namespace: str) -> list[Runtime]:
        """Return all PDRuntimes of a namespace that can be read, by name."""
        return [one for _, one in sorted(self._runtimes.get(namespace, {}).items())]

    def proxies(self, namespace: str) -> list[Proxy]:
        """Return all PDProxies of a namespace that can be read, by name."""
        return [one for _, one in sorted(self._proxies.get(namespace, {}).items())]

    def all_proxies(self) -> list[Proxy]:
        """Return the PDProxies of all namespaces."""
        return [one for within in self._proxies.values() for one in within.values()]

    def unreadable_near(
        self, namespace: str, proxy: Proxy | None, runtimes: Sequence[Runtime]
    ) -> Group | None:
        """Return an object that can't be read, and without which nobody knows what some runtimes
        and their PDProxy should be: a PDRuntime that it selects, or another PDProxy that selects
        them. None: there is none.
        """
        for named, one in self.unreadable.items():
            if named.namespace != namespace:
                continue
            if named.kind == PROXIES.kind:
                selector = _selector(one)
                if any(_may_select(selector, each, proxy) for each in runtimes):
                    return named
            elif proxy is not None and selects(proxy.spec.runtime_selector, one.metadata.labels):
                return named
        return None

    def uids(self, namespace: str) -> set[str]:
        """Return the uids of all PDRuntimes and PDProxies of a namespace, also of those that can't
        be read.
        """
        return {
            one.metadata.uid
            for followed in self._resources
            for one in followed.of(namespace).values()
        }

    def pods(self, namespace: str) -> list[OwnPod]:
        """Return the pods of engines and of proxies in a namespace."""
        return [one for followed in self._pods for one in followed.of(namespace).values()]

    def own(self, kind: Kind, namespace: str) -> list[OwnObject]:
        """Return the operator's own objects of a kind in a namespace."""
        return [one for followed in self._own[kind] for one in followed.of(namespace).values()]

    def own_of(self, kind: Kind, name: Name) -> OwnObject | None:
        """Return one of them, None: there is none of this name."""
        found = (one.of(name.namespace).get(name.name) for one in self._own[kind])
        return next((one for one in found if one is not None), None)

    def is_missing(self, kind: Kind) -> bool:
        """Return whether this cluster has no such kind."""
        return all(one.is_missing for one in self._own[kind])

    def group_of(self, runtime: Runtime) -> Group:
        """Return the group of a PDRuntime: of the first PDProxy by name that selects it."""
        namespace, name = name_of(runtime)
        for proxy in self.proxies(namespace):
            if selects(proxy.spec.runtime_selector, runtime.metadata.labels):
                return Group("PDProxy", namespace, proxy.metadata.name)
        return Group("PDRuntime", namespace, name)

    def groups(self, namespace: str) -> set[Group]:
        """Return all groups of a namespace."""
        found = {self.group_of(one) for one in self.runtimes(namespace)}
        return found | {
            Group("PDProxy", namespace, one.metadata.name) for one in self.proxies(namespace)
        }

    async def caught_up(self, written: Iterable[tuple[Kind, Name, str]]) -> None:
        """Wait until some writes are known here, but not for long. Each has the version of the
        object, "": it was deleted.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CAUGHT_UP):
                for kind, name, version in written:
                    for one in self._all():
                        if one.kind == kind and one.namespace in (None, name.namespace):
                            await one.has_seen(name, version)

    # what changes

    def _known(self) -> None:
        if all(one.is_known for one in self._all()):
            self.complete.set()

    def _take(self, kind: Kind, changes: Changes[Unread]) -> None:
        """Have other versions of PDRuntimes or PDProxies."""
        known: dict[str, dict[str, Any]] = self._runtimes if kind == RUNTIMES else self._proxies
        by_users = {
            (one or was).metadata.namespace  # type: ignore[union-attr]
            for was, one in changes
            if is_change_of_user(was, one)
        }
        before = {namespace: self.groups(namespace) for namespace in by_users}
        for was, one in changes:
            changed = one or was
            assert changed is not None
            namespace, name = changed.metadata.namespace, changed.metadata.name
            named = Group("PDRuntime" if kind == RUNTIMES else "PDProxy", namespace, name)
            self.unreadable.pop(named, None)
            known.setdefault(namespace, {}).pop(name, None)
            if one is not None and one.metadata.deletion_timestamp is None:
                try:
                    known[namespace][name] = _read(kind, one)
                except UNREADABLE as error:
                    self.unreadable[named] = one
                    logger.error("%s can't be read: %s", named, truncate(str(error)))  # noqa: TRY400
        # by a user's change another PDProxy or another PDRuntime may be concerned, too
        for namespace in by_users:
            for group in before[namespace] | self.groups(namespace):
                self._changed(group, True)
        for _, one in changes:
            if one is not None and one.metadata.namespace not in by_users:
                self._change(kind.kind, one.metadata.namespace, one.metadata.name)

    def _moved(self, changes: Changes[OwnObject] | Changes[OwnPod]) -> None:
        """Some of the operator's own objects are others, or gone."""
        concerned = set()
        for was, one in changes:
            changed = one or was
            assert changed is not None
            labels = changed.metadata.labels or {}
            for label, of in ((PROXY, PROXIES), (RUNTIME, RUNTIMES)):
                if label in labels:
                    concerned.add((of.kind, changed.metadata.namespace, labels[label]))
        for kind, namespace, name in concerned:
            self._change(kind, namespace, name)

    def _change(self, kind: str, namespace: str, name: str) -> None:
        """Something of a PDProxy or a PDRuntime is another."""
        if kind == PROXIES.kind:
            self._changed(Group("PDProxy", namespace, name), False)
        elif (runtime := self._runtimes.get(namespace, {}).get(name)) is not None:
            self._changed(self.group_of(runtime), False)


def is_change_of_user(was: Unread | None, one: Unread | None) -> bool:
    """Return whether an object is new, gone, or another but for its status."""
    if was is None or one is None:
        return True
    before, now = was.metadata, one.metadata
    return (
        before.uid != now.uid
        or before.generation != now.generation
        or before.labels != now.labels
        or before.deletion_timestamp != now.deletion_timestamp
    )


def _read(kind: Kind, one: Unread) -> Runtime | Proxy:
    if kind == RUNTIMES:
        spec = msgspec.json.decode(one.spec, type=RuntimeSpec)
        return Runtime(one.metadata, spec, _status(one.status, RuntimeStatus))
    return Proxy(
        one.metadata,
        msgspec.json.decode(one.spec, type=ProxySpec),
        _status(one.status, ProxyStatus),
    )


class _Selecting(Renamed, frozen=True):
    runtime_selector: Selector


def _selector(one: Unread) -> Selector | None:
    """Return which PDRuntimes a PDProxy selects that can't be read otherwise. None: nobody
    knows.
    """
    try:
        return msgspec.json.decode(one.spec, type=_Selecting).runtime_selector
    except UNREADABLE:
        return None


def _may_select(selector: Selector | None, runtime: Runtime, known: Proxy | None) -> bool:
    """Return whether a PDProxy that can't be read may select a runtime. `known`: one that does."""
    if selector is None:
        return known is None
    return selects(selector, runtime.metadata.labels)


S = TypeVar("S", RuntimeStatus, ProxyStatus)


def _status(raw: msgspec.Raw, kind: type[S]) -> S:
    """Return a status. One that can't be read is written anew."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except UNREADABLE:
        return kind()


class _Resource(msgspec.Struct):
    name: str = ""


class _Resources(msgspec.Struct):
    resources: list[_Resource] = []


async def _is_served(connection: ApiConnection, kind: Kind) -> bool:
    """Return whether the cluster has a kind. Raises ApiError."""
    try:
        found = msgspec.json.decode(await connection.get(kind.api, {}), type=_Resources)
    except ApiError as error:
        if error.status == 404:
            return False
        raise
    except UNREADABLE as error:
        raise ApiError(f"{kind.api}: an answer that can't be read: {error}") from None
    return any(one.name == kind.plural for one in found.resources)
