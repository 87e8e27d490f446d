"""Follows a collection of objects of the Kubernetes API: a list, then a watch from the list's
version on.

Owns the objects as they were last. Whoever uses them gets all of them each time, never a
difference: an event that was missed can't stay wrong for longer than until the next list. A library
does not do this: those for Python miss what was deleted between two watches, or stop at an error.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from pdproxy.kit.errors import Wait
from pdproxy.settings.kubernetes import Kubernetes
from pdproxy.upstream.kubernetes import UNREADABLE, ApiConnection, ApiError, ConnectionCutError
from pdproxy.wire.kubernetes import Event, Metadata, Page, Status

PAGE = 500
"""Objects that a page of a list has at most."""
MAX_OBJECTS = 10_000
"""Objects that are kept: more are taken for a mistake in the selector."""
MAX_PAGES = 1000
"""Pages of one list. Pages may be shorter than what was asked for."""
RETRY, LONGEST_RETRY = 0.2, 30.0
"""Seconds until what failed is tried again: the first, doubled up to the second; as little as half
of it by chance.
"""
TRUSTED = 2
"""Failures in a row after which the version is not trusted any more, and a problem is said."""
SHORT = 1.0
"""Seconds: a watch that ends sooner without an event has failed."""
JITTER = 0.2
"""The share by which times are changed at random: many proxies begin at the same time."""
KINDS = {"ADDED": "added", "MODIFIED": "modified", "DELETED": "deleted", "BOOKMARK": "bookmark"}
KINDS |= {"ERROR": "error"}
"""Types of events, each with its name in metrics."""
REASONS = (
    ("start", "nothing was known"),
    ("expired", "the API server does not have the version any more, or not yet"),
    ("failed", f"{TRUSTED} requests in a row have failed"),
    ("periodic", "kubernetes.relist has passed"),
)
"""Why all objects are listed."""


class ApiObject(Protocol):
    """An object of the API."""

    @property
    def metadata(self) -> Metadata:
        """Which one it is."""


T = TypeVar("T", bound=ApiObject)


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """What is known now. `objects`: all, None before the first list. `problem`: why nothing is
    heard of the API, None if all is well. `passed`: the deadline that has just ended a wait.
    """

    objects: Collection[T] | None
    problem: str | None = None
    passed: Wait | None = None


class ApiCollection(NamedTuple, Generic[T]):
    """Which objects: those of a path. `selector`: of labels, "" selects all; `name`: the only
    one's, "": any.
    """

    kind: type[T]
    path: str
    selector: str = ""
    name: str = ""

    @property
    def parameters(self) -> dict[str, str]:
        """Those of a request for them."""
        found = {"labelSelector": self.selector} if self.selector else {}
        return found | ({"fieldSelector": f"metadata.name={self.name}"} if self.name else {})


class Counts:
    """What informers have done. `lists`: by their reason, as in `REASONS`; `events`: by their type,
    as in `KINDS`.
    """

    def __init__(self) -> None:
        self.lists: Counter[str] = Counter()
        self.events: Counter[str] = Counter()


class Informer(Generic[T]):
    """Follows one collection. `counts`: where it counts what it does. `chance`: from 0 to 1, for
    the jitter.
    """

    def __init__(
        self,
        collection: ApiCollection[T],
        connection: ApiConnection,
        times: Kubernetes,
        found: Callable[[Found[T]], None],
        counts: Counts,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._collection = collection
        self._connection = connection
        self._times = times
        self._found = found
        self._counts = counts
        self._chance = chance
        self._page = msgspec.json.Decoder(Page[collection.kind])  # type: ignore[name-defined]
        self._event = msgspec.json.Decoder(Event)
        self._object = msgspec.json.Decoder(collection.kind)
        self._objects: dict[tuple[str, str], T] | None = None
        self._version = ""
        self._due: str | None = "start"
        """Why a list is due, None if none is."""
        self._relist_at = 0.0
        self._failures = 0
        self._expired = False
        """Whether no watch has worked since the version was gone."""
        self._problem: str | None = None

    def __repr__(self) -> str:
        return f"<Informer {self._collection.path} {self._collection.selector}>"

    async def run(self) -> None:
        """Say what is found, at the start, whenever it changes, and whenever the API server shows
        that it has not, until cancelled.
        """
        try:
            while True:
                pause = await self._turn()
                await asyncio.sleep(pause)
        finally:
            await self._connection.drop()

    async def _turn(self) -> float:
        """List if that is due, and watch until the watch ends. Return the seconds to wait then."""
        try:
            if self._due is not None:
                await self._list(self._due)
            return await self._watch()
        except ApiError as error:
            # 410: the version is too old; 504: a server that has just begun is behind it.
            if error.status == 410 or (error.status == 504 and "resource version" in error.message):
                self._due = "expired"
                if not self._expired:
                    self._expired = True
                    return 0.0
            self._failures += 1
            if self._failures >= TRUSTED:
                self._due = self._due or "failed"
            # one failure that is over at once is no problem: API servers are replaced now and then
            if self._failures >= TRUSTED or self._objects is None:
                self._problem = str(error)
            self._say(error.passed)
            # what it needs to ask may have been replaced: a token, certificates, an address
            await self._connection.drop()
            return max(self._pause(), min(error.pause, LONGEST_RETRY))

    def _works(self) -> None:
        """A watch works: all that is known is as the API has it."""
        self._failures, self._expired, self._problem = 0, False, None
        self._say()

    def _pause(self) -> float:
        doubled = RETRY * 2.0 ** min(max(self._failures - 1, 0), 10)
        return min(doubled, LONGEST_RETRY) * (1 + self._chance()) / 2

    def _jittered(self, seconds: float, low: float) -> float:
        return seconds * (low + (1 + JITTER - low) * self._chance())

    def _say(self, passed: Wait | None = None) -> None:
        objects = None if self._objects is None else self._objects.values()
        self._found(Found(objects, self._problem, passed))

    async def _list(self, reason: str) -> None:
        """Have all objects, and none besides."""
        objects: dict[tuple[str, str], T] = {}
        parameters = {"limit": str(PAGE), **self._collection.parameters}
        for _ in range(MAX_PAGES):
            body = await self._connection.get(self._collection.path, parameters)
            try:
                page = self._page.decode(body)
            except UNREADABLE as error:
                raise _unreadable("list", error) from None
            for one in page.items:
                objects[_key(one)] = one
            _check_number(len(objects))
            if not page.metadata.continue_:
                break
            parameters["continue"] = page.metadata.continue_
        else:
            raise ApiError(f"a list of more than {MAX_PAGES} pages")
        self._counts.lists[reason] += 1
        self._objects, self._version, self._due = objects, page.metadata.resource_version, None
        loop = asyncio.get_running_loop()
        self._relist_at = loop.time() + self._jittered(self._times.relist, 1 - JITTER)
        self._say()

    async def _watch(self) -> float:
        """Follow the events behind the version. Return the seconds to wait before the next
        watch.
        """
        loop = asyncio.get_running_loop()
        parameters = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(round(self._jittered(self._times.watch_timeout, 1.0)) or 1),
            **self._collection.parameters,
        }
        async with self._connection.watch(self._collection.path, parameters) as lines:
            begins = loop.call_later(SHORT, self._works)
            end = loop.time() + SHORT
            try:
                async with asyncio.timeout(None) as limit:
                    while True:
                        # A connection to a machine that is gone, and a watch of a version that
                        # this server will never have, are silent.
                        limit.reschedule(min(loop.time() + self._times.silence, self._relist_at))
                        batch = await anext(lines, None)
                        if batch is None:
                            break
                        self._take(batch)
                        begins.cancel()
                        end = 0.0
                        self._works()
            except TimeoutError:
                if loop.time() >= self._relist_at:
                    self._due = "periodic"
                else:
                    self._say(Wait.WATCH)
                await self._connection.drop()
                return 0.0
            except ConnectionCutError:
                if loop.time() < end:
                    raise
                await self._connection.drop()
                return self._pause()
            finally:
                begins.cancel()
            if loop.time() < end:
                raise ApiError("the API server ends watches at once")
            return 0.0

    def _take(self, batch: list[bytes]) -> None:
        """Have the objects as some events say."""
        for line in batch:
            if line:
                try:
                    self._take_event(self._event.decode(line))
                except UNREADABLE as error:
                    raise _unreadable("watch", error) from None

    def _take_event(self, event: Event) -> None:
        assert self._objects is not None
        kind = KINDS.get(event.type)
        if kind is None:
            raise ApiError("a watch with an event of an unknown type")
        self._counts.events[kind] += 1
        if kind == "error":
            status = msgspec.json.decode(event.object, type=Status)
            raise ApiError(
                f"the API server ends a watch: {status.message}",
                status=status.code,
                message=status.message,
            )
        one = self._object.decode(event.object)
        if kind == "deleted":
            self._objects.pop(_key(one), None)
        elif kind != "bookmark":
            if _key(one) not in self._objects:
                _check_number(len(self._objects) + 1)
            self._objects[_key(one)] = one
        if not one.metadata.resource_version:
            raise ApiError("a watch with an event without a version")
        self._version = one.metadata.resource_version


def _key(one: ApiObject) -> tuple[str, str]:
    """Return what the API knows an object by: another one of the same name takes its place."""
    return one.metadata.namespace, one.metadata.name


def _check_number(number: int) -> None:
    if number > MAX_OBJECTS:
        raise ApiError(f"more than {MAX_OBJECTS} objects: expected a selector that selects fewer")


def _unreadable(what: str, error: Exception) -> ApiError:
    return ApiError(f"a {what} that can't be read: {error}")
