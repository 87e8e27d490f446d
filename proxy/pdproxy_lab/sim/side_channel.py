"""NIXL's side channel between engine processes: engine ids, reading pages, notices.

Owns the port of one engine and the questions to others. Real engines do the
same with ZMQ and RDMA. What is simulated: which engine can be reached, which one answers, and what
is in the pages when they are read.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from typing import Protocol

import msgspec

from pdproxy_lab.sim.frame_port import FramePort, LinkError, ask
from pdproxy_lab.sim.memory import Page
from pdproxy_lab.sim.network import EnginePort
from pdproxy_lab.sim.nixl import Greeting, Handshake, SideChannelPeer
from pdproxy_lab.sim.nixl_push import Push, PushRegistration, Register

_NOTICE_DEADLINE = 10.0
"""Seconds. Real notices are never answered; here the deadline is long, so that a busy machine does
not lose them.
"""


class _Question(msgspec.Struct, omit_defaults=True):
    engine_id: str = ""
    """The engine that the question is for; empty: a handshake with so many workers."""
    agent: str = ""
    """Its run; empty: any."""
    workers: tuple[int, int] = (1, 1)
    read: list[int] = []
    notice: str = ""
    request_ids: list[str] = []
    registration: PushRegistration | None = None
    reached: int = 0
    written: str = ""
    """The request for which `pages` are written into `blocks`."""
    blocks: list[int] = []
    pages: list[Page] = []


class _Reply(msgspec.Struct, omit_defaults=True):
    engine_id: str
    greeting: Greeting | None = None
    pages: list[Page] = []
    refused: bool = False


_decode_question = msgspec.msgpack.Decoder(_Question).decode
_decode_reply = msgspec.msgpack.Decoder(_Reply).decode


async def _ask(peer: SideChannelPeer, question: _Question) -> _Reply:
    try:
        return _decode_reply(await ask(peer.host, peer.port, question))
    except (OSError, EOFError, OverflowError, msgspec.MsgspecError) as error:
        raise LinkError(str(error)) from error


async def greeting_of(handshake: Handshake, deadline: float) -> Greeting | None:
    """Return the answer to a handshake; None if there is none within `deadline` seconds.

    As in vLLM, None takes the whole deadline, also where nothing listens.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline
    try:
        async with asyncio.timeout_at(end):
            question = _Question(workers=(handshake.tp_size, handshake.pp_size))
            found = (await _ask(handshake.peer, question)).greeting
        if found is not None:
            return found
        await asyncio.sleep(end - loop.time())
        return None
    except (TimeoutError, LinkError):
        await asyncio.sleep(end - loop.time())
        return None


async def read_pages(peer: SideChannelPeer, blocks: Sequence[int]) -> list[Page]:
    """Read pages of a peer's memory. A frozen peer never answers, and there is no deadline: as in
    vLLM.

    Raises:
        LinkError: the peer is down, or another engine listens there now.
    """
    reply = await _ask(peer, _Question(engine_id=peer.engine_id, read=list(blocks)))
    _check(peer, reply)
    return reply.pages


async def send_notice(peer: SideChannelPeer, kind: str, request_ids: Sequence[str]) -> None:
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
    _check(peer, reply)


async def send_registration(command: Register) -> None:
    """Send a registration. A frozen peer takes it when it goes on, and there is no deadline: as in
    vLLM.

    Raises:
        LinkError: the peer is down, or another one by now.
    """
    question = _Question(
        command.peer.engine_id,
        command.agent,
        registration=command.registration,
        reached=command.reached,
    )
    _check(command.peer, await _ask(command.peer, question))


async def write_pages(push: Push, pages: Sequence[Page]) -> None:
    """Write pages into a peer's memory and tell it. A frozen peer takes them when it goes on, and
    there is no deadline.

    Raises:
        LinkError: the peer is down, or another one by now.
    """
    question = _Question(
        push.peer.engine_id,
        push.agent,
        written=push.remote_request_id,
        blocks=list(push.remote_blocks),
        pages=list(pages),
    )
    _check(push.peer, await _ask(push.peer, question))


def _check(peer: SideChannelPeer, reply: _Reply) -> None:
    if reply.refused:
        raise LinkError(f"{peer.engine_id} is gone: {reply.engine_id} listens there")


class Owner(Protocol):
    """The engine core behind a side channel."""

    def greet(self, tp_size: int, pp_size: int) -> Greeting | None:
        """Answer a handshake; None: not at all."""

    def read(self, blocks: Sequence[int]) -> list[Page]:
        """Return pages by block ids.

        Raises:
            IndexError: there is no such block.
        """

    def notified(self, kind: str, request_ids: Sequence[str]) -> None:
        """Take a notice."""

    def registered(self, registration: PushRegistration, reached: int) -> None:
        """P: take a registration."""

    def written(self, request_id: str, blocks: Sequence[int], pages: Sequence[Page]) -> None:
        """D: take pages for a request."""


class SideChannel(FramePort):
    """Answers other engines on a port."""

    def __init__(self, owner: Owner, port: EnginePort) -> None:
        super().__init__(port, "side channel")
        self._owner = owner
        self._engine_id, self._agent = "", ""

    async def open(self, engine_id: str, agent: str, host: str, port: int) -> None:
        """Listen; after a restart where it did before.

        Raises:
            OSError: the port is taken.
        """
        self._engine_id, self._agent = engine_id, agent
        try:
            await self.listen(host, port)
        except OSError as error:
            nameless = (
                isinstance(error, socket.gaierror) or error.errno is None
            )  # since Python 3.13, for such an address
            if not nameless and error.errno != errno.EADDRNOTAVAIL:
                raise
            # Not an address of this machine: handles then name a wrong address, as with a real
            # misconfigured engine.
            await self.listen("127.0.0.1", port)

    async def answer(self, question: bytes) -> _Reply:
        """See `FramePort`."""
        return self._reply(_decode_question(question))

    def _reply(self, question: _Question) -> _Reply:
        reply = _Reply(self._engine_id)
        if not question.engine_id:
            reply.greeting = self._owner.greet(*question.workers)
        elif question.engine_id != self._engine_id or question.agent not in ("", self._agent):
            reply.refused = True
        else:
            try:
                self._obey(question, reply)
            except (IndexError, ValueError):
                reply.refused = True
        return reply

    def _obey(self, question: _Question, reply: _Reply) -> None:
        if question.read:
            reply.pages = self._owner.read(question.read)
        if question.notice:
            self._owner.notified(question.notice, question.request_ids)
        if question.registration is not None:
            self._owner.registered(question.registration, question.reached)
        if question.written:
            self._owner.written(question.written, question.blocks, question.pages)
