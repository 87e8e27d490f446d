"""Registrations of engines, of several workers: engines register at the scheduler process, which
tells workers what is known of each.

A worker is told all of it when it connects, and then what changes. It tells all of it to the next
scheduler process, which goes on from there: engines stay registered, and their owners the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.registration import (
    NOT_REGISTERED,
    Registered,
    Registrations,
    registers,
    write_known,
)
from pdproxy.kit.clock import Clock
from pdproxy.observe.events import Event, NodeChanged
from pdproxy.scheduling.ledger import Ledger
from pdproxy.workers.scheduler_clients import SchedulerClient
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks


class _Told(msgspec.Struct, array_like=True):
    """`whole`: `known` is all that there is. `gone`: the URL of an engine that was removed."""

    known: Sequence[Registered] = ()
    whole: bool = False
    gone: str | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Told).decode


class RegistrationsForWorkers:
    """What the scheduler process tells of the registrations of a pool, and is told when it begins.
    `topic`: theirs; `timeout`: seconds for which it goes on from what it was told.
    """

    def __init__(
        self,
        links: SchedulerLinks,
        topic: str,
        own: Registrations,
        engines: EngineRegistry,
        clock: Clock,
        timeout: float,
    ) -> None:
        self._own = own
        self._before: dict[str, Registered] = {}
        """What the scheduler process before had found of engines, by their URLs: also of those that
        are not added yet.
        """
        self._links = links
        self._topic = topic
        self._clock = clock
        self._timeout = timeout
        own.changed = lambda known: links.say(topic, _encode(_Told([known])))
        engines.watch(self)
        links.greets.append(self._greet)
        links.hears[topic] = self._restore

    def __repr__(self) -> str:
        return f"<RegistrationsForWorkers {self._own!r}>"

    def added(self, engine: Engine) -> None:
        """Go on from what was known of an engine."""
        if (known := self._before.pop(engine.url, None)) is not None:
            self._own.restore(known)

    def removed(self, engine: Engine) -> None:
        """Tell workers that nothing is known any more."""
        self._links.say(self._topic, _encode(_Told(gone=engine.url)))

    def _greet(self, client: SchedulerClient) -> None:
        client.say(self._topic, _encode(_Told(self._own.known(), whole=True)))

    def _restore(self, _: SchedulerClient, body: bytes) -> None:
        if not self._before:
            self._clock.after(self._timeout, self._before.clear)
        for known in _decode(body).known:
            self._before[known.url] = known
            self._own.restore(known)


class RegistrationsOfWorker:
    """What a worker knows of the registrations of a pool. A watcher of its engines."""

    only: tuple[type[Event], ...] = (NodeChanged,)

    def __init__(
        self, link: SchedulerLink, topic: str, engines: EngineRegistry, ledger: Ledger
    ) -> None:
        self._engines = engines
        self._ledger = ledger
        self._known: dict[str, Registered] = {}
        """By the URLs of the engines that the scheduler process has."""
        self.complete = False
        """Whether a scheduler process has told all of it."""
        engines.watch(self)
        link.hears[topic] = self._hear
        link.holds[topic] = self._held

    def __repr__(self) -> str:
        return f"<RegistrationsOfWorker {self.count} of {len(self._known)}>"

    @property
    def count(self) -> int:
        """How many engines are registered and can be used."""
        return sum(not isinstance(one.found, str) for one in self._known.values())

    def shortcomings(self) -> list[str]:
        """Return nothing: the scheduler process says what is wrong."""
        return []

    def added(self, engine: Engine) -> None:
        """Expect one more engine to be registered."""
        self._write(engine)

    def removed(self, engine: Engine) -> None:
        """What is known of it counts until the scheduler process has removed it, too."""

    def notify(self, event: Event) -> None:
        """An engine that restarted has a new run, whose peers come from its registration."""
        if isinstance(event, NodeChanged) and event.up:
            self._write(self._engines.get(event.node))

    def _write(self, engine: Engine | None) -> None:
        if engine is not None and registers(engine):
            known = self._known.get(engine.url)
            found = NOT_REGISTERED if known is None else known.found
            write_known(engine, self._ledger, found)

    def _hear(self, body: bytes) -> None:
        told = _decode(body)
        if told.whole:
            gone, self._known, self.complete = list(self._known), {}, True
        else:
            gone = [] if told.gone is None else [told.gone]
        for url in gone:
            self._known.pop(url, None)
        self._known |= {one.url: one for one in told.known}
        for url in {*gone, *(one.url for one in told.known)}:
            self._write(self._engines.get(url))

    def _held(self) -> bytes | None:
        return _encode(_Told([*self._known.values()])) if self._known else None
