"""The parts of benchmarks/hostile.py: honest clients detect a wrong answer, hostile ones keep their
limits.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import honest
import hostile
import hostile_clients
import hostile_engine
import mock_engine

CHUNKS = 4


@asynccontextmanager
async def engine(page: bytes | None = None) -> AsyncIterator[str]:
    """Run one mock engine that may be hostile; yield its URL."""
    loop = asyncio.get_running_loop()
    made = mock_engine.Engine(0, CHUNKS, 0.0, 0.0)
    server = await loop.create_server(
        functools.partial(hostile_engine.Connection, made, page), "127.0.0.1", 0
    )
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def client(url: str, **options: Any) -> hostile_clients.Client:
    """Return a hostile client that sends little for a short time."""
    given = {
        "seconds": 0.5,
        "bytes": 1 << 20,
        "largest": 1 << 14,
        "connections": 1,
        "address": "127.0.1.1",
        **options,
    }
    made = hostile_clients.Client(argparse.Namespace(**given))
    made.at = "127.0.0.1", int(url.rpartition(":")[2])
    return made


async def post(url: str, **body: Any) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a completion; return the status line of the answer and the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    data = json.dumps({"prompt": "x", **body}, separators=(",", ":")).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
        % (len(data), data)
    )
    return await reader.readuntil(b"\r\n"), reader, writer


async def enough(
    url: str,
    count: int,
    chunks: int,
    seen: Callable[[dict[str, Any]], bool],
    key: str | None = None,
) -> dict[str, Any]:
    """Run honest clients; on a busy machine for longer, until enough is seen. Return their
    results.
    """
    seconds = 0.4
    while (
        not seen(found := await honest.clients(url, count, chunks, seconds, key)) and seconds < 30
    ):
        seconds *= 4
    return found


async def test_honest_clients_take_right_answers() -> None:
    """Streamed and whole, chats and completions: the mock engine's answers count as right."""
    async with engine() as url:
        found = await enough(url, 4, CHUNKS, lambda found: found["right"] > 4)
    assert found["right"] > 4
    assert (found["wrong"], found["refused"]) == ({}, 0)
    assert found["first_p99_ms"] is not None


async def test_honest_clients_detect_wrong_answers() -> None:
    """A text that is one word too short counts as wrong, for each kind of request."""
    async with engine() as url:
        both = {"WrongError another text", "WrongError another text in a stream"}
        found = await enough(url, 4, CHUNKS + 1, lambda found: both <= set(found["wrong"]))
    assert both <= set(found["wrong"])


async def test_delayed_health_requests_count() -> None:
    """An answer that is 0.2 s late delays ten requests, not one."""

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            await asyncio.sleep(0.2)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    server = await asyncio.start_server(slow, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    found = await asyncio.to_thread(honest.late, url, 0.3)
    server.close()
    assert 50 < found["late_p50_ms"] < found["late_max_ms"]
    assert found["late_lost"] == 0


@pytest.mark.parametrize("kind", hostile_clients.KINDS)
async def test_a_hostile_client_keeps_its_bounds(kind: str) -> None:
    """Each kind ends by itself, and sends no more bytes than its limit."""
    sent = 0
    async with engine() as url:
        # on a busy machine half a second may be too short to send anything
        for seconds in (0.5, 2.0, 8.0):
            one = client(url, seconds=seconds)
            await hostile_clients.run(one, hostile_clients.KINDS[kind](one))
            sent = one.sent
            if sent:
                break
    assert 0 < sent <= (1 << 20) + hostile_clients.BLOCK


@pytest.mark.parametrize("way", hostile_engine.WAYS)
async def test_an_engine_is_hostile_to_marked_requests(way: bytes) -> None:
    """A marked request gets its hostile answer, from the leg that it names; others get a plain
    one.
    """
    async with engine() as url:
        _, reader, writer = await post(url, user=f"hostile:{way.decode()}")
        begin, again = hostile_engine.WAYS[way]
        expected = (begin + again * 2).partition(b"\r\n")[2]
        assert await reader.readexactly(len(expected)) == expected
        writer.transport.abort()
        head, reader, writer = await post(url, user=f"hostile:{way.decode()}-prefill")
        assert b"date:" in await reader.readuntil(b"\r\n\r\n"), (
            "the decode leg of a request that names the other"
        )
        assert head.startswith(b"HTTP/1.1 200")
        writer.close()


def test_every_kind_has_its_client() -> None:
    """The rows name existing clients, and each client is in a row."""
    named = {name for kind in hostile.KINDS.values() for name in kind.clients}
    assert named == set(hostile_clients.KINDS)


def test_the_proxys_own_lateness_is_read_from_its_histogram() -> None:
    """The 99th percentile of the counts between two readings, and the last bucket with a count."""
    before = [(0.01, 100.0), (0.1, 100.0), (1.0, 100.0), (float("inf"), 100.0)]
    after = [(0.01, 190.0), (0.1, 200.0), (1.0, 200.0), (float("inf"), 200.0)]
    assert hostile.own_lateness(before, after) == pytest.approx((91.0, 100.0))
    assert hostile.own_lateness(None, after) == (None, None)
    beyond = [(0.01, 190.0), (0.1, 190.0), (1.0, 190.0), (float("inf"), 200.0)]
    assert hostile.own_lateness(before, beyond) == pytest.approx((1000.0, float("inf")))


async def test_hostile_clients_use_their_own_addresses() -> None:
    """Otherwise they would share with the honest ones."""
    peers: set[str] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.add(writer.get_extra_info("peername")[0])
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    one = client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", address="127.0.1.7")
    (await one.open()).close()
    (await one.open(address="127.0.2.3")).close()
    async with asyncio.timeout(30):
        while peers != {"127.0.1.7", "127.0.2.3"}:
            await asyncio.sleep(0.001)
    server.close()


async def test_honest_clients_report_why_they_were_refused() -> None:
    """The first and the last refusal, with their times."""

    async def full(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 x\r\ncontent-length: 4\r\nconnection: close\r\n\r\nfull")

    server = await asyncio.start_server(full, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    found = await enough(url, 2, CHUNKS, lambda found: found["refused"] > 2, "a key")
    server.close()
    assert found["refused"] > 2
    assert [text for _, text in found["refusals"]] == ["full", "full"]
