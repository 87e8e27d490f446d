"""What engines that register send: heartbeats to the proxy over ZMQ, and KV and reports to each
other, here over TCP.

Owns one engine's listening socket, its short connections to others, and its heartbeats. pyzmq is
imported only if it registers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import msgspec

from pdproxy.kit.tasks import TaskOwner
from pdproxy_lab.sim.connector import Connector, PeerCommand
from pdproxy_lab.sim.core import Core
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.frame_port import LinkError, receive_frame, send_frame
from pdproxy_lab.sim.memory import Page
from pdproxy_lab.sim.moriio import Moriio, Read, Report, WriteBlocks, Written
from pdproxy_lab.sim.moriio_params import MessageAddress
from pdproxy_lab.sim.p2p_nccl import P2pNccl, Put
from pdproxy_lab.sim.request import EngineDeadError
from pdproxy_lab.sim.reserved_port import ReservedPort

_PAUSE = 0.05
"""Seconds between attempts to connect."""


class _Question(msgspec.Struct, omit_defaults=True):
    kind: Literal["put", "read", "blocks", "release", "write"]
    name: str = ""
    run: str = ""
    blocks: tuple[int, ...] = ()
    pages: tuple[Page, ...] = ()


class _Reply(msgspec.Struct, omit_defaults=True):
    run: str
    pages: tuple[Page, ...] = ()


_decode_question = msgspec.msgpack.Decoder(_Question).decode
_decode_reply = msgspec.msgpack.Decoder(_Reply).decode


class RegisteredLink:
    """The link of one engine. `connector` returns the running core's; `changed` is called when the
    core has work.
    """

    def __init__(
        self, facts: SimFacts, connector: Callable[[], Connector], changed: Callable[[], None]
    ) -> None:
        self._reserved = ReservedPort()
        self._facts, self._connector, self._changed = facts, connector, changed
        self._server: asyncio.Server | None = None
        self._tasks = TaskOwner("registered link")
        self._awake = asyncio.Event()
        self._awake.set()
        self._run = ""
        self._met: dict[MessageAddress, str] = {}
        self.port = 0
        """The port on which other engines reach this one."""
        self.heartbeats = 0
        """How many were sent."""
        self.silent = False
        """Whether heartbeats are withheld, as if the network lost them."""

    @property
    def zmq_address(self) -> str:
        """The address that the engine registers."""
        host = self._facts.side_channel_host
        if self._facts.connector == "moriio":
            return f"host:{host},handshake:{self.port},notify:{self.port}"
        return f"{host}:{self.port}"

    def heartbeat(self, http_address: str) -> dict[str, Any]:
        """Return the message by which the engine registers."""
        facts = self._facts
        message: dict[str, Any] = {
            "type": "P" if facts.role == "prefill" else "D",
            "http_address": facts.registered_as or http_address,
            "zmq_address": self.zmq_address,
        }
        if facts.connector == "moriio":
            message |= {
                "dp_size": 1,
                "tp_size": facts.tensor_parallel_size,
                "transfer_mode": facts.transfer_mode,
            }
        return message

    async def open(self, run: str, http_address: str) -> None:
        """Listen, on the same port as before unless `port` was set to 0 since, and begin to
        register.

        Raises:
            OSError: the port is taken.
        """
        self._run, self._met = run, {}
        if not self.port:
            self._reserved.release()
        facts = self._facts
        self._server = await self._reserved.listen(
            self._accepted, facts.side_channel_host, facts.kv_port
        )
        self.port = self._reserved.number
        if facts.register is not None:
            self._tasks.spawn(self._register(facts.register, http_address), "heartbeats")

    def attach(self, core: Core) -> None:
        """Give the connector of a core its address."""
        if isinstance(core.connector, Moriio):
            core.connector.address = MessageAddress(self._facts.side_channel_host, self.port)

    async def close(self) -> None:
        """Stop listening and registering, and drop what is under way. The port stays reserved."""
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._tasks.settle(0)

    def release(self) -> None:
        """Release the port, after `close`."""
        self._reserved.release()

    def freeze(self) -> None:
        """Accept connections and questions, answer none. MoRIIO's heartbeats come from another
        process: they go on.
        """
        self._awake.clear()

    def thaw(self) -> None:
        """Go on after `freeze`."""
        self._awake.set()

    async def _register(self, proxy: str, http_address: str) -> None:
        import zmq

        context: Any = zmq.Context()
        socket: Any = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            if self._facts.connector == "p2p-nccl":
                socket.setsockopt_string(zmq.IDENTITY, self.zmq_address)
            socket.connect(proxy)
            payload = msgspec.msgpack.encode(self.heartbeat(http_address))
            while self._is_alive():
                if self._facts.connector == "p2p-nccl":
                    await self._awake.wait()
                if not self.silent:
                    with contextlib.suppress(zmq.ZMQError):
                        socket.send(payload, zmq.DONTWAIT)
                        self.heartbeats += 1
                await asyncio.sleep(self._facts.registration_interval)
        finally:
            socket.close()
            context.term()

    def _is_alive(self) -> bool:
        """Return whether the worker that sends heartbeats is there."""
        try:
            self._connector()
        except EngineDeadError:
            return False
        return True

    # -- to other engines

    async def perform(self, core: Core, command: PeerCommand) -> None:
        """Carry out a command, and report its result to the connector."""
        connector = core.connector
        match command:
            case Put():
                assert isinstance(connector, P2pNccl)
                await asyncio.sleep(self._facts.hardware.transfer_s(command.tokens))
                question = _Question("put", command.key, pages=command.pages)
                await _ask_for_ever(MessageAddress(command.host, command.port), question)
                connector.sent()
            case Read():
                assert isinstance(connector, Moriio)
                await asyncio.sleep(self._facts.hardware.transfer_s(command.tokens))
                reply = await self._with_met(
                    command.place, _Question("read", blocks=command.blocks)
                )
                connector.was_read(command.request_id, None if reply is None else reply.pages)
                await self._sent(command.place, _Question("release", command.transfer_id))
            case Report():
                kind: Literal["release", "blocks"] = (
                    "release" if command.kind == "release" else "blocks"
                )
                await self._sent(
                    command.place, _Question(kind, command.transfer_id, blocks=command.blocks)
                )
            case WriteBlocks():
                assert isinstance(connector, Moriio)
                await asyncio.sleep(
                    self._facts.hardware.transfer_s(len(command.pages) * self._facts.block_size)
                )
                question = _Question(
                    "write", command.transfer_id, blocks=command.blocks, pages=command.pages
                )
                await self._with_met(command.place, question)
                connector.wrote(command.transfer_id)
            case Written():
                core.written_by_peer(command.request_id, command.tokens)

    async def _with_met(self, place: MessageAddress, question: _Question) -> _Reply | None:
        """Ask the process that was met first at a place, None if it can't be reached or is gone."""
        try:
            if place not in self._met:
                self._met[place] = (await _ask(place, _Question("read"))).run
            reply = await _ask(place, msgspec.structs.replace(question, run=self._met[place]))
        except (OSError, EOFError, LinkError, OverflowError, msgspec.MsgspecError):
            return None
        return reply if reply.run == self._met[place] else None

    @staticmethod
    async def _sent(place: MessageAddress, question: _Question) -> None:
        with contextlib.suppress(OSError, EOFError, LinkError, OverflowError, msgspec.MsgspecError):
            await _ask(place, question)

    # -- from other engines

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._tasks.spawn(self._answer(reader, writer), "registered link")
        task.add_done_callback(lambda _: writer.close())

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            OSError, EOFError, msgspec.MsgspecError, LinkError, EngineDeadError
        ):
            question = _decode_question(await receive_frame(reader))
            await self._awake.wait()
            send_frame(writer, self._done(question))
            await writer.drain()
            self._changed()

    def _done(self, question: _Question) -> _Reply:
        connector, reply = self._connector(), _Reply(self._run)
        if question.run not in ("", self._run):
            return reply
        if isinstance(connector, P2pNccl) and question.kind == "put":
            connector.put(question.name, question.pages)
        elif isinstance(connector, Moriio):
            match question.kind:
                case "read":
                    reply.pages = connector.pages_at(question.blocks)
                case "write":
                    connector.written(question.name, question.blocks, question.pages)
                case "blocks" | "release":
                    connector.reported(question.kind, question.name, question.blocks)
        return reply


async def _ask(place: MessageAddress, question: _Question) -> _Reply:
    reader, writer = await asyncio.open_connection(place.host, place.port)
    try:
        send_frame(writer, question)
        return _decode_reply(await receive_frame(reader))
    finally:
        writer.close()


async def _ask_for_ever(place: MessageAddress, question: _Question) -> None:
    """Ask until there is a connection, then once. Wait for ever if the answer is lost."""
    while True:
        try:
            await _ask(place, question)
        except ConnectionRefusedError:
            await asyncio.sleep(_PAUSE)
        except (OSError, EOFError, LinkError, OverflowError, msgspec.MsgspecError):
            await _wait_for_ever()
        else:
            return


async def _wait_for_ever() -> NoReturn:
    await asyncio.get_running_loop().create_future()
    raise AssertionError
