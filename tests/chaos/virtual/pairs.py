"""Pairs of sockets between workers, in the memory of a virtual loop. What one end sends arrives in
order, a moment later.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

DELAYS = (0.0, 0.0, 0.00005, 0.0005, 0.004)
"""Seconds that a message is on its way, as chance chooses: the other process is busy."""
_FIRST = 1 << 20
"""Descriptors from here on are no file's."""


class VirtualEnd:
    """One end of a pair: as much of a `socket.socket` as links use. Whatever is sent has space."""

    peer: VirtualEnd

    def __init__(self, loop: asyncio.AbstractEventLoop, number: int, chance: random.Random) -> None:
        self._loop = loop
        self._number = number
        self._chance = chance
        self._coming: deque[bytes] = deque()
        """What the peer has sent, and has not arrived; b"": its end."""
        self._last = 0.0
        """When the last of it arrives."""
        self._arrived = bytearray()
        self._has_ended = self._is_closed = False
        self._reader: Callable[[], object] | None = None
        self._context: Context = copy_context()
        self._is_called = False

    def setblocking(self, flag: bool) -> None:
        """Do nothing: an end never blocks."""

    def fileno(self) -> int:
        """Return its number, -1 once it is closed."""
        return -1 if self._is_closed else self._number

    def send(self, data: bytes) -> int:
        """Send all of it.

        Raises:
            BrokenPipeError: the other end is closed.
        """
        if self._is_closed or self.peer._is_closed:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        self.peer._come(bytes(data))
        return len(data)

    def recv(self, most: int) -> bytes:
        """Return what has arrived, b"" behind its end.

        Raises:
            BlockingIOError: nothing has.
        """
        if self._is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if not self._arrived and not self._has_ended:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        data = bytes(self._arrived[:most])
        del self._arrived[:most]
        self._call()
        return data

    def close(self) -> None:
        """Close it."""
        if not self._is_closed:
            self._is_closed, self._reader = True, None
            self.peer._come(b"")

    def watch(self, reader: Callable[[], object] | None) -> None:
        """Have this called whenever something can be read; None: nothing."""
        self._reader, self._context = reader, copy_context()
        self._call()

    def _come(self, data: bytes) -> None:
        self._last = max(self._last, self._loop.time() + self._chance.choice(DELAYS))
        self._coming.append(data)
        self._loop.call_at(self._last, self._arrive)

    def _arrive(self) -> None:
        data = self._coming.popleft()
        self._arrived += data
        self._has_ended = self._has_ended or not data
        self._call()

    def _call(self) -> None:
        """Call the reader in another turn, if there is something for it."""
        if self._reader is not None and not self._is_called and (self._arrived or self._has_ended):
            self._is_called = True
            self._loop.call_soon(self._read, context=self._context)

    def _read(self) -> None:
        self._is_called = False
        if self._reader is not None and (self._arrived or self._has_ended):
            self._reader()


class VirtualPairs:
    """Makes them. `ends`: those of the loop, by number."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ends: dict[int, VirtualEnd],
        chance: random.Random,
    ) -> None:
        self._loop, self._ends, self._chance = loop, ends, chance

    def pair(self) -> Any:
        """Return two connected ends."""
        made = [self._end(), self._end()]
        made[0].peer, made[1].peer = made[1], made[0]
        return tuple(made)

    def _end(self) -> VirtualEnd:
        number = _FIRST + len(self._ends)
        made = self._ends[number] = VirtualEnd(self._loop, number, self._chance)
        return made
