"""The sockets of LMCache's prefill-decode transfer: handshakes, space for chunks, and their KV.

Owns D's listening sockets, two per rank, and P's short connections. Real engines do the same with
ZMQ and RDMA. As they do, P waits until D listens, and waits forever for an answer that is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NoReturn

import msgspec

from pdproxy.engine_model.hardware import Hardware
from pdproxy.kit.tasks import TaskOwner
from pdproxy_lab.sim.frame_port import BROKEN, LinkError, ask, receive_frame, send_frame
from pdproxy_lab.sim.lmcache_pd import (
    Cancel,
    LMCachePD,
    Offer,
    ReceiverHandshake,
    ReceivingRank,
    Write,
)
from pdproxy_lab.sim.memory import Page
from pdproxy_lab.sim.pd_buffer import Allocation, ChunkBatch
from pdproxy_lab.sim.reserved_port import ReservedPort

_PAUSE = 0.05
"""Seconds between attempts to connect."""


class _Question(msgspec.Struct, omit_defaults=True):
    kind: Literal["handshake", "offer", "write", "cancel"]
    engine_id: str = ""
    """The engine whose memory is to be written."""
    batch: ChunkBatch | None = None
    request: str = ""
    keys: tuple[str, ...] = ()
    pages: tuple[tuple[Page, ...], ...] = ()


class _Reply(msgspec.Struct, omit_defaults=True):
    engine_id: str
    allocation: Allocation | None = None


_decode_question = msgspec.msgpack.Decoder(_Question).decode
_decode_reply = msgspec.msgpack.Decoder(_Reply).decode


class Sending:
    """P's side."""

    def __init__(self) -> None:
        self._locks: dict[tuple[str, int], asyncio.Lock] = {}

    async def perform(
        self,
        connector: LMCachePD,
        command: ReceiverHandshake | Offer | Write | Cancel,
        hardware: Hardware,
    ) -> None:
        """Carry out a command, and report its result to the connector."""
        match command:
            case ReceiverHandshake():
                connector.receiver_found(command.receiver, await self.handshake(command.receiver))
            case Offer():
                connector.offered(command, await self.offer(command.receiver, command.batch))
            case Write():
                await asyncio.sleep(hardware.transfer_s(command.tokens))
                connector.written(command, whole=await self.write(command))
            case Cancel():
                await self.cancel(command)

    async def handshake(self, receiver: ReceivingRank) -> str:
        """Return the id of the engine at a receiver's init port, once there is one."""
        return (
            await _ask_until_connected(receiver.host, receiver.init_port, _Question("handshake"))
        ).engine_id

    async def offer(self, receiver: ReceivingRank, batch: ChunkBatch) -> Allocation:
        """Return the allocation of a batch, once there is one. P asks each receiver one question at
        a time.
        """
        async with self._locks.setdefault((receiver.host, receiver.alloc_port), asyncio.Lock()):
            question = _Question("offer", batch=msgspec.structs.replace(batch, pages=()))
            reply = await _ask_until_connected(receiver.host, receiver.alloc_port, question)
            if reply.allocation is None:
                await _wait_forever()
            return reply.allocation

    async def write(self, write: Write) -> bool:
        """Return whether the engine of the handshake has the chunks now."""
        question = _Question("write", engine_id=write.engine_id, keys=write.keys, pages=write.pages)
        try:
            found = await ask(write.receiver.host, write.receiver.alloc_port, question)
            reply = _decode_reply(found)
        except BROKEN:
            return False
        return reply.engine_id == write.engine_id

    async def cancel(self, cancel: Cancel) -> None:
        """Cancel the push of chunks."""
        question = _Question("cancel", request=cancel.request, keys=cancel.keys)
        with contextlib.suppress(*BROKEN):
            await ask(cancel.receiver.host, cancel.receiver.alloc_port, question)


async def _wait_forever() -> NoReturn:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def _ask_until_connected(host: str, port: int, question: _Question) -> _Reply:
    """Try to connect until it succeeds; then ask once. Wait forever if the answer is lost."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except (OSError, OverflowError):
            await asyncio.sleep(_PAUSE)
            continue
        try:
            send_frame(writer, question)
            return _decode_reply(await receive_frame(reader))
        except (OSError, EOFError, LinkError, msgspec.MsgspecError):
            await _wait_forever()
        finally:
            writer.close()


class Receiving:
    """D's side: two ports per rank. `connector` returns the running core's; `changed` is called
    when the core has work.
    """

    def __init__(self, connector: Callable[[], LMCachePD], changed: Callable[[], None]) -> None:
        self._connector, self._changed = connector, changed
        self._servers: list[asyncio.Server] = []
        self._reserved: list[ReservedPort] = []
        self._answering = TaskOwner("PD link")
        self._awake = asyncio.Event()
        self._awake.set()
        self._engine_id = ""
        self.init_ports: list[int] = []
        self.alloc_ports: list[int] = []

    async def open(
        self, engine_id: str, host: str, ranks: int, init_port: int, alloc_port: int
    ) -> None:
        """Listen on `ranks` ports from each of the two upwards; on the same ports as before if it
        has listened.

        Raises:
            OSError: one of them is taken.
        """
        self._engine_id = engine_id
        wanted = [
            port + rank if port else 0 for port in (init_port, alloc_port) for rank in range(ranks)
        ]
        self._reserved = self._reserved or [ReservedPort() for _ in wanted]
        for place, port in enumerate(wanted):
            accepted = partial(self._accepted, place % ranks, place >= ranks)
            self._servers.append(await self._reserved[place].listen(accepted, host, port))
        ports = [reserved.number for reserved in self._reserved]
        self.init_ports, self.alloc_ports = ports[:ranks], ports[ranks:]

    async def close(self) -> None:
        """Stop listening and drop what is being answered. The ports stay reserved."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        await self._answering.settle(0)

    def release(self) -> None:
        """Release the ports, after `close`."""
        for reserved in self._reserved:
            reserved.release()

    def freeze(self) -> None:
        """Accept connections and questions, answer none."""
        self._awake.clear()

    def thaw(self) -> None:
        """Answer again, also what was asked while frozen."""
        self._awake.set()

    def _accepted(
        self, rank: int, alloc: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = self._answering.spawn(self._answer(rank, alloc, reader, writer), "PD link")
        task.add_done_callback(lambda _: writer.close())

    async def _answer(
        self, rank: int, alloc: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError, EOFError, msgspec.MsgspecError, LinkError):
            question = _decode_question(await receive_frame(reader))
            await self._awake.wait()
            if (question.kind == "handshake") is alloc:
                await _wait_forever()  # the wrong port: a real engine only logs what it can't read
            send_frame(writer, _Reply(self._engine_id, await self._done(rank, question)))
            await writer.drain()

    async def _done(self, rank: int, question: _Question) -> Allocation | None:
        buffer, now = self._connector().buffers[rank], asyncio.get_running_loop().time()
        allocation: Allocation | None = None
        if question.batch is not None:
            found: asyncio.Future[Allocation] = asyncio.get_running_loop().create_future()
            buffer.offer(
                question.batch, now, lambda one: None if found.done() else found.set_result(one)
            )
            self._changed()
            allocation = await found
        elif question.kind == "write" and question.engine_id == self._engine_id:
            buffer.write(question.keys, question.pages)
        elif question.kind == "cancel":
            buffer.cancel(question.request, question.keys, now)
        return allocation


def spec(
    host: str, init_ports: Sequence[int], alloc_ports: Sequence[int], req_id: str
) -> dict[str, object]:
    """Return the `disagg_spec` of a receiver."""
    return {
        "req_id": req_id,
        "receiver_host": host,
        "receiver_init_port": list(init_ports),
        "receiver_alloc_port": list(alloc_ports),
    }
