"""Messages between a parent process and its children, over a pair of sockets, with sockets that
they give each other.

Owns the frames and their limits. Nothing here waits: who has a link watches its socket. A process
that does not read what it is sent has its link closed, rather than more and more kept for it.
"""

from __future__ import annotations

import socket
import struct
from collections import deque

import msgspec

MAX_MESSAGE = 32 << 20
"""Bytes of one message: a page of metrics of thousands of engines."""
MAX_UNSENT = 64 << 20
"""Bytes that may wait for the other process to read them."""
MAX_SOCKETS = 16
"""Sockets that may come with the bytes of one read. More are lost, and their messages are none."""
_READ = 1 << 18
_SIZE = struct.Struct(">I")


class LinkError(Exception):
    """The other process has ended, does not read, or sends what is no message."""


class EndedError(LinkError):
    """The other process has ended, or has closed its end."""


class TooLongError(Exception):
    """A message has more bytes than any may have. Nothing was sent, and the link goes on."""


class Message(msgspec.Struct, array_like=True, frozen=True):
    """A message. `number` and `worker`: what it is about, by its kind; `body`: its content.
    `has_socket`: whether it brings one (`Link.taken`).
    """

    kind: str
    number: int = 0
    worker: int = 0
    body: bytes = b""
    has_socket: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class Link:
    """One end of a pair of sockets. After an error it is closed for good."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent = bytearray()
        self._giving: deque[tuple[int, socket.socket]] = deque()
        """Sockets that are to be sent, each with the number of unsent bytes before its message."""
        self._unread = bytearray()
        self._taken: deque[socket.socket] = deque()
        """Sockets that have come, in the order of their messages."""

    def __repr__(self) -> str:
        return f"<Link {len(self._unsent)} bytes not sent>"

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 after `close`."""
        return self._socket.fileno()

    @property
    def unsent(self) -> int:
        """How many bytes wait until the socket can be written."""
        return len(self._unsent)

    def give(self, message: Message, own: socket.socket) -> None:
        """Send a message with a socket, which is closed here. Raises as `send`."""
        given = Message(message.kind, message.number, message.worker, message.body, True)
        self._giving.append((len(self._unsent), own))
        try:
            self.send(given)
        except (TooLongError, LinkError):
            if self._giving and self._giving[-1][1] is own:
                self._giving.pop()
            own.close()
            raise

    def taken(self) -> socket.socket:
        """Return the socket that a message has brought. Call it once for each such message, in
        their order.

        Raises:
            LinkError: none has come.
        """
        if not self._taken:
            raise LinkError("a message without its socket")
        return self._taken.popleft()

    def send(self, message: Message) -> None:
        """Send a message, as much of it as the socket takes now.

        Raises:
            TooLongError: the message is.
            EndedError: the other process has ended.
            LinkError: it does not read.
        """
        data = _encode(message)
        if len(data) > MAX_MESSAGE:
            raise TooLongError(f"a message {message.kind!r} of {len(data)} bytes")
        if len(self._unsent) + len(data) > MAX_UNSENT:
            raise LinkError(f"{len(self._unsent)} bytes are not read")
        self._unsent += _SIZE.pack(len(data)) + data
        self.flush()

    def flush(self) -> None:
        """Send more of what waits.

        Raises:
            EndedError: the other process has ended.
        """
        try:
            while self._unsent:
                self._sent(self._send_some())
        except BlockingIOError:
            pass
        except OSError as error:
            raise EndedError(error.strerror or "the socket is closed") from None

    def _send_some(self) -> int:
        """Send bytes up to the next message with a socket, or from it on, with the socket."""
        if not self._giving:
            return self._socket.send(self._unsent)
        before, given = self._giving[0]
        if before:
            return self._socket.send(self._unsent[:before])
        # up to the next one, which would otherwise be without its own
        end = self._giving[1][0] if len(self._giving) > 1 else len(self._unsent)
        sent = socket.send_fds(self._socket, [self._unsent[:end]], [given.fileno()])
        self._giving.popleft()
        given.close()
        return sent

    def _sent(self, count: int) -> None:
        del self._unsent[:count]
        if self._giving:
            self._giving = deque((before - count, given) for before, given in self._giving)

    def read(self) -> list[Message]:
        """Return the messages that have come.

        Raises:
            EndedError: the other process has ended.
            LinkError: it sends what is no message.
        """
        try:
            data, numbers, _, _ = socket.recv_fds(self._socket, _READ, MAX_SOCKETS)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EndedError(error.strerror or "the socket is closed") from None
        self._taken += [socket.socket(fileno=number) for number in numbers]
        if not data:
            raise EndedError("the other process has ended")
        self._unread += data
        found, at = [], 0
        while len(self._unread) - at >= _SIZE.size:
            (size,) = _SIZE.unpack_from(self._unread, at)
            if size > MAX_MESSAGE:
                raise LinkError(f"a message of {size} bytes")
            begin = at + _SIZE.size
            if len(self._unread) < begin + size:
                break
            at = begin + size
            try:
                found.append(_decode(bytes(self._unread[begin:at])))
            except msgspec.MsgspecError as error:
                raise LinkError(str(error)) from None
        del self._unread[:at]
        return found

    def close(self) -> None:
        """Close the socket, and those that nobody has got."""
        self._socket.close()
        for left in (*self._taken, *[given for _, given in self._giving]):
            left.close()
        self._taken.clear()
        self._giving.clear()


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets, which end with the processes that have them."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
