"""Registrations of engines, of several workers: engines register at the scheduler process, which
publishes what is known of each.

Workers tell all of it to the next scheduler process, which goes on from there: engines stay
registered, and their owners the same.
"""

from __future__ import annotations

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.registration import (
    NOT_REGISTERED,
    Registered,
    Registrations,
    registers,
    write_known,
)
from pdproxy.observe.events import Event, NodeChanged
from pdproxy.scheduling.ledger import Ledger
from pdproxy.workers.publisher import Publisher
from pdproxy.workers.subscriber import Subscriber


def publish_registrations(
    publisher: Publisher, topic: str, own: Registrations, engines: EngineRegistry, timeout: float
) -> None:
    """Have workers know the registrations of a pool. `timeout`: seconds for which this process goes
    on from what workers know of engines that are not added yet.
    """

    def of(url: str) -> Registered | None:
        engine = engines.get(url)
        return None if engine is None else own.of(engine)

    made = publisher.topic(topic, of, engines.keys)
    made.restore_by(Registered, lambda _, known: own.restore(known), timeout)
    own.changed = lambda known: made.changed(known.url)
    engines.watch(made)


class RegistrationsOfWorker:
    """What a worker knows of the registrations of a pool. A watcher of its engines."""

    only: tuple[type[Event], ...] = (NodeChanged,)

    def __init__(
        self, subscriber: Subscriber, topic: str, engines: EngineRegistry, ledger: Ledger
    ) -> None:
        self._engines = engines
        self._ledger = ledger
        self._told = subscriber.subscribe(
            topic, Registered, self._take, lambda url: self._take(url, None), is_whole=True
        )
        self._told.retained = lambda: self._told.values
        engines.watch(self)

    def __repr__(self) -> str:
        return f"<RegistrationsOfWorker {self.count} of {len(self._told.values)}>"

    @property
    def complete(self) -> bool:
        """Whether a scheduler process has told all of it."""
        return self._told.has_all

    @property
    def count(self) -> int:
        """How many engines are registered and can be used."""
        return sum(not isinstance(one.found, str) for one in self._told.values.values())

    def shortcomings(self) -> list[str]:
        """Return nothing: the scheduler process says what is wrong."""
        return []

    def added(self, engine: Engine) -> None:
        """Expect one more engine to be registered."""
        self._take(engine.url, self._told.values.get(engine.url))

    def removed(self, engine: Engine) -> None:
        """What is known of it counts until the scheduler process has removed it, too."""

    def notify(self, event: Event) -> None:
        """An engine that restarted has a new run, whose peers come from its registration."""
        if isinstance(event, NodeChanged) and event.up:
            self._take(event.node, self._told.values.get(event.node))

    def _take(self, url: str, known: Registered | None) -> None:
        engine = self._engines.get(url)
        if engine is not None and registers(engine):
            found = NOT_REGISTERED if known is None else known.found
            write_known(engine, self._ledger, found)
