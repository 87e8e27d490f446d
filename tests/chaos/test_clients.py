"""The clients of a run: each way in which a server can treat them has its own name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from tests.chaos.answers import Told
from tests.chaos.clients import Outcome, Visitors
from tests.chaos.oracle import Body
from tests.chaos.schedule import Call, Client
from tests.chaos.virtual.network import VirtualNetwork
from tests.fakes.virtual import run

HOST, PORT, PATIENCE = "10.0.0.1", 80, 50.0
CONTENT = json.dumps(
    {
        "choices": [{"index": 0, "text": "right", "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
).encode()
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(CONTENT) + CONTENT
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def visit(
    serve: Serve | None, client: Client = "plain", count: int = 1, amount: float = 0.0
) -> list[Outcome]:
    body = Body("/v1/completions", {"prompt": "x"}, Told({0: "right"}, {0: "stop"}, (1, 1, 2)))

    async def main(network: VirtualNetwork) -> list[Outcome]:
        if serve is not None:
            await asyncio.start_server(serve, HOST, PORT)
        visitors = Visitors(network, (HOST, PORT), [body], PATIENCE)
        await visitors.visit(Call(7, 0.0, client, (0,) * count, amount), "call", "10.0.0.2")
        await asyncio.sleep(1)
        assert not network.open or serve is _silent
        return visitors.outcomes

    return run(main)


async def _read(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    await reader.readexactly(int(length.split(b":")[1]))


async def _right(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            await _read(reader)
            writer.write(WHOLE)
    except (EOFError, OSError):
        writer.close()


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(1000)


async def _cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _read(reader)
    writer.write(WHOLE[:-1])
    writer.close()


async def _wrong(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _read(reader)
    writer.write(WHOLE.replace(b"right", b"wrong"))
    writer.close()


async def _too_slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    error = b'{"error": {"message": "m", "type": "t", "param": null, "code": 408}}'
    writer.write(b"HTTP/1.1 408 x\r\ncontent-length: %d\r\n\r\n" % len(error) + error)
    writer.close()


@pytest.mark.parametrize(
    ("serve", "how"),
    [(_right, "right"), (_silent, "silent"), (_cut, "cut"), (_wrong, "wrong"), (None, "refused")],
)
def test_how_a_request_ends(serve: Serve | None, how: str) -> None:
    (outcome,) = visit(serve)
    assert (outcome.how, outcome.item, outcome.ident) == (how, 7, "call-0")
    assert outcome.ended - outcome.began == pytest.approx(
        PATIENCE if how == "silent" else 0, abs=0.1
    )


@pytest.mark.parametrize("client", ["kept", "pipelines"])
def test_several_requests_on_a_connection(client: Client) -> None:
    outcomes = visit(_right, client, 3)
    assert [(one.ident, one.how) for one in outcomes] == [
        (f"call-{place}", "right") for place in range(3)
    ]


def test_what_was_pipelined_behind_a_failure_has_an_end_too() -> None:
    assert [one.how for one in visit(_cut, "pipelines", 3)] == ["cut", "left", "left"]
    assert [one.how for one in visit(_cut, "kept", 3)] == ["cut"], "the others were never sent"


@pytest.mark.parametrize("client", ["leaves", "resets"])
@pytest.mark.parametrize("amount", [0.0, 5.0])
def test_clients_that_leave(client: Client, amount: float) -> None:
    (outcome,) = visit(_right, client, amount=amount)
    assert outcome.how == "left"


def test_clients_that_read_or_send_slowly_are_right_or_told() -> None:
    assert [one.how for one in visit(_right, "reads_slowly", amount=0.3)] == ["right"]
    (slow,) = visit(_right, "sends_slowly", amount=3.0)
    assert (slow.how, slow.slow) == ("right", True)
    assert slow.ended - slow.began > 6
    (refused,) = visit(_too_slow, "sends_slowly", amount=3.0)
    assert refused.how in ("error", "cut")
    (not_slow,) = visit(_too_slow)
    assert not_slow.how == "wrong", "it sent at once"
