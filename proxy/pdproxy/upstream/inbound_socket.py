"""A ZMQ socket that is bound here and to which engines send messages.

Owns the socket and its ZMQ context. Anybody who reaches the port can send: ZMQ itself limits the size of messages, and their
number by its high-water mark. A burst is read in portions, so that streams flow in between.
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
        """The address, None while the socket is not bound."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address or 'not bound'}>"

    @abstractmethod
    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        """Handle a message."""

    def _prepare(self, socket: zmq.Socket[bytes]) -> None:
        """Set more options, before the socket is bound."""
        return

    def bind(self, host: str, port: int) -> None:
        """Bind and begin to listen in the running event loop. Port 0 is any free one.

        Raises:
            OSError: the address can't be bound.
        """
        self._context = zmq.Context()
        socket: zmq.Socket[bytes] = self._context.socket(self.kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, self.high_water)
        socket.setsockopt(zmq.MAXMSGSIZE, self.max_bytes)
        self._prepare(socket)
        if ":" in host:
            socket.setsockopt(zmq.IPV6, 1)
        place = f"[{host}]" if ":" in host else host
        try:
            socket.bind(f"tcp://{place}:{port or '*'}")
        except zmq.ZMQError as error:
            socket.close()
            self._context.destroy(linger=0)
            self._context = None
            raise OSError(error.errno, error.strerror) from None
        self._socket = socket
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket.fileno(), self._readable)
        self._loop.call_soon(self._readable)  # the descriptor reports only changes

    def close(self) -> None:
        """Stop listening. Closing what is not bound changes nothing."""
        if self._socket is None or self._loop is None or self._context is None:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._context.destroy(linger=0)
        self._socket = self._context = self.address = None

    def _readable(self) -> None:
        if self._socket is None or self._loop is None:
            return
        read = 0
        for _ in range(AT_ONCE):
            if read >= AT_ONCE_BYTES:
                break
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
