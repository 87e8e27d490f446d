"""Between engines with LMCache's prefill-decode transfer: who listens at the two ports of a rank, room for chunks, and their KV.

Owns D's listening sockets and P's short connections. Real engines do the same with ZMQ and RDMA. As they do, P waits for a D that
isn't there until it is, and without end for an answer that got lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NoReturn

import msgspec

from pdproxy.kit.tasks import TaskOwner
from pdproxy.sim.link import LinkError, receive_frame, send_frame
from pdproxy.sim.lmcache_pd import Cancel, LMCachePD, Receiver, Write
from pdproxy.sim.memory import Page
from pdproxy.sim.pd_buffer import Batch, Room

_PAUSE = 0.05
"""Seconds between tries to connect."""


class _Ask(msgspec.Struct, omit_defaults=True):
    kind: Literal["meet", "offer", "write", "cancel"]
    engine_id: str = ""
    """Whose memory is to be written."""
    batch: Batch | None = None
    request: str = ""
    keys: tuple[str, ...] = ()
    pages: tuple[tuple[Page, ...], ...] = ()


class _Told(msgspec.Struct, omit_defaults=True):
    engine_id: str
    room: Room | None = None


_decode_ask = msgspec.msgpack.Decoder(_Ask).decode
_decode_told = msgspec.msgpack.Decoder(_Told).decode


class Sending:
    """P's side."""

    def __init__(self) -> None:
        self._turns: dict[tuple[str, int], asyncio.Lock] = {}

    async def meet(self, receiver: Receiver) -> str:
        """Return the id of the engine at a receiver's init port, once there is one."""
        return (await _insist(receiver.host, receiver.init_port, _Ask("meet"))).engine_id

    async def offer(self, receiver: Receiver, batch: Batch) -> Room:
        """Return the room that a batch is given, once it is. P has one question at a time for each receiver."""
        async with self._turns.setdefault((receiver.host, receiver.alloc_port), asyncio.Lock()):
            ask = _Ask("offer", batch=msgspec.structs.replace(batch, pages=()))
            told = await _insist(receiver.host, receiver.alloc_port, ask)
            if told.room is None:
                await _for_ever()
            return told.room

    async def write(self, write: Write) -> bool:
        """Return whether the engine that was met has the chunks now."""
        ask = _Ask("write", engine_id=write.engine_id, keys=write.keys, pages=write.pages)
        try:
            told = await _once(write.receiver.host, write.receiver.alloc_port, ask)
        except (OSError, EOFError, LinkError, OverflowError, msgspec.MsgspecError):
            return False
        return told.engine_id == write.engine_id

    async def cancel(self, cancel: Cancel) -> None:
        """Give chunks up."""
        ask = _Ask("cancel", request=cancel.request, keys=cancel.keys)
        with contextlib.suppress(OSError, EOFError, LinkError, OverflowError, msgspec.MsgspecError):
            await _once(cancel.receiver.host, cancel.receiver.alloc_port, ask)


async def _for_ever() -> NoReturn:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def _insist(host: str, port: int, ask: _Ask) -> _Told:
    """Connect until it succeeds; then ask once. An answer that gets lost is waited for."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except (OSError, OverflowError):
            await asyncio.sleep(_PAUSE)
            continue
        try:
            send_frame(writer, ask)
            return _decode_told(await receive_frame(reader))
        except (OSError, EOFError, LinkError, msgspec.MsgspecError):
            await _for_ever()
        finally:
            writer.close()


async def _once(host: str, port: int, ask: _Ask) -> _Told:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        send_frame(writer, ask)
        return _decode_told(await receive_frame(reader))
    finally:
        writer.close()


class Receiving:
    """D's side: two ports a rank. `connector` is that of the living core; `changed` is called when it has something to do."""

    def __init__(self, connector: Callable[[], LMCachePD], changed: Callable[[], None]) -> None:
        self._connector, self._changed = connector, changed
        self._servers: list[asyncio.Server] = []
        self._answering = TaskOwner("PD link")
        self._awake = asyncio.Event()
        self._awake.set()
        self._engine_id = ""
        self.init_ports: list[int] = []
        self.alloc_ports: list[int] = []

    async def open(self, engine_id: str, host: str, ranks: int, init_port: int, alloc_port: int) -> None:
        """Listen on `ranks` ports from each of the two on; on the same ones if it has listened before.

        Raises:
            OSError: one of them is taken.
        """
        self._engine_id = engine_id
        before = [*self.init_ports, *self.alloc_ports]
        wanted = [port + rank if port else 0 for port in (init_port, alloc_port) for rank in range(ranks)]
        ports = []
        for place, port in enumerate(before or wanted):
            accepted = partial(self._accepted, place % ranks, place >= ranks)
            server = await asyncio.start_server(accepted, host, port, backlog=1024)
            self._servers.append(server)
            ports.append(server.sockets[0].getsockname()[1])
        self.init_ports, self.alloc_ports = ports[:ranks], ports[ranks:]

    async def close(self) -> None:
        """Stop listening and drop what is being answered."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        await self._answering.settle(0)

    def freeze(self) -> None:
        """Take connections and questions, answer none."""
        self._awake.clear()

    def thaw(self) -> None:
        """Answer again, also what was asked meanwhile."""
        self._awake.set()

    def _accepted(self, rank: int, alloc: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._answering.spawn(self._answer(rank, alloc, reader, writer), "PD link")
        task.add_done_callback(lambda _: writer.close())

    async def _answer(self, rank: int, alloc: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, msgspec.MsgspecError, LinkError):
            ask = _decode_ask(await receive_frame(reader))
            await self._awake.wait()
            if (ask.kind == "meet") is alloc:
                await _for_ever()  # the wrong port: a real one logs what it can't read
            send_frame(writer, _Told(self._engine_id, await self._done(rank, ask)))
            await writer.drain()

    async def _done(self, rank: int, ask: _Ask) -> Room | None:
        buffer, now = self._connector().buffers[rank], asyncio.get_running_loop().time()
        room: Room | None = None
        if ask.batch is not None:
            found: asyncio.Future[Room] = asyncio.get_running_loop().create_future()
            buffer.offer(ask.batch, now, lambda one: None if found.done() else found.set_result(one))
            self._changed()
            room = await found
        elif ask.kind == "write" and ask.engine_id == self._engine_id:
            buffer.write(ask.keys, ask.pages)
        elif ask.kind == "cancel":
            buffer.cancel(ask.request, ask.keys, now)
        return room


def spec(host: str, init_ports: Sequence[int], alloc_ports: Sequence[int], req_id: str) -> dict[str, object]:
    """Return the `disagg_spec` that leads to a receiver."""
    return {
        "req_id": req_id,
        "receiver_host": host,
        "receiver_init_port": list(init_ports),
        "receiver_alloc_port": list(alloc_ports),
    }
