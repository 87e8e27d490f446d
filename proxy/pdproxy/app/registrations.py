"""Wiring of engines' registrations, for connectors whose engines register."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pdproxy.app.process import Process
from pdproxy.app.share import PoolShare
from pdproxy.app.sockets import AddressToBind, Sockets, registration_place
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.handle_hosts import HandleHosts
from pdproxy.fleet.registration import KnownRegistrations, Registrations
from pdproxy.scheduling.ledger import Ledger
from pdproxy.settings.schema import Settings
from pdproxy.transfer.registry import entry_of
from pdproxy.upstream.registrations import RegistrationSocket

logger = logging.getLogger("pdproxy.kv")


@dataclass(frozen=True, slots=True)
class Registering:
    """The registrations of a pool's engines, and the socket at which they come in. `sockets` None:
    no engine registers at this process.
    """

    known: KnownRegistrations
    socket: RegistrationSocket | None
    place: AddressToBind
    sockets: Sockets | None

    def start(self) -> None:
        """Bind the socket, if engines register at this process.

        Raises:
            SettingsError: it can't be bound.
        """
        if self.sockets is not None and self.socket is not None:
            self.sockets.bind(self.socket, self.place)
            logger.info("engines are expected to register on %s", self.socket.address)

    def close(self) -> None:
        """Close the socket."""
        if self.socket is not None:
            self.socket.close()


def build_registrations(
    settings: Settings,
    engines: EngineRegistry,
    ledger: Ledger,
    process: Process,
    sockets: Sockets | None,
    own: PoolShare | None,
    hosts: HandleHosts,
) -> Registering | None:
    """Return the registrations of the pool's engines, None if they don't register.

    `sockets`: how the pool's are bound. `own`: the process's part of the pool, if there are several
    processes. `hosts`: which hosts engines may name.
    """
    read, timeout = entry_of(settings.pool.connector).registered, settings.registration.timeout
    if read is None:
        return None
    place = registration_place(settings)
    if own is not None and sockets is None:
        return Registering(own.registered(engines, ledger), None, place, None)
    known = Registrations(
        engines,
        ledger,
        read,
        process.observers,
        process.clock,
        timeout=timeout,
        checked=hosts.of_peers,
    )
    if own is not None:
        own.pass_on(known, engines, timeout)
    failed = process.tasks.watch("registrations").failed
    socket = RegistrationSocket(known.receive, known.unreadable, failed)
    return Registering(known, socket, place, sockets)
