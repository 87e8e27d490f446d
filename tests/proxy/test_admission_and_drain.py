"""Waiting for a place, and leaving in good order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import textwrap

import pytest

from tests.fakes import answers, scripts
from tests.fakes.books import Books
from tests.fakes.client import Client
from tests.fakes.engine import FakeEngine, Reply, prefill
from tests.fakes.forked import piped, start
from tests.fakes.ports import free_port
from tests.fakes.scripts import WORD
from tests.fakes.world import COMPLETIONS, LONG, completion, until, world


async def test_requests_wait_in_order_of_arrival() -> None:
    """With one place, requests are served one after the other, the longest waiting first."""
    async with world(limits={"max_inflight": 1}) as w:
        go = asyncio.Event()
        w.prefill[0].script(scripts.gate(go, prefill))
        clients = []
        for number in range(4):
            client = await w.client()
            client.post(COMPLETIONS, completion(), [("x-request-id", f"r{number}")])
            await until(lambda number=number: w.inflight + w.waiting == number + 1)  # type: ignore[misc]
            clients.append(client)
        assert (w.inflight, w.waiting) == (1, 3)
        assert w.metric("pdproxy_inflight") == 1
        assert w.metric("pdproxy_queue") == 3
        go.set()
        for client in clients:
            assert (await client.answer()).status == 200
        assert [request.ident for request in w.prefill[0].requests] == ["r0", "r1", "r2", "r3"]


async def test_a_full_queue_refuses_at_once() -> None:
    """Beyond `max_queue` nobody waits: 503 with Retry-After, and the others are served."""
    async with world(limits={"max_inflight": 1, "max_queue": 1}) as w:
        go = asyncio.Event()
        w.prefill[0].script(scripts.gate(go, prefill))
        waiting = [await w.client() for _ in range(2)]
        for count, client in enumerate(waiting):
            client.post(COMPLETIONS, completion())
            await until(lambda count=count: w.inflight + w.waiting == count + 1)  # type: ignore[misc]
        refused = await w.ask(COMPLETIONS, completion())
        assert (refused.status, refused.header("retry-after")) == (503, "1")
        assert refused.json["error"]["type"] == "ServiceUnavailableError"
        go.set()
        assert [(await client.answer()).status for client in waiting] == [200, 200]


async def test_drain_lets_streams_end_and_refuses_the_rest() -> None:
    """While draining: not ready, new requests refused, those that wait refused, the running stream
    ends by itself.
    """
    async with world(limits={"max_inflight": 1}) as w:
        go = asyncio.Event()
        w.decode[0].script(scripts.after_word(go, _rest))
        client, queued = await w.client(), await w.client()
        client.post(COMPLETIONS, completion(stream=True))
        head = await client.head()
        queued.post(COMPLETIONS, completion())
        await until(lambda: w.waiting == 1)
        drain = asyncio.create_task(w.drain())
        assert (await queued.answer()).status == 503
        ready = await w.get("/ready")
        assert (ready.status, ready.json["reason"]) == (503, "shutting down")
        assert (await w.get("/health")).status == 200
        assert (await w.ask(COMPLETIONS, completion())).status == 503
        assert not drain.done()
        go.set()
        assert (await client.rest(head)).body == WORD + WORD + answers.end()
        await asyncio.wait_for(drain, LONG)
        assert w.metric("pdproxy_deadline_total", wait="drain") == 0


async def _rest(reply: Reply) -> None:
    await reply.pieces(WORD, answers.end())
    await reply.finish()


@pytest.mark.parametrize("stream", [False, True])
async def test_drain_cuts_off_what_is_left_at_its_deadline(stream: bool) -> None:
    """A request that does not end gets an error: an event without an end mark, or a 503; its leg is
    closed.

    The connection ends in the middle of the stream: no client's pool takes it for the next request.
    """
    async with world(deadlines={"drain": 0.15}) as w:
        w.decode[0].script(scripts.streams(WORD, then="stall") if stream else scripts.stall)
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=stream))
        await w.decode[0].asked()
        head = await client.head() if stream else None
        if stream:
            assert await client.piece() == WORD
        await asyncio.wait_for(w.drain(), LONG)
        answer = await (client.rest(head) if head else client.answer())
        assert b"shutting down" in answer.body
        assert b"[DONE]" not in answer.body
        assert answer.status == (200 if stream else 503)
        assert answer.ended is not stream
        assert not stream or await client.closed()
        assert w.metric("pdproxy_deadline_total", wait="drain") == 1
        await asyncio.wait_for(w.decode[0].requests[0].left.wait(), LONG)
        assert (await w.ended()).outcome == "capacity"


async def test_drain_sees_abandoned_kv_home() -> None:
    """A prefill whose client has left is awaited, and its KV released, before the process ends."""
    async with world() as w:
        go = asyncio.Event()
        w.prefill[0].script(scripts.gate(go, prefill))
        client = await w.client()
        client.post(COMPLETIONS, completion())
        await w.prefill[0].asked()
        client.close()
        await w.ended()
        drain = asyncio.create_task(w.drain())
        await asyncio.sleep(0.05)
        assert not drain.done()
        go.set()
        await asyncio.wait_for(drain, LONG)
        assert w.books.endings == {"released": 1}


SERVE = textwrap.dedent(
    """
    import sys
    from pdproxy.app.server import run
    from pdproxy.settings.listen import Listen
    from pdproxy.settings.schema import Deadlines, Settings
    from pdproxy.settings.engines import ConfiguredEngine
    from pdproxy.settings.pools import Pool
    port, prefill, decode = sys.argv[1:]
    nodes = (ConfiguredEngine(url=prefill, role="prefill"), ConfiguredEngine(url=decode, role="decode"))
    listen, deadlines = Listen(port=int(port), linger=0), Deadlines(drain=5)
    sys.exit(run(Settings(listen=listen, pools=(Pool(nodes=nodes),), deadlines=deadlines)))
    """  # noqa: E501
)


async def ready(port: int) -> bool:
    """Whether a proxy says that it is ready."""
    with contextlib.suppress(OSError, EOFError):
        probe = await Client.connect(port)
        try:
            probe.send(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
            return (await probe.answer()).status == 200
        finally:
            probe.close()
    return False


@pytest.mark.parametrize(
    ("signals", "code"), [([signal.SIGTERM], 0), ([signal.SIGINT, signal.SIGINT], 130)]
)
async def test_the_process_ends_in_order(signals: list[signal.Signals], code: int) -> None:
    """SIGTERM: the stream ends, then exit code 0. A second Ctrl-C: at once, 130."""
    books = Books()
    engines = [FakeEngine("prefill", books), FakeEngine("decode", books)]
    for engine in engines:
        await engine.listen()
    go = asyncio.Event()
    engines[1].script(scripts.after_word(go, _rest))
    port = free_port()
    process = start(
        SERVE, [str(port), *(engine.url for engine in engines)], os.environ, subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(60):
            while not await ready(port):
                await asyncio.sleep(0.05)
            client = await Client.connect(port)
            client.post(COMPLETIONS, completion(stream=True))
            head = await client.head()
            for number in signals:
                process.send_signal(number)
                while await ready(port):  # two signals that come at once are one
                    await asyncio.sleep(0.05)
            if code == 0:
                assert process.returncode is None, "it waits for the stream"
                go.set()
                assert (await client.rest(head)).body == WORD + WORD + answers.end()
            assert await process.wait() == code
            assert await client.closed()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        for engine in engines:
            engine.stop()


async def test_a_port_that_is_taken() -> None:
    """The process names the setting, and ends with 2."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await piped(
            str(port), "http://127.0.0.1:1", "http://127.0.0.1:2", env=os.environ, code=SERVE
        )
        _, said = await process.communicate()
        assert process.returncode == 2
        assert f"listen.host:listen.port = 127.0.0.1:{port}" in said.decode()
