"""Connections in memory: pairs of asyncio transports with latency, windows, half close and reset.

Owns the bytes on their way. A `Link` is the way from one host to another; what a link that is down
got is delivered once it is up again, as TCP does. What a transport does when follows asyncio's
transport on sockets and Linux's TCP.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import Context
from typing import Any, Protocol

WINDOW = 64 << 10
"""Bytes that a direction holds between one side's write and the other's read, unless a connection
has its own number.
"""
MAX_READ = 256 << 10
"""Bytes of one read, as in asyncio."""
_HIGH = 64 << 10
"""Bytes that wait for room from which on the protocol is paused, as in asyncio."""


class Link:
    """The way from one host to another. `latency`: seconds; `down`: nothing arrives until `up` is
    called.
    """

    def __init__(self, latency: float) -> None:
        self.latency = latency
        self.down = False
        self._waiting: list[tuple[Callable[[], object], Context]] = []

    def when_up(self, then: Callable[[], object], context: Context) -> None:
        """Call a function once the link is up."""
        self._waiting.append((then, context))

    def cut(self) -> None:
        """Let nothing arrive any more."""
        self.down = True

    def up(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver again, also what was sent meanwhile."""
        self.down = False
        waiting, self._waiting = self._waiting, []
        for then, context in waiting:
            loop.call_soon(then, context=context)


class _End:
    """What stands for a FIN or an RST among the bytes."""

    __slots__ = ("error",)

    def __init__(self, error: OSError | None = None) -> None:
        self.error = error


class Carrier(Protocol):
    """The network, as a transport sees it."""

    loop: asyncio.AbstractEventLoop

    def delivered(self, number: int, size: int) -> None:
        """So many bytes have arrived at the transport of this number."""

    def gone(self, transport: VirtualTransport) -> None:
        """A transport has closed."""


class VirtualTransport(asyncio.Transport):
    """One side of a connection. `peer` is the other one; `link` leads there; the protocol's calls
    are made in `context`.
    """

    peer: VirtualTransport

    def __init__(
        self,
        network: Carrier,
        number: int,
        link: Link,
        context: Context,
        window: int,
        names: tuple[tuple[str, int], tuple[str, int]],
    ) -> None:
        """Make one. `window`: bytes that may be on the way to the peer; `names`: the own address
        and the peer's.
        """
        super().__init__({"sockname": names[0], "peername": names[1]})
        self.number = number
        self._network = network
        self._loop = network.loop
        self._link = link
        self.context = context
        self._window = window
        self._protocol: Any = None
        # what leaves
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._high, self._low = _HIGH, _HIGH // 4
        self._writing_paused = False
        self._on_the_way = 0
        self._eof_wanted = False
        self._fin_sent = False
        self._air: deque[tuple[float, bytes | _End]] = deque()
        """What is on its way to the peer, with the time of its arrival."""
        self._landing: asyncio.TimerHandle | None = None
        # what came
        self._arrived: deque[bytes | _End] = deque()
        self._reading = True
        self._closing = False
        self._losing = False
        """Whether `connection_lost` is about to be called."""
        self._gone = False
        """Whether the socket is closed."""

    def __repr__(self) -> str:
        state = "gone" if self._gone else "closing" if self._closing else "open"
        return f"<VirtualTransport {self.number} {self.get_extra_info('sockname')} {state}>"

    # -- the protocol

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        """Begin: the protocol's `connection_made` is called now."""
        self._protocol = protocol
        protocol.connection_made(self)
        self._read_soon()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Change the protocol."""
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol."""
        found: asyncio.BaseProtocol = self._protocol
        return found

    # -- writing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes, or keep them until there is room.

        Raises:
            RuntimeError: the end was written.
        """
        if self._eof_wanted:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._gone or (self._closing and not self._unsent):
            return
        if data:
            self._unsent.append(bytes(data))
            self._unsent_bytes += len(data)
            self._send()
            if self._unsent_bytes > self._high and not self._writing_paused:
                self._writing_paused = True
                self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Send all of these."""
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        """Close for writing once all is sent."""
        if not self._closing and not self._eof_wanted:
            self._eof_wanted = True
            self._send()

    def can_write_eof(self) -> bool:
        """Return that it can be closed for writing alone."""
        return True

    def get_write_buffer_size(self) -> int:
        """Return how many bytes wait for room."""
        return self._unsent_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set from how many waiting bytes on the protocol is paused, and from how few on it goes
        on.
        """
        self._high = _HIGH if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return both limits, the lower one first."""
        return self._low, self._high

    def _send(self) -> None:
        """Send what there is room for; then the end, if it is due."""
        if (
            self._arrived
            and isinstance(last := self._arrived[-1], _End)
            and last.error is not None
            and self._unsent
        ):
            self._force_close(last.error)  # a reset that nobody has read: the write fails
            return
        while self._unsent and (room := self._window - self._on_the_way) > 0:
            piece = self._unsent.popleft()
            if len(piece) > room:
                self._unsent.appendleft(piece[room:])
                piece = piece[:room]
            self._unsent_bytes -= len(piece)
            self._on_the_way += len(piece)
            self._take_off(piece)
        if not self._unsent:
            if self._eof_wanted and not self._fin_sent:
                self._fin_sent = True
                self._take_off(_End())
            if self._closing:
                self._lose_soon(None)

    def was_read(self, size: int) -> None:
        """The peer has read so many bytes."""
        self._on_the_way -= size
        if self._unsent or self._writing_paused:
            self._loop.call_soon(self._room, context=self.context)

    def _room(self) -> None:
        """Go on: the peer has read."""
        if self._gone:
            return
        self._send()
        if self._writing_paused and self._unsent_bytes <= self._low:
            self._writing_paused = False
            if not self._closing:
                self._protocol.resume_writing()

    def _take_off(self, what: bytes | _End) -> None:
        due = self._loop.time() + self._link.latency
        if self._air:
            due = max(due, self._air[-1][0])
        self._air.append((due, what))
        if self._landing is None:
            self._landing = self._loop.call_at(due, self._land, context=self.peer.context)

    def _land(self) -> None:
        """Hand what is due to the peer."""
        self._landing = None
        if self._link.down:
            self._link.when_up(self._land, self.peer.context)
            return
        now, peer = self._loop.time(), self.peer
        while self._air and self._air[0][0] <= now + 1e-9:
            what = self._air.popleft()[1]
            self._network.delivered(self.number, len(what) if isinstance(what, bytes) else 0)
            peer.arrived(what)
        if self._air:
            self._landing = self._loop.call_at(self._air[0][0], self._land, context=peer.context)
        peer.read()

    # -- reading

    def arrived(self, what: bytes | _End) -> None:
        """Take what the peer has sent; bytes to a closed socket are answered with an RST."""
        if not self._gone:
            self._arrived.append(what)
        elif isinstance(what, bytes):
            self._take_off(_End(_reset()))

    def is_reading(self) -> bool:
        """Return whether data is passed on."""
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        """Pass nothing on for now."""
        self._reading = False

    def resume_reading(self) -> None:
        """Pass data on again."""
        if not self._closing and not self._reading:
            self._reading = True
            self._read_soon()

    def _read_soon(self) -> None:
        if self._arrived:
            self._loop.call_soon(self.read, context=self.context)

    def read(self) -> None:
        """Pass on what has come, as one read does."""
        if self._protocol is None or not self._reading or self._closing or not self._arrived:
            return
        if isinstance(first := self._arrived[0], _End):
            self._arrived.popleft()
            if first.error is not None:
                self._force_close(first.error)
                return
            if not self._guarded(self._protocol.eof_received):
                self.close()
            return
        pieces, size = [], 0
        while self._arrived and isinstance(piece := self._arrived[0], bytes) and size < MAX_READ:
            pieces.append(piece)
            size += len(piece)
            self._arrived.popleft()
        self.peer.was_read(size)
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if isinstance(self._protocol, asyncio.BufferedProtocol):
            self._guarded(self._fill, data)
        else:
            self._guarded(self._protocol.data_received, data)
        self._read_soon()

    def _fill(self, data: bytes) -> None:
        """Pass bytes on to a protocol with buffers of its own."""
        while data:
            buffer = self._protocol.get_buffer(len(data))
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            self._protocol.buffer_updated(count)
            data = data[count:]

    def _guarded(self, call: Callable[..., Any], *arguments: object) -> Any:
        """Call the protocol; an exception ends the connection, as in asyncio."""
        try:
            return call(*arguments)
        except Exception as error:
            text = f"Fatal error: protocol.{call.__name__}() call failed."
            self._loop.call_exception_handler(
                {"message": text, "exception": error, "transport": self, "protocol": self._protocol}
            )
            self._force_close(error)
            return None

    # -- ends

    def is_closing(self) -> bool:
        """Return whether it is closed or about to be."""
        return self._closing

    def close(self) -> None:
        """Close once all is sent; nothing is read any more."""
        if not self._closing:
            self._closing = True
            if not self._unsent:
                self._lose_soon(None)

    def abort(self) -> None:
        """Close at once; what waits for room is dropped."""
        self._force_close(None)

    def reset(self) -> None:
        """Close at once with an RST, as a socket with SO_LINGER and no time does."""
        if not self._gone:
            self._fin_sent = True
            self._take_off(_End(_reset()))
            self._force_close(None)

    def _force_close(self, error: Exception | None) -> None:
        self._unsent.clear()
        self._unsent_bytes = 0
        self._closing = True
        self._lose_soon(error)

    def _lose_soon(self, error: Exception | None) -> None:
        if not self._losing:
            self._losing = True
            self._loop.call_soon(self._lose, error, context=self.context)

    def _lose(self, error: Exception | None) -> None:
        """Close the socket, and tell the protocol. Bytes that nobody has read turn the FIN into an
        RST.
        """
        self._gone = True
        unread = any(isinstance(what, bytes) for what in self._arrived)
        self._arrived.clear()
        if not isinstance(error, OSError) and (unread or not self._fin_sent):
            self._take_off(_End(_reset() if unread else None))
        self._network.gone(self)
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(error)


def _reset() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
