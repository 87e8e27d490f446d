"""Wiring of engines' registrations, for connectors whose engines register."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pdproxy.app.process import Process
from pdproxy.app.sockets import AddressToBind, Sockets, registration_place
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.handle_hosts import HandleHosts
from pdproxy.fleet.registration import Registrations
from pdproxy.fleet.worker_registration import WorkerRegistrations
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
    place: AddressToBind
    sockets: Sockets | None

    def start(self) -> None:
        """Bind the socket, if engines register at this process.

        Raises:
            SettingsError: it can't be bound.
        """
        if self.sockets is None:
            return
        self.sockets.bind(self.socket, self.place)
        logger.info("engines are expected to register on %s", self.socket.address)


def build_registrations(
    settings: Settings,
    engines: EngineRegistry,
    ledger: Ledger,
    process: Process,
    sockets: Sockets | None,
    hosts: HandleHosts,
) -> Registering | None:
    """Return the registrations of the pool's engines, None if they don't register.

    `sockets`: how the pool's are bound, None: they are not. `hosts`: which hosts engines may name.
    """
    read, timeout = entry_of(settings.pool.connector).registered, settings.registration.timeout
    share = process.share.several
    if read is None:
        return None
    observers, clock, failed = (
        process.observers,
        process.clock,
        process.tasks.watch("registrations").failed,
    )
    known: Registrations
    if share is None:
        known = Registrations(
            engines, ledger, read, observers, clock, timeout=timeout, checked=hosts.of_peers
        )
    else:
        siblings, topic = share.siblings, f"registrations {settings.pool.name}"
        known = WorkerRegistrations(
            engines,
            ledger,
            read,
            observers,
            clock,
            timeout=timeout,
            checked=hosts.of_peers,
            number=share.number,
            lead=share.lead,
            succeeds=share.succeeds,
            pass_on=lambda worker, body: siblings.pass_on(worker, topic, body),
            failed=failed,
        )
        siblings.hears[topic] = known.received
        share.registrations.append(known)
    socket = RegistrationSocket(known.receive, known.unreadable, failed)
    return Registering(known, socket, registration_place(settings), sockets)
