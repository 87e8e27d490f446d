"""The socket for the heartbeats by which engines register: ZMQ ROUTER, bound here. Each engine's
first worker connects to it.

Nothing on this wire proves who a sender is. What is known of one: its connection, which ROUTER
names, and its IP address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from pdproxy.upstream.inbound_socket import InboundSocket
from pdproxy.wire.registrations import MAX_BYTES, Registration, decode

HIGH_WATER = 16
"""Messages that ZMQ keeps of each sender: some 64 KiB."""
PING_MS = 2000
"""How often ZMQ asks whether a silent connection is alive. One whose machine has vanished must not
keep its name for hours.
"""


class RegistrationSocket(InboundSocket):
    """Passes each heartbeat to `received`, with its sender's connection and IP address ("" if that
    is not known).

    For every other message it calls `unreadable`. `failed`: see the base.
    """

    kind = zmq.ROUTER
    name = "registrations"
    max_bytes = MAX_BYTES
    high_water = HIGH_WATER

    def __init__(
        self,
        received: Callable[[Registration, bytes, str], None],
        unreadable: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        super().__init__(failed)
        self._received = received
        self._unreadable = unreadable

    def _prepare(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * PING_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 2 * PING_MS)

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        registration = decode(frames[1].bytes) if len(frames) == 2 else None
        if registration is None:
            self._unreadable()
            return
        address = ""
        with suppress(zmq.ZMQError):
            address = str(frames[1].get("Peer-Address"))
        self._received(registration, frames[0].bytes, address)
