"""What the kernel is asked to watch on a connection to an engine."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from typing import Any

import pytest

from pdproxy.kit.clock import Clock
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.upstream.client import EngineClient
from pdproxy.upstream.sockets import watch_peer


def option(transport: Any, level: int, name: int) -> int:
    return int(transport.get_extra_info("socket").getsockopt(level, name))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other options")
@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(10.0, (1, 5, 2, 2, 10_000)), (1.0, (1, 1, 1, 1, 1000)), (0.0, (0, 7200, 75, 9, 0))],
)
async def test_a_connection_that_nobody_acknowledges_ends(
    seconds: float, expected: tuple[int, ...]
) -> None:
    """Keep-alive asks a silent one after half of the time; what was sent and not acknowledged ends
    it after all of it.
    """
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = EngineClient(
        f"http://127.0.0.1:{port}",
        connect_timeout=10,
        keepalive=10,
        clock=Clock(),
        budget=AnswerBudget(),
        unacknowledged=seconds,
    )
    transport = (await client._connect())._transport
    tcp = socket.IPPROTO_TCP
    found = (
        option(transport, socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        option(transport, tcp, socket.TCP_KEEPIDLE),
        option(transport, tcp, socket.TCP_KEEPINTVL),
        option(transport, tcp, socket.TCP_KEEPCNT),
        option(transport, tcp, socket.TCP_USER_TIMEOUT),
    )
    assert found[-1] == expected[-1]
    assert found[0] == expected[0]
    if seconds:
        assert found == expected
    client.close()
    server.close()
    await asyncio.sleep(0)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other options")
async def test_a_process_that_reads_nothing_loses_the_connection() -> None:
    """Its kernel acknowledges all the time, but its buffers are full: Linux counts that as no
    answer. So the time must be longer than an API server may be busy while it has a large body to
    read.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[Exception | None] = loop.create_future()

        class Client(asyncio.Protocol):
            def connection_lost(self, exc: Exception | None) -> None:
                lost.set_result(exc)

        transport, _ = await loop.create_connection(Client, *listener.getsockname())
        watch_peer(transport, 0.5)
        taken, _ = listener.accept()
        with taken:
            transport.write(b"x" * (32 << 20))
            async with asyncio.timeout(30):
                error = await lost
        assert isinstance(error, OSError)
        assert error.errno == errno.ETIMEDOUT


def test_a_transport_without_a_socket_is_left_alone() -> None:
    """A network in memory has none; and a connection may be gone by now."""

    class Gone:
        def setsockopt(self, *_: object) -> None:
            raise OSError

    class Memory(asyncio.BaseTransport):
        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return self._extra.get(name, default)  # type: ignore[attr-defined]

    watch_peer(Memory(), 10)
    watch_peer(Memory({"socket": Gone()}), 10)
