"""A client that reads slowly, or not at all: what it holds, whom it delays, and how its stream
ends, on the loop that serves.
"""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from tests.fakes import scripts
from tests.fakes.client import request
from tests.fakes.world import COMPLETIONS, TEXT, World, completion, until, world

pytestmark = pytest.mark.timeout(120, method="thread")  # uvloop's own loop does not end by a signal

HELD = 256 << 10
"""Bytes that a client may hold in the proxy; the kernel's buffers are not counted."""
EVENT = b'data: {"id":"x","choices":[{"index":0,"text":"%b","finish_reason":null}]}\n\n' % (
    b"a" * 1500
)
PIECES = 40_000
"""60 MB: more than all buffers of the kernel take."""


def buffered(w: World) -> int:
    """The most bytes that wait to be sent to any one client."""
    found = [one.transport.get_write_buffer_size() for one in w.connections]
    return max(found, default=0)


def test_a_client_that_does_not_read() -> None:
    """It holds 256 KB at the most, others are served, its leg stands still, and is aborted after
    the deadline.
    """

    async def run() -> None:
        async with world(deadlines={"client_write": 1.0, "between_tokens": 20}, leaves=True) as w:
            for engine in w.decode:
                engine.script(scripts.streams(*[EVENT * 40] * (PIECES // 40), then="stall"))
            client = await w.client(receive_buffer=4096)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.send(request("POST", COMPLETIONS, completion(stream=True)))
            most = 0

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, buffered(w))
                    await asyncio.sleep(0)

            watching = asyncio.ensure_future(watch())
            await until(lambda: buffered(w) > 0)
            # a little at a time: when there is space again, the engine has much to send
            for _ in range(20):
                client.writer.transport.resume_reading()  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
                client.writer.transport.pause_reading()  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
            await until(lambda: buffered(w) > 0)
            for engine in w.decode:
                engine.scripts.clear()
            other = await w.ask(COMPLETIONS, completion())
            assert other.status == 200
            assert TEXT in other.text
            await until(lambda: w.metric("pdproxy_deadline_total", wait="client_write"))
            await w.quiet()
            watching.cancel()
            assert 0 < most <= HELD
            # Its leg was closed, which the engine notices in a later turn of the loop.
            await until(
                lambda: any(one.left.is_set() for engine in w.decode for one in engine.requests)
            )

    uvloop.run(run())
