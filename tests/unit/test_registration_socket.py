"""The socket at which engines register: what comes over real ZMQ connections."""

from __future__ import annotations

import asyncio
import socket as plain_sockets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq

from pdproxy.upstream.registrations import RegistrationSocket
from pdproxy.wire.registrations import MAX_BYTES, Registration
from tests.fakes.ports import free_port

BEAT = {"type": "P", "http_address": "10.0.0.1:1", "zmq_address": "10.0.0.1:2"}


class Stage:
    """A bound socket, and what it has reported."""

    def __init__(self) -> None:
        self.received: list[tuple[Registration, bytes, str]] = []
        self.unreadable = 0
        self.failures: list[Exception] = []
        self.socket = RegistrationSocket(self._take, self._nonsense, self.failures.append)

    def _take(self, registration: Registration, connection: bytes, address: str) -> None:
        if registration.http_address == "raise:1":
            raise ValueError("made to fail")
        self.received.append((registration, connection, address))

    def _nonsense(self) -> None:
        self.unreadable += 1

    async def until(self, count: int) -> None:
        """Wait until so many messages were handled."""
        async with asyncio.timeout(20):
            while len(self.received) + self.unreadable + len(self.failures) < count:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def bound() -> AsyncIterator[Stage]:
    """A socket on any free port."""
    stage = Stage()
    stage.socket.bind("127.0.0.1", 0)
    try:
        yield stage
    finally:
        stage.socket.close()


def send(
    address: str, *messages: list[bytes], identity: bytes = b"", kind: int = zmq.DEALER
) -> None:
    """Send messages over one connection."""
    with zmq.Context() as context, context.socket(kind) as sender:
        sender.setsockopt(zmq.LINGER, 5000)
        if identity:
            sender.setsockopt(zmq.IDENTITY, identity)
        sender.connect(address)
        for message in messages:
            sender.send_multipart(message)


def beat(**changes: object) -> bytes:
    """A heartbeat's payload."""
    return msgspec.msgpack.encode(BEAT | changes)


async def test_a_heartbeat_comes_with_its_senders_connection_and_address() -> None:
    async with bound() as stage:
        assert stage.socket.address is not None
        await asyncio.to_thread(
            send, stage.socket.address, [beat()], [beat()], identity=b"10.0.0.1:2"
        )
        await stage.until(2)
        (one, connection, address), again = stage.received
        assert (one.role, connection, address) == ("P", b"10.0.0.1:2", "127.0.0.1")
        assert again[1] == connection


async def test_everything_else_is_counted_and_later_heartbeats_come() -> None:
    async with bound() as stage:
        where = stage.socket.address or ""
        nonsense = [[b""], [b"", beat()], [b"x" * MAX_BYTES], [b"a", b"b", b"c"], [beat(type="X")]]
        await asyncio.to_thread(send, where, *nonsense)
        await asyncio.to_thread(send, where, [beat()], kind=zmq.REQ)  # has one frame more
        await asyncio.to_thread(send, where, [beat(http_address="raise:1")], [beat()])
        await stage.until(8)
        assert stage.unreadable == 6
        assert [type(error) for error in stage.failures] == [ValueError]
        assert len(stage.received) == 1


async def test_a_message_that_is_too_long_never_comes() -> None:
    """ZMQ drops the connection. Others go on."""
    async with bound() as stage:
        where = stage.socket.address or ""
        await asyncio.to_thread(send, where, [beat(padding="x" * (1 << 20))])
        await asyncio.to_thread(send, where, [beat()])
        await stage.until(1)
        assert (len(stage.received), stage.unreadable) == (1, 0)


async def test_a_connection_that_speaks_no_zmq_disturbs_nobody() -> None:
    async with bound() as stage:
        where = stage.socket.address or ""
        with plain_sockets.create_connection(("127.0.0.1", int(where.rpartition(":")[2]))) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            await asyncio.to_thread(send, where, [beat()])
            await stage.until(1)
        assert len(stage.received) == 1


async def test_a_stranger_can_not_take_the_name_of_a_connection_that_is_there() -> None:
    async with bound() as stage:
        where = stage.socket.address or ""
        with zmq.Context() as context, context.socket(zmq.DEALER) as engine:
            engine.setsockopt(zmq.IDENTITY, b"10.0.0.1:2")
            engine.setsockopt(zmq.LINGER, 0)
            engine.connect(where)
            engine.send(beat())
            await stage.until(1)
            await asyncio.to_thread(
                send, where, [beat(zmq_address="6.6.6.6:1")], identity=b"10.0.0.1:2"
            )
            await asyncio.to_thread(send, where, [beat(zmq_address="6.6.6.6:2")], identity=b"other")
            await stage.until(2)
            engine.send(beat())
            await stage.until(3)
        assert [connection for _, connection, _ in stage.received] == [
            b"10.0.0.1:2",
            b"other",
            b"10.0.0.1:2",
        ]


async def test_an_address_that_is_taken() -> None:
    port = free_port()
    with plain_sockets.create_server(("127.0.0.1", port)):
        stage = Stage()
        with pytest.raises(OSError, match="Address already in use"):
            stage.socket.bind("127.0.0.1", port)
        assert repr(stage.socket) == "<RegistrationSocket not bound>"
        stage.socket.close()
