"""Smaller replacements for two objects that uvicorn makes for each connection: thousands of streams
are open at once.

An `asyncio.Event` and a deque take more than 600 bytes each, and few connections ever use either. A
test compares the names of both classes with those of uvicorn.
"""

from __future__ import annotations

import asyncio

LARGE_READ = 128 << 10
"""Bytes. uvloop reads a socket that is always full 32 times in a row, 8 MB, and does so for each
client that sends that fast.
"""


class LeanFlowControl:
    """uvicorn's `FlowControl`: whether reading and writing are paused."""

    __slots__ = ("_resumed", "_transport", "read_paused", "write_paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.read_paused = False
        self.write_paused = False
        self._resumed: asyncio.Event | None = None

    async def drain(self) -> None:
        """Wait until the client reads again."""
        if self.write_paused:
            if self._resumed is None:
                self._resumed = asyncio.Event()
            await self._resumed.wait()

    def pause_reading(self) -> None:
        """Stop reading."""
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Continue to read."""
        if self.read_paused:
            self.read_paused = False
            self._transport.resume_reading()

    def received(self, size: int) -> None:
        """After a large read, stop reading for one turn of the loop: other connections come
        first.
        """
        if size >= LARGE_READ and not self.read_paused and not self._transport.is_closing():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._continue)

    def _continue(self) -> None:
        if not self.read_paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        self.write_paused = True

    def resume_writing(self) -> None:
        """The client has read, or left."""
        self.write_paused = False
        if self._resumed is not None:
            self._resumed.set()
            self._resumed = None


class LeanPipeline(list[object]):
    """The requests that wait on a connection, the newest first, as in uvicorn's deque: few, and
    mostly none.
    """

    __slots__ = ()

    def appendleft(self, item: object) -> None:
        """Add the newest."""
        self.insert(0, item)

    def popleft(self) -> object:
        """Take the newest."""
        return self.pop(0)
