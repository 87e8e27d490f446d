"""What hostile clients can make a `pdproxy serve` process hold: measured on a real one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.fakes import forked
from tests.fakes.client import Client, exchange, request
from tests.fakes.ports import free_port
from tests.fakes.world import until

MIB = 1 << 20
PATIENCE = 60.0
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
SETTINGS = {
    "PDPROXY_LIMITS__MAX_BODY_BYTES": str(4 * MIB),
    "PDPROXY_LIMITS__MAX_BUFFERED_BYTES": str(32 * MIB),
    "PDPROXY_DEADLINES__CLIENT_BODY": "5",
    "PDPROXY_DEADLINES__CLIENT_HEAD": "5",
    "PDPROXY_DEADLINES__CLIENT_WRITE": "5",
}
ROOM = 96 * MIB
"""What the process may grow by: the bodies twice (a buffer grows by being copied), and what sockets
and the allocator take.
"""


class Serving:
    """A running `pdproxy serve`, in front of engines that do not exist."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid = pid
        self.port = port

    def peak(self) -> int:
        """The most memory it ever had, in bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    async def healthy(self) -> None:
        """Others are served."""
        assert (await exchange(self.port, request("GET", "/health", b""))).status == 200


@asynccontextmanager
async def serving() -> AsyncIterator[Serving]:
    port = free_port()
    engines = ["--prefill", f"127.0.0.1:{free_port()}", "--decode", f"127.0.0.1:{free_port()}"]
    given = {name: value for name, value in os.environ.items() if not name.startswith("PDPROXY_")}
    given["PDPROXY_OBSERVE__CORE_DUMPS"] = "true"  # or only root could see which files it has open
    env = {**given, **SETTINGS, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = forked.command(
        "serve", "--port", str(port), *engines, "--log-level", "error", env=env
    )
    try:
        made = Serving(process.pid, port)
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(ConnectionError):
                    await made.healthy()
                    break
                await asyncio.sleep(0.05)
        yield made
    finally:
        process.kill()
        await process.wait()


async def flood(client: Client, first: bytes, piece: bytes, count: int) -> None:
    """Send as much as the process takes."""
    with contextlib.suppress(ConnectionError):
        client.send(first)
        for _ in range(count):
            client.send(piece)
            await client.writer.drain()


CHUNK = b"%x\r\n" % 65536 + b" " * 65536 + b"\r\n"
FLOODS = {
    "chunks, a gigabyte on each of 4 connections": (4, POST + b"transfer-encoding: chunked\r\n\r\n",
    CHUNK, 16_384),
    "bodies under the limit on 60 connections": (60, POST + b"content-length: 4000000\r\n\r\n",
    b" " * 65536, 61),
    "chunks of two bytes": (8, POST + b"transfer-encoding: chunked\r\n\r\n", b"2\r\n  \r\n" * 5000,
    100),
    "a header without an end": (20, b"GET / HTTP/1.1\r\nx: ", b"y" * 65536, 1000),
    "headers without an end": (20, b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 10_000, 1000),
    "a request line without an end": (20, b"GET /", b"y" * 65536, 1000),
    "trailers without an end": (
        20, POST + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 10_000, 1000,
    ),
    "a body that no route reads": (
        4, b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n", b" " * 65536,
        2000,
    ),
    "pages that are never read": (20, b"", request("GET", "/metrics", b"") * 100, 100),
    "requests that are never read": (20, b"", request("POST", "/v1/completions", b"{}") * 100, 100),
}  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("name", FLOODS)
async def test_memory_is_bounded(name: str) -> None:
    """The process grows by no more than its limits say, and serves others meanwhile."""
    connections, first, piece, count = FLOODS[name]
    async with serving() as served:
        before = served.peak()
        clients = [
            await Client.connect(served.port, receive_buffer=4096) for _ in range(connections)
        ]
        for client in clients:
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        floods = [asyncio.ensure_future(flood(client, first, piece, count)) for client in clients]
        for _ in range(5):
            await served.healthy()
        await asyncio.wait(floods, timeout=4)
        await served.healthy()
        for one in floods:
            one.cancel()
        await asyncio.wait(floods)
        for client in clients:
            client.close()
        assert served.peak() - before < ROOM
        await until(lambda: open_files(served.pid) < 40, PATIENCE)


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
