"""Messages between simulated engines: msgpack in frames with a length, over TCP, and the port at
which an engine answers those of others.

Real engines do the same with ZMQ.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod

import msgspec

from pdproxy.kit.tasks import TaskOwner
from pdproxy_lab.sim.network import EnginePort
from pdproxy_lab.sim.request import EngineDeadError

_MAX_FRAME = 1 << 28
_HEADER = 4
_encode = msgspec.msgpack.Encoder().encode


class LinkError(Exception):
    """The other engine is down, is another one now, or sends invalid data."""


BROKEN = (OSError, EOFError, OverflowError, LinkError, msgspec.MsgspecError)
"""What a question to another engine may raise."""


async def receive_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next frame.

    Raises:
        EOFError, OSError, LinkError: there is none, or it is too long.
    """
    length = int.from_bytes(await reader.readexactly(_HEADER), "big")
    if length > _MAX_FRAME:
        raise LinkError(f"a frame of {length} bytes")
    return await reader.readexactly(length)


def send_frame(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    """Write a message in a frame."""
    data = _encode(message)
    writer.write(len(data).to_bytes(_HEADER, "big") + data)


async def ask(host: str, port: int, question: msgspec.Struct) -> bytes:
    """Ask another engine, and return the frame of its answer. Raises one of `BROKEN`."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        send_frame(writer, question)
        return await receive_frame(reader)
    finally:
        writer.close()


class FramePort(ABC):
    """A port with one question in each connection. `name`: of the tasks that answer."""

    def __init__(self, reserved: EnginePort, name: str) -> None:
        self._reserved, self._name = reserved, name
        self._server: asyncio.AbstractServer | None = None
        self._answering = TaskOwner(name)
        self._awake = asyncio.Event()
        self._awake.set()

    @property
    def port(self) -> int:
        """The port on which it listens, 0 if it never has."""
        return self._reserved.number

    @abstractmethod
    async def answer(self, question: bytes) -> msgspec.Struct:
        """Return the answer to a question. Raises one of `BROKEN`, or EngineDeadError: there is
        none, and the connection closes.
        """

    async def listen(self, host: str, port: int) -> None:
        """Listen, on the same port as before if it has listened.

        Raises:
            OSError: the port is taken.
        """
        self._server = await self._reserved.listen(self._accepted, host, port)

    async def close(self) -> None:
        """Stop listening and drop what is being answered. The port stays reserved."""
        if self._server is not None:
            self._server.close()
        self._server = None
        await self._answering.settle(0)

    def release(self) -> None:
        """Release the port, after `close`."""
        self._reserved.release()

    def freeze(self) -> None:
        """Accept connections and questions, answer none."""
        self._awake.clear()

    def thaw(self) -> None:
        """Answer again, also what was asked while frozen."""
        self._awake.set()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._answering.spawn(self._converse(reader, writer), self._name)
        # Not in the task itself: a task that is cancelled before its first step does not run at
        # all.
        task.add_done_callback(lambda _: writer.close())

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(*BROKEN, EngineDeadError):
            question = await receive_frame(reader)
            await self._awake.wait()
            send_frame(writer, await self.answer(question))
            await writer.drain()
