"""NIXL's side channel between engine processes: engine ids, reading pages, notices. Msgpack in frames with a length, over TCP.

Owns the listening socket of one engine and the short connections to others. Real engines do the same with ZMQ and RDMA. What
is simulated: which engine can be reached, which one answers, and what is in the pages when they are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Sequence

import msgspec

from pdproxy.kit.tasks import TaskOwner
from pdproxy.sim.memory import Page
from pdproxy.sim.nixl import Peer

_MAX_FRAME = 1 << 28
_HEADER = 4
_NOTICE_DEADLINE = 10.0
"""Seconds. Real notices are never answered; here the deadline is long, so that a busy machine does not lose them."""


class _Question(msgspec.Struct, omit_defaults=True):
    engine_id: str = ""
    """The engine that the question is for; empty: the question is for its id."""
    read: list[int] = []
    notice: str = ""
    request_ids: list[str] = []


class _Reply(msgspec.Struct, omit_defaults=True):
    engine_id: str
    pages: list[Page] = []
    refused: bool = False


class LinkError(Exception):
    """The other engine is down, has another id now, or sends invalid data."""


_decode_question = msgspec.msgpack.Decoder(_Question).decode
_decode_reply = msgspec.msgpack.Decoder(_Reply).decode
_encode = msgspec.msgpack.Encoder().encode


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


async def _ask(peer: Peer, question: _Question) -> _Reply:
    try:
        reader, writer = await asyncio.open_connection(peer.host, peer.port)
    except (OSError, OverflowError) as error:
        raise LinkError(str(error)) from error
    try:
        send_frame(writer, question)
        return _decode_reply(await receive_frame(reader))
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise LinkError(str(error)) from error
    finally:
        writer.close()


async def engine_id_at(peer: Peer, deadline: float) -> str | None:
    """Return the id of the engine that listens there; None if none answers within `deadline` seconds.

    As in vLLM, None takes the whole deadline, also where nothing listens.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline
    try:
        async with asyncio.timeout_at(end):
            return (await _ask(peer, _Question())).engine_id
    except (TimeoutError, LinkError):
        await asyncio.sleep(end - loop.time())
        return None


async def read_pages(peer: Peer, blocks: Sequence[int]) -> list[Page]:
    """Read pages of a peer's memory. A frozen peer never answers, and there is no deadline: as in vLLM.

    Raises:
        LinkError: the peer is down, or another engine listens there now.
    """
    reply = await _ask(peer, _Question(engine_id=peer.engine_id, read=list(blocks)))
    if reply.refused:
        raise LinkError(f"{peer.engine_id} is gone: {reply.engine_id} listens there")
    return reply.pages


async def send_notice(peer: Peer, kind: str, request_ids: Sequence[str]) -> None:
    """Send a notice.

    Raises:
        LinkError: it was not accepted.
    """
    question = _Question(engine_id=peer.engine_id, notice=kind, request_ids=list(request_ids))
    try:
        async with asyncio.timeout(_NOTICE_DEADLINE):
            reply = await _ask(peer, question)
    except TimeoutError as error:
        raise LinkError("no answer") from error
    if reply.refused:
        raise LinkError(f"{peer.engine_id} is gone: {reply.engine_id} listens there")


class SideChannel:
    """Answers other engines. `read` returns pages by block ids; `notified` takes a kind and request ids."""

    def __init__(
        self, read: Callable[[Sequence[int]], list[Page]], notified: Callable[[str, Sequence[str]], None]
    ) -> None:
        self._read, self._notified = read, notified
        self._engine_id = ""
        self._server: asyncio.Server | None = None
        self._answering = TaskOwner("side channel")
        self._awake = asyncio.Event()
        self._awake.set()
        self.port = 0

    async def open(self, engine_id: str, host: str, port: int) -> None:
        """Listen.

        Raises:
            OSError: the port is taken.
        """
        self._engine_id = engine_id
        try:
            self._server = await asyncio.start_server(self._accepted, host, port, backlog=1024)
        except OSError as error:
            nameless = (
                isinstance(error, socket.gaierror) or error.errno is None
            )  # since Python 3.13, for such an address
            if not nameless and error.errno != errno.EADDRNOTAVAIL:
                raise
            # Not an address of this machine: handles then name a wrong address, as with a real misconfigured engine.
            self._server = await asyncio.start_server(self._accepted, "127.0.0.1", port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and drop what is being answered."""
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._answering.settle(0)

    def freeze(self) -> None:
        """Accept connections and questions, answer none."""
        self._awake.clear()

    def thaw(self) -> None:
        """Answer again, also what was asked while frozen."""
        self._awake.set()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._answering.spawn(self._answer(reader, writer), "side channel")
        # Not in the task itself: a task that is cancelled before its first step does not run at all.
        task.add_done_callback(lambda _: writer.close())

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, msgspec.MsgspecError, LinkError):
            question = _decode_question(await receive_frame(reader))
            await self._awake.wait()
            reply = _Reply(self._engine_id, refused=question.engine_id not in ("", self._engine_id))
            if question.engine_id == self._engine_id:
                if question.read:
                    try:
                        reply.pages = self._read(question.read)
                    except IndexError:
                        reply.refused = True
                if question.notice:
                    self._notified(question.notice, question.request_ids)
            send_frame(writer, reply)
            await writer.drain()
