"""A worker's side of what the scheduler process publishes: see `publisher`.

Owns the last value of each key. A new scheduler process is told those that it can't find out
itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from pdproxy.kit.frames import frames

logger = logging.getLogger("pdproxy.workers")

T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode


class Subscription(Generic[T]):
    """One topic, made by `Subscriber.subscribe`."""

    def __init__(
        self,
        kind: type[T],
        take: Callable[[str, T], None],
        gone: Callable[[str], None],
        *,
        is_whole: bool,
    ) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._take = take
        self._gone = gone
        self._is_whole = is_whole
        self.values: dict[str, T] = {}
        """The last value of each key."""
        self.retained: Callable[[], Mapping[str, T]] = dict
        """Returns the values that a new scheduler process is told, none by default."""
        self.counts: Callable[[str], bool] = lambda _: True
        """Returns whether a value of a key that comes now counts."""
        self.then: Callable[[], None] = lambda: None
        """Called each time that a scheduler process has told all values."""
        self.has_all = False
        """Whether one has."""
        self._untold: set[str] = set()
        """Keys that the present scheduler process has not told."""

    def __repr__(self) -> str:
        return f"<Subscription of {len(self.values)} values>"

    def begin(self) -> None:
        """Another scheduler process tells values from now on."""
        self._untold = set(self.values)

    def received(self, key: str, body: bytes | None) -> None:
        """Take a value, or that its key is gone."""
        self._untold.discard(key)
        if body is None:
            self.values.pop(key, None)
            self._gone(key)
        elif self.counts(key):
            value = self._decode(body)
            try:
                self._take(key, value)
            finally:
                self.values[key] = value

    def received_all(self) -> set[str]:
        """The scheduler process has told all values. Return the keys that are gone."""
        self.has_all = True
        untold, self._untold = self._untold, set()
        return untold if self._is_whole else set()


class Subscriber:
    """The topics that a worker follows."""

    def __init__(self) -> None:
        self._topics: dict[str, Subscription[Any]] = {}

    def __repr__(self) -> str:
        return f"<Subscriber of {len(self._topics)} topics>"

    def subscribe(
        self,
        name: str,
        kind: type[T],
        take: Callable[[str, T], None],
        gone: Callable[[str], None] = lambda _: None,
        *,
        is_whole: bool = False,
    ) -> Subscription[T]:
        """Follow a topic. `kind`: the type of its values; `take`: called with each key and value
        that comes, just before it is kept; `gone`: with each key that is gone. `is_whole`: a key is
        gone, too, if a new scheduler process has told everything but that key.
        """
        made = self._topics[name] = Subscription(kind, take, gone, is_whole=is_whole)
        return made

    def connected(self) -> list[tuple[str, dict[str, bytes]]]:
        """Return what is told to a new scheduler process, which tells values from now on."""
        told = []
        for name, topic in self._topics.items():
            topic.begin()
            if values := topic.retained():
                told.append((name, {key: _encode(one) for key, one in values.items()}))
        return told

    def follow(self, topic: str, key: str, value: bytes | None) -> None:
        """See `Subscribed`."""
        try:
            self._topics[topic].received(key, value)
        except Exception as error:  # what comes behind it counts all the same
            logger.error("%r of the scheduler process failed: %s", topic, frames(error))  # noqa: TRY400

    def follows_all(self, topic: str) -> None:
        """See `Subscribed`."""
        known = self._topics[topic]
        for key in known.received_all():
            self.follow(topic, key, None)
        known.then()
