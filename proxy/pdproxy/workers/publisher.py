"""What the scheduler process knows and all workers follow: topics, whose values are published.

A topic has a value for each of its keys. A worker that connects says which values it has of the
scheduler process before, and then is told all values. Behind that it is told what changes. All that
has changed within one turn of the event loop is told together. For a worker that does not read,
what it has to be told is a set of keys and no queue: it is told the last values once it reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from pdproxy.fleet.engine import Engine
from pdproxy.kit.frames import frames
from pdproxy.workers.calls import CALLS, encode_item, told
from pdproxy.workers.kept import Keeper
from pdproxy.workers.scheduler_clients import SchedulerClient

logger = logging.getLogger("pdproxy.workers")

PORTION = 1 << 17
"""Bytes of values that a worker is told at once. It has to read them before it is told more."""
AGAIN = 0.05
"""Seconds until a worker that does not read is looked at again."""
EARLY = 5.0
"""Seconds for which a value that a worker has is kept, until its key is there: sources of engines
answer later.
"""


class Subscribed(Protocol):
    """What a worker is told: see `subscriber`."""

    @told
    def follow(self, topic: str, key: str, value: bytes | None) -> None:
        """The value of a topic's key; None: the key is gone."""

    @told
    def follows_all(self, topic: str) -> None:
        """The worker was told all values of a topic."""


T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode


class Topic(Generic[T]):
    """One topic, made by `Publisher.topic`. A watcher of engines, where its keys are their URLs."""

    def __init__(
        self,
        publisher: Publisher,
        name: str,
        value: Callable[[str], T | None],
        keys: Callable[[], Collection[str]],
        keeper: Keeper | None,
    ) -> None:
        self.name = name
        self.all_keys = keys
        self._publisher = publisher
        self._value = value
        self._keeper = keeper
        self._kind: type[T] | None = None
        self._restore: Callable[[str, T], None] = lambda _, __: None
        self._early: dict[str, list[T]] = {}
        self._early_for = EARLY

    def __repr__(self) -> str:
        return f"<Topic {self.name!r}>"

    def changed(self, key: str = "") -> None:
        """Tell workers the value of a key at the end of this turn."""
        self._keep(key)
        self._publisher.post(self, key, was_gone=False)

    def gone(self, key: str) -> None:
        """Tell workers that a key is gone. If it comes again before they were told, they are told
        both.
        """
        self._keep(key)
        self._publisher.post(self, key, was_gone=True)

    def added(self, engine: Engine) -> None:
        """An engine is there."""
        self.found(engine.url)

    def removed(self, engine: Engine) -> None:
        """An engine is gone."""
        self.gone(engine.url)

    def _keep(self, key: str) -> None:
        if self._keeper is not None:
            self._keeper.keep(f"{self.name} {key}" if key else self.name, self.encoded(key))

    def encoded(self, key: str) -> bytes | None:
        """Return the value of a key, None if there is nothing to tell."""
        value = self._value(key)
        return None if value is None else _encode(value)

    # -- what workers have of the scheduler process before

    def restore_by(
        self, kind: type[T], restore: Callable[[str, T], None], early_for: float = EARLY
    ) -> None:
        """Have `restore` called with each value that a worker has. Several workers may have
        different values of a key. `early_for`: seconds for which those wait whose key is not there:
        see `found`.
        """
        self._kind, self._restore, self._early_for = kind, restore, early_for

    def restore(self, values: dict[str, bytes]) -> None:
        """Take values that a worker has."""
        if self._kind is None:
            return
        for key, body in values.items():
            value = msgspec.msgpack.decode(body, type=self._kind)
            if key in self.all_keys():
                self._restore(key, value)
                continue
            if key not in self._early:
                self._early[key] = []
                asyncio.get_running_loop().call_later(self._early_for, self._early.pop, key, None)
            self._early[key].append(value)

    def found(self, key: str) -> None:
        """Take the values that workers have of a key that is there now."""
        if key in self._early:  # behind others, which have to know the key first
            asyncio.get_running_loop().call_soon(self._found, key)

    def _found(self, key: str) -> None:
        for value in self._early.pop(key, ()) if key in self.all_keys() else ():
            self._restore(key, value)


_Place = tuple[Topic[Any], str]
"""A topic, and one of its keys."""


class _Worker:
    """`due`: what it has to be told, by topics: keys, each with whether it was gone meanwhile."""

    def __init__(self, due: dict[Topic[Any], dict[str, bool]]) -> None:
        self.due = due
        self.has_all: set[Topic[Any]] = set()
        """Topics of which it was told all."""

    @property
    def is_behind(self) -> bool:
        """Whether it has to be told anything."""
        return len(self.has_all) < len(self.due) or any(self.due.values())


class Publisher:
    """The topics of the scheduler process."""

    def __init__(self) -> None:
        self._topics: dict[str, Topic[Any]] = {}
        self._changed: dict[_Place, bool] = {}
        """What has changed in this turn, and whether the key was gone meanwhile."""
        self._workers: dict[SchedulerClient, _Worker] = {}
        self._is_soon = False
        self._again: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Publisher of {len(self._topics)} topics to {len(self._workers)} workers>"

    def topic(
        self,
        name: str,
        value: Callable[[str], T | None],
        keys: Callable[[], Collection[str]] = lambda: ("",),
        keeper: Keeper | None = None,
    ) -> Topic[T]:
        """Return a new topic. Those that are made first are told first.

        `keys` returns all keys: one by default. `value` returns the value of a key, as msgpack can
        encode it; None: there is nothing to tell. `keeper`: has the supervisor keep the values.
        """
        made = self._topics[name] = Topic(self, name, value, keys, keeper)
        return made

    @property
    def behind(self) -> int:
        """How many workers have to be told something."""
        return sum(worker.is_behind for worker in self._workers.values())

    @told
    def restore(self, topic: str, values: dict[str, bytes]) -> None:
        """Take the values of a topic that a worker has of a scheduler process that was before, by
        keys.
        """
        if (found := self._topics.get(topic)) is not None:
            found.restore(values)

    def greet(self, client: SchedulerClient) -> None:
        """Tell a worker everything: it has said what it has."""
        every = {one: dict.fromkeys(one.all_keys(), False) for one in self._topics.values()}
        self._workers[client] = _Worker(every)
        self._tell_soon()

    def left(self, client: SchedulerClient) -> None:
        """Tell a worker nothing more."""
        self._workers.pop(client, None)

    def post(self, topic: Topic[Any], key: str, *, was_gone: bool) -> None:
        """Tell all workers the value of a key at the end of this turn."""
        if self._workers:
            place = topic, key
            self._changed[place] = self._changed.pop(place, False) or was_gone
            self._tell_soon()

    def _tell_soon(self) -> None:
        if not self._is_soon:
            self._is_soon = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._is_soon = False
        if self._again is not None:
            self._again.cancel()
            self._again = None
        changed, self._changed = self._changed, {}
        items: dict[_Place, bytes | None] = {}
        has_told = False
        for client, worker in list(self._workers.items()):
            for (topic, key), was_gone in changed.items():
                keys = worker.due.setdefault(topic, {})
                keys[key] = keys.pop(key, False) or was_gone  # behind what has changed before
            if worker.is_behind and not client.unsent:
                has_told = True
                self._tell_worker(client, worker, items)
        if self.behind and has_told:  # in the next turn it shows whether they read
            self._tell_soon()
        elif self.behind:
            self._again = asyncio.get_running_loop().call_later(AGAIN, self._tell)

    def _tell_worker(
        self, client: SchedulerClient, worker: _Worker, items: dict[_Place, bytes | None]
    ) -> None:
        """Tell a worker a portion. `items`: those that were made in this turn."""
        size = 0
        for topic, keys in worker.due.items():
            while keys and size < PORTION:
                key = next(iter(keys))
                size += self._tell_value(client, topic, key, keys.pop(key), items)
            if keys:
                return
            if topic not in worker.has_all:
                worker.has_all.add(topic)
                client.tell(Subscribed.follows_all, 0, topic.name)

    @staticmethod
    def _tell_value(
        client: SchedulerClient,
        topic: Topic[Any],
        key: str,
        was_gone: bool,
        items: dict[_Place, bytes | None],
    ) -> int:
        """Tell a worker a value. Return its bytes."""
        place = topic, key
        try:
            if was_gone:
                client.send(_item(topic, key, None))
            if place not in items:
                body = topic.encoded(key)
                items[place] = None if body is None else _item(topic, key, body)
            if (item := items[place]) is None:
                return 0
            client.send(item)
        except Exception as error:  # what comes behind it counts all the same
            logger.error("%r could not be told to a worker: %s", topic.name, frames(error))  # noqa: TRY400
            return 0
        return len(item)


def _item(topic: Topic[Any], key: str, body: bytes | None) -> bytes:
    return encode_item(CALLS[Subscribed.follow](0, topic.name, key, body))
