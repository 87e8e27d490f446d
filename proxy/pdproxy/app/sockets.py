"""The sockets to which engines send messages: where they are, and how they are bound.

With several workers, each takes connections from one socket that their parent has bound: it exists
once, and outlives them.
"""

from __future__ import annotations

import socket as sockets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from pdproxy.settings.errors import SettingsError
from pdproxy.settings.schema import Settings
from pdproxy.transfer import registry
from pdproxy.transfer.contract import Channel
from pdproxy.upstream.inbound_socket import InboundSocket

BACKLOG = 1024
"""Connections that may wait until a worker takes them: one of each engine's rank."""


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


class BoundHere:
    """The sockets of a process that serves alone."""

    def bind(self, socket: InboundSocket, place: AddressToBind) -> None:
        """Bind a socket.

        Raises:
            SettingsError: the address can't be bound.
        """
        with _telling(place):
            socket.bind(place.host, place.port)

    def listener(self, place: AddressToBind) -> sockets.socket:
        """Return a socket that listens there. Raises SettingsError: the address can't be bound."""
        return listener_at(place)


class BoundBefore:
    """The sockets of one of several workers, which its parent has bound. `listeners`: by the keys
    of their places.
    """

    def __init__(self, listeners: Mapping[str, sockets.socket]) -> None:
        self._listeners = listeners

    def bind(self, socket: InboundSocket, place: AddressToBind) -> None:
        """Have a socket take some of the connections.

        Raises:
            SettingsError: nothing was bound, because the connector was not known.
        """
        listener = self._bound(place)
        with _telling(place):
            socket.bind(place.host, listener.getsockname()[1], listener)

    def listener(self, place: AddressToBind) -> sockets.socket:
        """Return a socket that takes some of the connections there. Raises SettingsError as
        `bind`.
        """
        return self._bound(place).dup()

    def _bound(self, place: AddressToBind) -> sockets.socket:
        listener = self._listeners.get(place.key)
        if listener is None:
            raise SettingsError(
                f"pools[0].connector: {registry.AUTO}: with several workers, name a connector "
                f"whose engines send messages "
                f"({place.section})"
            )
        return listener


Sockets = BoundHere | BoundBefore
"""How a pool's sockets for engines' messages are bound."""


def listener_at(place: AddressToBind) -> sockets.socket:
    """Return a socket that listens there, for several processes.

    Raises:
        SettingsError: the address can't be bound.
    """
    with _telling(place):
        listener = sockets.socket(
            sockets.AF_INET6 if ":" in place.host else sockets.AF_INET, sockets.SOCK_STREAM
        )
        try:
            listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
            listener.bind((place.host, place.port))
            listener.listen(BACKLOG)
            listener.setblocking(False)  # another process may take a connection first
        except OSError:
            listener.close()
            raise
        return listener


@contextmanager
def _telling(place: AddressToBind) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (addr=")[0]  # pyzmq repeats the address
        section = place.section
        raise SettingsError(
            f"can't bind {section}.host:{section}.port = {place.host}:{place.port}: {why}"
        ) from None
