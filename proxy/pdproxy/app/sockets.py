"""Binding the sockets to which engines send messages."""

from __future__ import annotations

from pdproxy.settings.errors import SettingsError
from pdproxy.upstream.inbound_socket import InboundSocket


def bind(socket: InboundSocket, section: str, host: str, port: int) -> None:
    """Bind a socket at the host and port of a section of the settings.

    Raises:
        SettingsError: the address can't be bound.
    """
    try:
        socket.bind(host, port)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (addr=")[0]  # pyzmq repeats the address
        raise SettingsError(f"can't bind {section}.host:{section}.port = {host}:{port}: {why}") from None
