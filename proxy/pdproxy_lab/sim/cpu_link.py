"""The sockets of contract `cpu`: P's handshake and its pushes, and the one port on which D listens.

Real engines do the same with ZMQ and NIXL. As they do, P waits until D listens, and waits for ever
for an answer that is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from pdproxy.kit.tasks import TaskOwner
from pdproxy_lab.sim.cpu import CpuConnector, FindReceiver, KvPart, SendPart
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.network import EnginePort
from pdproxy_lab.sim.request import EngineDeadError
from pdproxy_lab.sim.side_channel import SideChannelError, receive_frame, send_frame

_PAUSE = 0.05
"""Seconds between attempts to connect."""


class _Question(msgspec.Struct, omit_defaults=True):
    engine_id: str = ""
    """The engine whose memory is to be written. Empty: the question is for its id."""
    part: KvPart | None = None


class _Reply(msgspec.Struct, omit_defaults=True):
    engine_id: str


_decode_question = msgspec.msgpack.Decoder(_Question).decode
_decode_reply = msgspec.msgpack.Decoder(_Reply).decode


async def _ask(host: str, port: int, question: _Question) -> str:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        send_frame(writer, question)
        return _decode_reply(await receive_frame(reader)).engine_id
    finally:
        writer.close()


class CpuLink:
    """P's connections, and D's `port`. `connector` returns the running core's; `changed` is called
    when the core has work.
    """

    def __init__(
        self,
        facts: SimFacts,
        connector: Callable[[], CpuConnector],
        changed: Callable[[], None],
        port: EnginePort,
    ) -> None:
        self._facts, self._connector, self._changed = facts, connector, changed
        self._reserved = port
        self._server: asyncio.AbstractServer | None = None
        self._answering = TaskOwner("CPU link")
        self._awake = asyncio.Event()
        self._awake.set()
        self._engine_id = ""
        self.port = 0
        """The port on which it listens, 0 before it does."""

    async def open(self, engine_id: str) -> None:
        """Listen, if the engine is a D with this connector; on the same port as before if it has
        listened.

        Raises:
            OSError: the port is taken.
        """
        if self._facts.connector != "cpu" or self._facts.role != "decode":
            return
        self._engine_id = engine_id
        self._server = await self._reserved.listen(
            self._accepted, self._facts.cpu.cpu_host, self._facts.cpu.cpu_port
        )
        self.port = self._reserved.number

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

    async def perform(self, command: FindReceiver | SendPart) -> None:
        """Carry out a command of P's connector. The core may die meanwhile."""
        with contextlib.suppress(EngineDeadError):
            match command:
                case FindReceiver():
                    self._connector().found(await self._find())
                case SendPart():
                    await asyncio.sleep(
                        self._facts.hardware.transfer_s(command.part.stop - command.part.start)
                    )
                    self._connector().sent(command.part, whole=await self._send(command))

    async def _find(self) -> str:
        """Return the id of the engine that listens at the configured address, once there is one."""
        while True:
            with contextlib.suppress(
                OSError, EOFError, OverflowError, SideChannelError, msgspec.MsgspecError
            ):
                return await self._asked(_Question())
            await asyncio.sleep(_PAUSE)

    async def _send(self, command: SendPart) -> bool:
        """Return whether the engine of the handshake has taken a part. It may take any time."""
        try:
            return (
                await self._asked(_Question(command.engine_id, command.part)) == command.engine_id
            )
        except (OSError, EOFError, OverflowError, SideChannelError, msgspec.MsgspecError):
            return False

    async def _asked(self, question: _Question) -> str:
        return await _ask(self._facts.cpu.cpu_host, self._facts.cpu.cpu_port, question)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._answering.spawn(self._answer(reader, writer), "CPU link")
        task.add_done_callback(lambda _: writer.close())

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            OSError, EOFError, msgspec.MsgspecError, SideChannelError, EngineDeadError
        ):
            question = _decode_question(await receive_frame(reader))
            await self._awake.wait()
            if question.part is not None and question.engine_id == self._engine_id:
                taken = asyncio.Event()
                self._connector().offer(question.part, taken.set)
                self._changed()
                await taken.wait()
            send_frame(writer, _Reply(self._engine_id))
            await writer.drain()
