"""The sockets to which engines send messages: where they are, and how they are bound."""

from __future__ import annotations

import socket as sockets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from pdproxy.settings.errors import SettingsError
from pdproxy.settings.schema import Settings
from pdproxy.transfer import registry
from pdproxy.transfer.contract import Channel
from pdproxy.upstream.inbound_socket import InboundSocket

BACKLOG = 1024
"""Connections that may wait until they are taken: one of each engine's rank."""


@dataclass(frozen=True, slots=True)
class AddressToBind:
    """An address to bind, and the section of the settings that has it."""

    section: str
    host: str
    port: int
    at: int = 0
    """Its number of several ports of this section."""

    @property
    def key(self) -> str:
        """What tells a pool's places apart."""
        return f"{self.section} {self.at}" if self.at else self.section


def notices_place(settings: Settings) -> AddressToBind:
    """Return where engines send notices."""
    return AddressToBind("kv_ready", settings.kv_ready.host, settings.kv_ready.port)


def registration_place(settings: Settings) -> AddressToBind:
    """Return where engines of the pool's connector register."""
    own = settings.registration
    port = own.port or registry.entry_of(settings.pool.connector).registration_port
    return AddressToBind("registration", own.host, port)


def kv_events_places(settings: Settings) -> Iterator[AddressToBind]:
    """Return where engines connect to publish KV events: a port for each data-parallel rank that an
    engine may have.
    """
    own = settings.pool.kv_events
    if own.host is not None:
        most = max((engine.facts.data_parallel_size for engine in settings.pool.nodes), default=1)
        for at in range(most):
            yield AddressToBind("pools[0].kv_events", own.host, own.port + at, at)


def places(settings: Settings) -> Iterator[AddressToBind]:
    """Return where the engines of the pool of these settings send messages. Those of its connector:
    if that is known already.
    """
    if settings.pool.kv_events.enabled and settings.pool.asks_the_index:
        yield from kv_events_places(settings)
    if settings.pool.connector == registry.AUTO:
        return
    entry = registry.entry_of(settings.pool.connector)
    if entry.registered is not None:
        yield registration_place(settings)
    contract = entry.contract(settings)
    if contract.has_notices_over(Channel.ZMQ) or contract.has_notices_over(Channel.HTTP):
        yield notices_place(settings)


class Sockets(Protocol):
    """How a pool's sockets for engines' messages are bound."""

    def bind(self, socket: InboundSocket, place: AddressToBind) -> None:
        """Bind a socket.

        Raises:
            SettingsError: the address can't be bound.
        """

    def listener(self, place: AddressToBind) -> sockets.socket:
        """Return a socket that listens there. Raises SettingsError: the address can't be bound."""


class BoundHere:
    """`Sockets` that the process binds when it needs them."""

    def bind(self, socket: InboundSocket, place: AddressToBind) -> None:
        """See `Sockets`."""
        with telling(place):
            socket.bind(place.host, place.port)

    def listener(self, place: AddressToBind) -> sockets.socket:
        """See `Sockets`."""
        return listener_at(place)


def listener_at(place: AddressToBind) -> sockets.socket:
    """Return a socket that listens there, without blocking.

    Raises:
        SettingsError: the address can't be bound.
    """
    with telling(place):
        listener = sockets.socket(
            sockets.AF_INET6 if ":" in place.host else sockets.AF_INET, sockets.SOCK_STREAM
        )
        try:
            listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
            listener.bind((place.host, place.port))
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        return listener


@contextmanager
def telling(place: AddressToBind) -> Iterator[None]:
    """Raise SettingsError, which names the place, if it can't be bound."""
    try:
        yield
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (addr=")[0]  # pyzmq repeats the address
        section = place.section
        raise SettingsError(
            f"can't bind {section}.host:{section}.port = {place.host}:{place.port}: {why}"
        ) from None
