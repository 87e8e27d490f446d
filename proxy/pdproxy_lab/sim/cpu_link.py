"""The sockets of contract `cpu`: P's handshake and its pushes, and the one port on which D listens.

Real engines do the same with ZMQ and NIXL. As they do, P waits until D listens, and waits for ever
for an answer that is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from pdproxy_lab.sim.cpu import CpuConnector, FindReceiver, KvPart, SendPart
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.frame_port import BROKEN, FramePort, ask
from pdproxy_lab.sim.network import EnginePort
from pdproxy_lab.sim.request import EngineDeadError

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


class CpuLink(FramePort):
    """P's connections, and D's port. `connector` returns the running core's; `changed` is called
    when the core has work.
    """

    def __init__(
        self,
        facts: SimFacts,
        connector: Callable[[], CpuConnector],
        changed: Callable[[], None],
        port: EnginePort,
    ) -> None:
        super().__init__(port, "CPU link")
        self._facts, self._connector, self._changed = facts, connector, changed
        self._engine_id = ""

    async def open(self, engine_id: str) -> None:
        """Listen, if the engine is a D with this connector; on the same port as before if it has
        listened.

        Raises:
            OSError: the port is taken.
        """
        if self._facts.connector == "cpu" and self._facts.role == "decode":
            self._engine_id = engine_id
            await self.listen(self._facts.cpu.cpu_host, self._facts.cpu.cpu_port)

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
            with contextlib.suppress(*BROKEN):
                return await self._asked(_Question())
            await asyncio.sleep(_PAUSE)

    async def _send(self, command: SendPart) -> bool:
        """Return whether the engine of the handshake has taken a part. It may take any time."""
        try:
            return (
                await self._asked(_Question(command.engine_id, command.part)) == command.engine_id
            )
        except BROKEN:
            return False

    async def _asked(self, question: _Question) -> str:
        cpu = self._facts.cpu
        return _decode_reply(await ask(cpu.cpu_host, cpu.cpu_port, question)).engine_id

    async def answer(self, question: bytes) -> _Reply:
        """See `FramePort`."""
        asked = _decode_question(question)
        if asked.part is not None and asked.engine_id == self._engine_id:
            taken = asyncio.Event()
            self._connector().offer(asked.part, taken.set)
            self._changed()
            await taken.wait()
        return _Reply(self._engine_id)
