"""A client's connection with TLS that does not hide what waits to be sent.

asyncio's layer of TLS, and uvloop's, hand all that they have to the connection below in one call.
What waits there is in no size of a buffer and pauses nobody, before the next write: one large
answer would be held without being seen. Handed over in pieces, no more than two of them are hidden.
"""

from __future__ import annotations

from asyncio import Transport
from typing import Any, Protocol, cast

PIECE = 64 << 10
"""Bytes. From so many on the connection below takes no more."""


class PiecewiseWriter(Protocol):
    """The protocol of such a transport."""

    def written_in_pieces(self) -> None:
        """More was written than goes at once."""


class PiecewiseTransport:
    """A transport whose large writes go in pieces; its protocol is told behind each such write. All
    else is the transport's.
    """

    __slots__ = ("_transport",)

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of any kind, as the transport has it
        return getattr(self._transport, name)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes. They are not copied."""
        transport = self._transport
        if len(data) <= PIECE:
            transport.write(data)
            return
        view = memoryview(data)
        for at in range(0, len(view), PIECE):
            if transport.is_closing():
                return  # there was no space for more
            transport.write(view[at : at + PIECE])
        if not transport.is_closing():
            cast("PiecewiseWriter", transport.get_protocol()).written_in_pieces()
