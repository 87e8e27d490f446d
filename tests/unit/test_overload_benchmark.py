"""The parts of benchmarks/overload.py: what counts as good, late and refused, and the percentile of
delays.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import overload
import overload_load

SHAPE = overload_load.Shape(tokens=5)
ANSWERS = [
    (200, b"{}", 0.0),
    (503, b'{"error":{"reason":"deadline"}}', 0.0),
    (429, b'{"error":{"reason":"share"}}', 0.0),
    (504, b'{"error":{"message":"late"}}', 0.0),
    (200, b"{}", 0.0),
]


async def test_each_request_is_counted_once() -> None:
    """By its status and its time; a connection that breaks is a failure, and others go on."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (head := await reader.readuntil(b"\r\n\r\n")) is not None:
            asked.append(head)
            await reader.readexactly(
                int(head.partition(b"content-length: ")[2].split(b"\r\n", 1)[0])
            )
            if len(asked) % 6 == 0:
                writer.close()
                return
            status, body, wait = ANSWERS[len(asked) % 6 - 1]
            await asyncio.sleep(wait)
            writer.write(
                b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)
            )

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    load = overload_load.Load(
        f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", ("one", "two"), "m", (SHAPE,)
    )
    load.limits[SHAPE] = 1.0
    tally = overload_load.Tally()
    for number in range(6):
        await load._one(SHAPE, "ab"[number % 2], asyncio.get_running_loop().time(), tally)
    load.connections.close()
    server.close()
    found = tally.good.total() + tally.late + tally.refused.total() + tally.failed.total()
    assert found == 6
    assert tally.refused == {"deadline": 1, "share": 1, "504": 1}
    assert tally.failed == {"IncompleteReadError": 1}
    assert [b"Bearer one" in head for head in asked] == [True, False] * 3
    assert all(b"x-request-timeout: 1.000" in head for head in asked)


async def test_an_answer_past_its_deadline_is_late() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    load = overload_load.Load(
        f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", ("", ""), "m", (SHAPE,)
    )
    load.limits[SHAPE] = 1.0
    tally = overload_load.Tally()
    await load._one(SHAPE, "a", asyncio.get_running_loop().time() - 1000.0, tally)
    server.close()
    assert (tally.late, tally.good.total()) == (1, 0)
    assert 999.0 <= tally.most_over < 1100.0


async def test_a_stream_that_ends_with_an_error_is_none() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'data: {"error":{"message":"late"}}\n\n'
        writer.write(
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    load = overload_load.Load(
        f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", ("", ""), "m", (SHAPE,)
    )
    load.limits[SHAPE] = 1.0
    tally = overload_load.Tally()
    await load._one(SHAPE, "a", asyncio.get_running_loop().time(), tally)
    server.close()
    assert (tally.refused, tally.good.total()) == ({"504": 1}, 0)


def test_the_percentile_of_delays_in_between() -> None:
    before = {0.001: 90.0, 0.05: 100.0, float("inf"): 100.0}
    after = {0.001: 100.0, 0.05: 208.0, float("inf"): 210.0}
    assert overload.percentile(before, after, 0.05) == 0.001
    assert overload.percentile(before, after, 0.9) == 0.05
    assert overload.percentile(before, after, 0.999) == float("inf")
    assert overload.percentile({}, {}, 0.99) == 0.0


def test_the_delays_are_read_from_the_page() -> None:
    page = (
        'pdproxy_loop_lateness_seconds_bucket{le="0.005"} 7.0\n'
        'pdproxy_loop_lateness_seconds_bucket{le="+Inf"} 9.0\n'
    )
    assert overload.LATENESS.findall(page) == [("0.005", "7.0"), ("+Inf", "9.0")]
