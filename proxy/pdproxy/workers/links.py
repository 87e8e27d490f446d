"""Messages between a parent process and its children, over a pair of sockets.

Owns the frames and their limits. Nothing here waits: who has a link watches its socket. A process
that does not read what it is sent has its link closed, rather than more and more kept for it.
"""

from __future__ import annotations

import socket
import struct

import msgspec

MAX_MESSAGE = 32 << 20
"""Bytes of one message: a page of metrics of thousands of engines."""
MAX_UNSENT = 64 << 20
"""Bytes that may wait for the other process to read them."""
_READ = 1 << 18
_SIZE = struct.Struct(">I")


class LinkError(Exception):
    """The other process has ended, does not read, or sends what is no message."""


class EndedError(LinkError):
    """The other process has ended, or has closed its end."""


class TooLongError(Exception):
    """A message has more bytes than any may have. Nothing was sent, and the link goes on."""


class Message(msgspec.Struct, array_like=True, frozen=True):
    """A message. `number` and `worker`: what it is about, by its kind; `body`: its content."""

    kind: str
    number: int = 0
    worker: int = 0
    body: bytes = b""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class Link:
    """One end of a pair of sockets. After an error it is closed for good."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent = bytearray()
        self._unread = bytearray()

    def __repr__(self) -> str:
        return f"<Link {len(self._unsent)} bytes not sent>"

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 after `close`."""
        return self._socket.fileno()

    @property
    def unsent(self) -> int:
        """How many bytes wait until the socket can be written."""
        return len(self._unsent)

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
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise EndedError(error.strerror or "the socket is closed") from None

    def read(self) -> list[Message]:
        """Return the messages that have come.

        Raises:
            EndedError: the other process has ended.
            LinkError: it sends what is no message.
        """
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EndedError(error.strerror or "the socket is closed") from None
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
        """Close the socket."""
        self._socket.close()


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets, which end with the processes that have them."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
