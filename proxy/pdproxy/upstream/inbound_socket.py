"""A ZMQ socket to which engines send messages: it is bound here, or connects to an engine that publishes.

Owns the socket, and the ZMQ context of one that is bound. Anybody who reaches the port can send: ZMQ itself limits the size of
messages, and their number by its high-water mark. A burst is read in portions, so that streams flow in between.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import zmq

logger = logging.getLogger("pdproxy.kv")

AT_ONCE = 64
"""Messages read in one turn of the event loop: about a millisecond."""
RETRY = 1.0
"""Seconds until a socket that failed is read again."""
AT_ONCE_BYTES = 1 << 20
"""Bytes read in one turn, which take some milliseconds: long messages cost by their bytes."""


class InboundSocket(ABC):
    """Reads messages and passes each to `_take`.

    Failures are reported to `failed`, and reading continues: at once after a message that could not be handled, after `RETRY`
    seconds if the socket itself failed.

    A subclass sets: `kind`, the ZMQ type of the socket; `name`, what it is for, for log lines; `max_bytes` of a message; and
    `high_water`, how many messages ZMQ keeps of each sender while the event loop is busy.
    """

    kind: int
    name: str
    max_bytes: int
    high_water: int

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._failing = False
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.address: str | None = None
        """The address, None while the socket is neither bound nor connected."""
        self._paused = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address or 'not bound'}>"

    @abstractmethod
    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        """Handle a message."""

    def _prepare(self, socket: zmq.Socket[bytes]) -> None:
        """Set more options, before the socket is bound or connects."""
        return

    def _wanted(self) -> bool:
        """Return whether more messages can be taken now. If not, ZMQ keeps them, and `resume` has to be called later."""
        return True

    def bind(self, host: str, port: int) -> None:
        """Bind and begin to listen in the running event loop. Port 0 is any free one.

        Raises:
            OSError: the address can't be bound.
        """
        self._context = zmq.Context()
        socket = self._made(self._context, ipv6=":" in host)
        place = f"[{host}]" if ":" in host else host
        try:
            socket.bind(f"tcp://{place}:{port or '*'}")
        except zmq.ZMQError as error:
            socket.close()
            self._context.destroy(linger=0)
            self._context = None
            raise OSError(error.errno, error.strerror) from None
        self._begin(socket, socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def connect(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        """Connect in the running event loop, and again whenever the connection is lost. `context` stays the caller's.

        Raises:
            OSError: ZMQ can't use the address.
        """
        socket = self._made(context, ipv6="[" in address)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close()
            raise OSError(error.errno, error.strerror) from None
        self._begin(socket, address)

    def _made(self, context: zmq.Context[zmq.Socket[bytes]], *, ipv6: bool) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = context.socket(self.kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, self.high_water)
        socket.setsockopt(zmq.MAXMSGSIZE, self.max_bytes)
        if ipv6:
            socket.setsockopt(zmq.IPV6, 1)
        self._prepare(socket)
        return socket

    def _begin(self, socket: zmq.Socket[bytes], address: str) -> None:
        self._socket, self.address, self._paused = socket, address, False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket.fileno(), self._readable)
        self._loop.call_soon(self._readable)  # the descriptor reports only changes

    def close(self) -> None:
        """Stop listening. Closing what is neither bound nor connected changes nothing."""
        if self._socket is None or self._loop is None:
            return
        if not self._paused:
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        if self._context is not None:
            self._context.destroy(linger=0)
        self._socket = self._context = self.address = None

    def resume(self) -> None:
        """Go on after more was not wanted."""
        if self._paused and self._socket is not None and self._loop is not None:
            self._paused = False
            self._loop.add_reader(self._socket.fileno(), self._readable)
            self._loop.call_soon(self._readable)

    def _readable(self) -> None:
        if self._socket is None or self._loop is None or self._paused:
            return
        read = 0
        for _ in range(AT_ONCE):
            if read >= AT_ONCE_BYTES:
                break
            if not self._wanted():
                self._paused = True
                self._loop.remove_reader(self._socket.fileno())  # it would report the same messages at each turn
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                if not self._failing:
                    logger.error("the socket for %s failed: %s", self.name, error.strerror)  # noqa: TRY400 - complete as it is
                self._failing = True
                self._failed(error)
                self._loop.call_later(RETRY, self._readable)
                return
            self._failing = False
            read += sum(map(len, frames))
            try:
                self._take(frames)
            except Exception as error:  # a defect here must not lose the messages behind this one
                self._failed(error)
        self._loop.call_soon(self._readable)
