"""A simulated engine's WebSockets: uvicorn's protocol class, on the transport of the connection
whose handshake it was.
"""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from pdproxy_lab.sim.transport import Wire


class SimWebSocket(WebSocketsSansIOProtocol):
    """One WebSocket."""

    busy = True
    """It is never idle."""
    number = 0
    """No other connection has this one."""
    wire: Wire

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take over a connection."""
        self.wire = cast("Wire", transport)
        super().connection_made(transport)

    def drop(self) -> None:
        """Close as the kernel closes the sockets of a process that is gone."""
        self.wire.abort()
