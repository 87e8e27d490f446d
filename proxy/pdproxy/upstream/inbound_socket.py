"""A ZMQ socket to which engines send messages: it is bound here, or connects to an engine that
publishes.

Owns the socket, and the ZMQ context of one that is bound. Anybody who reaches the port can send:
ZMQ itself limits the size of a message's parts, and the number of messages by its high-water mark;
it does not limit the number of parts. A burst is read in portions, so that streams flow in between.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket as sockets
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

    Failures are reported to `failed`, and reading continues: at once after a message that could not
    be handled, after `RETRY` seconds if the socket itself failed.

    A subclass sets: `kind`, the ZMQ type of the socket; `name`, what it is for, for log lines;
    `max_bytes` of a message; and `high_water`, how many messages ZMQ keeps of each sender while the
    event loop is busy.
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
        self._next: asyncio.Handle | None = None
        """The next reading, if it needs no wake-up. There is one at most: else each wake-up would
        add one for as long as messages come, and all of them would read in each turn of the event
        loop.
        """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address or 'not bound'}>"

    @abstractmethod
    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        """Handle a message."""

    def _prepare(self, socket: zmq.Socket[bytes]) -> None:
        """Set more options, before the socket is bound or connects."""
        return

    def _wanted(self) -> bool:
        """Return whether more messages can be taken now. If not, ZMQ keeps them, and `resume` has
        to be called later.
        """
        return True

    def bind(self, host: str, port: int, listener: sockets.socket | None = None) -> None:
        """Bind and begin to listen in the running event loop. Port 0 is any free one.

        `listener`: a socket that listens there already, without blocking. It stays the caller's.

        Raises:
            OSError: the address can't be bound.
        """
        self._context = zmq.Context()
        place = f"[{host}]" if ":" in host else host
        try:
            address = f"tcp://{place}:{port or '*'}"
            socket = self._opened(
                self._context, address, ipv6=":" in host, binds=True, listener=listener
            )
        except OSError:
            self._context.destroy(linger=0)
            self._context = None
            raise
        self._begin(socket, socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def connect(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        """Connect in the running event loop, and again whenever the connection is lost. `context`
        stays the caller's.

        Raises:
            OSError: ZMQ can't use the address, or there can be no more sockets.
        """
        self._begin(self._opened(context, address, ipv6="[" in address, binds=False), address)

    def _opened(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        ipv6: bool,
        binds: bool,
        listener: sockets.socket | None = None,
    ) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] | None = None
        try:
            socket = context.socket(self.kind)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, self.high_water)
            socket.setsockopt(zmq.MAXMSGSIZE, self.max_bytes)
            if ipv6:
                socket.setsockopt(zmq.IPV6, 1)
            self._prepare(socket)
            if listener is not None:
                socket.setsockopt(zmq.USE_FD, os.dup(listener.fileno()))  # ZMQ closes it
            (socket.bind if binds else socket.connect)(address)
        except zmq.ZMQError as error:
            if socket is not None:
                socket.close()
            raise OSError(error.errno, error.strerror) from None
        return socket

    def _begin(self, socket: zmq.Socket[bytes], address: str) -> None:
        self._socket, self.address, self._paused = socket, address, False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket.fileno(), self._readable)
        self._go_on()  # the descriptor reports only changes

    def close(self) -> None:
        """Stop listening. Closing what is neither bound nor connected changes nothing."""
        if self._socket is None or self._loop is None:
            return
        if not self._paused:
            self._loop.remove_reader(self._socket.fileno())
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._socket.close()
        if self._context is not None:
            self._context.destroy(linger=0)
        self._socket = self._context = self.address = None

    def resume(self) -> None:
        """Go on after more was not wanted, or after a failure."""
        if self._paused and self._socket is not None and self._loop is not None:
            self._paused = False
            self._loop.add_reader(self._socket.fileno(), self._readable)
            self._go_on()

    def _pause(self) -> None:
        assert self._loop is not None
        assert self._socket is not None
        self._paused = True
        # it would report the same messages at each turn
        self._loop.remove_reader(self._socket.fileno())

    def _go_on(self) -> None:
        assert self._loop is not None
        if self._next is None:
            self._next = self._loop.call_soon(self._read)

    def _readable(self) -> None:
        if self._next is None:
            self._read()

    def _read(self) -> None:
        self._next = None
        if self._socket is None or self._loop is None or self._paused:
            return
        read = 0
        for _ in range(AT_ONCE):
            if read >= AT_ONCE_BYTES:
                break
            if not self._wanted():
                self._pause()
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
                self._pause()
                self._loop.call_later(RETRY, self.resume)
                return
            self._failing = False
            read += sum(map(len, frames))
            try:
                self._take(frames)
            except Exception as error:  # a defect here must not lose the messages behind this one
                self._failed(error)
        self._go_on()
