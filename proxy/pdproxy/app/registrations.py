"""Wiring of engines' registrations, for connectors whose engines register."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pdproxy.app.sockets import bind
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.registration import Registrations
from pdproxy.kit.clock import Clock
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.settings.schema import Settings
from pdproxy.transfer.registry import entry_of
from pdproxy.upstream.registrations import RegistrationSocket

logger = logging.getLogger("pdproxy.kv")


@dataclass(frozen=True, slots=True)
class Registering:
    """The registrations of a pool's engines, and the socket at which they come in."""

    known: Registrations
    socket: RegistrationSocket
    host: str
    port: int

    def start(self) -> None:
        """Bind the socket.

        Raises:
            SettingsError: it can't be bound.
        """
        bind(self.socket, "registration", self.host, self.port)
        logger.info("engines are expected to register on %s", self.socket.address)


def build_registrations(
    settings: Settings, engines: EngineRegistry, ledger: Ledger, observers: Observers, clock: Clock, tasks: TaskOwner
) -> Registering | None:
    """Return the registrations of the pool's engines, None if its connector's engines don't register."""
    entry, own = entry_of(settings.pool.connector), settings.registration
    if entry.registered is None:
        return None
    known = Registrations(engines, ledger, entry.registered, observers, clock, timeout=own.timeout)
    socket = RegistrationSocket(known.receive, known.unreadable, tasks.watch("registrations").failed)
    return Registering(known, socket, own.host, own.port or entry.registration_port)
