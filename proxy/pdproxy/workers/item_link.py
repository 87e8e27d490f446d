"""One end of a pair of sockets between a worker and the scheduler process. Both send items.

Owns the frames, and what is not sent yet. What is said within one turn of the event loop is one
message: a list of items. Each item is encoded by itself: one that can't be encoded keeps back no
other one. These links carry no sockets and have one kind of message: for each request they cost
less than a `links.Link`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from pdproxy.workers.links import MAX_MESSAGE, EndedError, LinkError, TooLongError

MAX_ITEM = MAX_MESSAGE // 2
"""Bytes of one item. A message has at most so many, and the items of `AT_ONCE`."""
AT_ONCE = 1 << 18
"""Bytes behind which items are sent before the turn of the event loop ends."""
_READ = 1 << 18
_SIZE = 4
"""Bytes in front of each message: how many bytes it has."""
_LIST = b"\xdd"
"""How msgpack names a list whose length has four bytes, which follow."""
_HEAD = struct.Struct(">IcI")
"""In front of the items of a message: its bytes behind these first four, and how long a list."""
_LIST_HEAD = _HEAD.size - _SIZE

Item = TypeVar("Item")


class ItemLink(Generic[Item]):
    """One end. Lives in the running event loop.

    `decode`: returns the items of a message; raises msgspec.MsgspecError. `received`: takes them.
    `lost`: called, once or more often, when the other process has ended, sends what is no message,
    or does not read: more than `most` bytes wait for it.
    """

    def __init__(
        self,
        end: socket.socket,
        decode: Callable[[bytes], list[Item]],
        received: Callable[[list[Item]], None],
        lost: Callable[[LinkError], None],
        most: int,
    ) -> None:
        end.setblocking(False)
        self._socket = end
        self._decode, self._received, self._lost, self._most = decode, received, lost, most
        self._loop = asyncio.get_running_loop()
        self._items: list[bytes] = []
        """What is sent at the end of this turn."""
        self._size = 0
        """Their bytes."""
        self._is_reading = self._is_paused = False
        self._unsent = bytearray()
        self._unread = bytearray()
        self.resume()

    def __repr__(self) -> str:
        return f"<ItemLink {len(self._unsent)} bytes not sent>"

    @property
    def unsent(self) -> int:
        """How many bytes wait until the other process reads."""
        return len(self._unsent)

    def pause(self) -> None:
        """Take no more items until `resume`."""
        self._is_paused = True
        self._loop.remove_reader(self._socket.fileno())

    def resume(self) -> None:
        """Take items."""
        self._is_paused = False
        self._loop.add_reader(self._socket.fileno(), self.read)

    def close(self) -> None:
        """Close the socket. What is not sent is dropped, and nothing more may be said."""
        self._items, self._unsent = [], bytearray()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()

    def say(self, item: bytes) -> None:
        """Send an item, in the order of these calls. `item`: as msgpack.

        Raises:
            TooLongError: it has more than `MAX_ITEM` bytes.
        """
        if not self._items and not self._is_reading:
            self._loop.call_soon(self.flush)
        self._items.append(item)
        self._size += len(item)
        if self._size > AT_ONCE:
            if len(item) > MAX_ITEM:
                self._size -= len(self._items.pop())
                raise TooLongError(f"an item of {len(item)} bytes")
            self.flush()

    def flush(self) -> None:
        """Send at once what was said."""
        if not self._items:
            return
        items, size = self._items, self._size
        self._items, self._size = [], 0
        data = _HEAD.pack(_LIST_HEAD + size, _LIST, len(items)) + b"".join(items)
        if self._unsent:
            self._unsent += data
            if len(self._unsent) > self._most:
                self._lost(LinkError(f"{len(self._unsent)} bytes are not read"))
            return
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # it has ended: what it has sent before is read first, and then its end
        if sent < len(data):
            self._unsent += data[sent:]
            self._loop.add_writer(self._socket.fileno(), self._write)

    def _write(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._unsent)  # as in `flush`
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._socket.fileno())

    def look(self) -> None:
        """Take what has come, or notice the end. To be called from time to time: libuv does not
        watch a socket any longer once it has an error. A process has one that has ended before it
        had read everything, and what it has sent last is read before the error.
        """
        if not self._is_paused:
            self.read()

    def read(self) -> None:
        """Take what has come."""
        try:
            data = self._socket.recv(_READ)
            if not data:
                raise EndedError("the other process has ended")
            if not self._unread and len(data) == _SIZE + int.from_bytes(data[:_SIZE], "big"):
                items = self._decode(data[_SIZE:])  # one message, as nearly always
            else:
                items = self._joined(data)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(_ended(error))
            return
        except LinkError as error:
            self._lost(error)
            return
        except msgspec.MsgspecError as error:
            self._lost(LinkError(str(error)))
            return
        self._is_reading = True  # what is said meanwhile is sent right behind it
        try:
            self._received(items)
        finally:
            self._is_reading = False
        self.flush()

    def _joined(self, data: bytes) -> list[Item]:
        """Return the items of all messages that are whole now."""
        unread, items, at = self._unread, list[Item](), 0
        unread += data
        while len(unread) - at >= _SIZE:
            begin = at + _SIZE
            size = int.from_bytes(unread[at:begin], "big")
            if size > MAX_MESSAGE:
                raise LinkError(f"a message of {size} bytes")
            if len(unread) < begin + size:
                break
            at = begin + size
            items += self._decode(bytes(unread[begin:at]))
        del unread[:at]
        return items


def _ended(error: OSError) -> EndedError:
    return EndedError(error.strerror or "the socket is closed")
