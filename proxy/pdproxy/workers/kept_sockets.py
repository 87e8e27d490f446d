"""The sockets to which engines send messages, of several workers: only the scheduler process takes
connections there.

The supervisor binds them and keeps them open. When a scheduler process ends, engines' connections
wait for the next one, and no other program can take the port.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from pdproxy.app.sockets import AddressToBind, listener_at, telling
from pdproxy.upstream.inbound_socket import InboundSocket


class KeptSockets:
    """`Sockets` of the scheduler process. `kept`: what the supervisor has bound, by the keys of the
    places. A socket of a connector that was not known then is bound here.
    """

    def __init__(self, kept: Mapping[str, socket.socket]) -> None:
        self._kept = kept

    def bind(self, socket: InboundSocket, place: AddressToBind) -> None:
        """See `Sockets`."""
        with self.listener(place) as listener, telling(place):
            socket.bind(place.host, listener.getsockname()[1], listener)

    def listener(self, place: AddressToBind) -> socket.socket:
        """See `Sockets`."""
        kept = self._kept.get(place.key)
        return listener_at(place) if kept is None else kept.dup()
