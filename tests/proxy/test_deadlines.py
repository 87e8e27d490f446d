"""Every wait has a deadline; each is reached here once and counted once."""

# Prefill, first token, between tokens, release and the abandoned prefill are reached beside what
# they end: test_prefill_fails, test_decode_fails, test_client_leaves.

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from pdproxy.app.server import uvicorn_config
from pdproxy.settings.limits import Deadlines
from pdproxy.settings.schema import Settings
from tests.fakes import answers, scripts
from tests.fakes.clock import ManualClock, later_turns
from tests.fakes.engine import FakeEngine, Reply
from tests.fakes.scripts import WORD
from tests.fakes.world import CHAT, COMPLETIONS, LONG, chat, completion, until, world


@contextmanager
def deaf(engine: FakeEngine) -> Iterator[None]:
    """Have an engine's port take no connection and refuse none: its backlog is full."""
    engine.stop()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", engine.port))
        listener.listen(0)
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", engine.port))
        try:
            yield
        finally:
            for filler in fillers:
                filler.close()


@pytest.mark.parametrize("role", [0, 1])
async def test_connect(role: int) -> None:
    """An engine that takes no connection is left for another within `connect`, and counted."""
    clock = ManualClock()
    async with world(2, 2, deadlines={"connect": 7}, clock=clock) as w:
        engine = (w.prefill, w.decode)[role][1]  # round robin begins behind the first
        with deaf(engine):
            asked = asyncio.create_task(w.ask(COMPLETIONS, completion(stream=True)))
            if role:
                await until(lambda: any(one.requests for one in w.prefill))
            await clock.reach(7)
            assert (await asked).status == 200
            await w.quiet()
        assert w.metric("pdproxy_deadline_total", wait="connect") == 1
        assert w.metric("pdproxy_node_up", node=engine.url) == 0


async def test_queue() -> None:
    """A request that gets no place in time is a 503 that may be retried."""
    async with world(deadlines={"queue": 0.1}, limits={"max_inflight": 1}) as w:
        w.decode[0].script(scripts.streams(WORD, then="stall"))
        first = await w.client()
        first.post(COMPLETIONS, completion(stream=True))
        await first.head()
        answer = await w.ask(COMPLETIONS, completion())
        assert answer.status == 503
        assert answer.header("retry-after") == "1"
        assert "no place came free" in answer.json["error"]["message"]
        assert w.metric("pdproxy_deadline_total", wait="queue") == 1
        assert (await w.ended()).outcome == "capacity"
        first.close()


async def test_client_body() -> None:
    """A body that never becomes whole: a 408, the connection is closed, no engine asked."""
    async with world(deadlines={"client_body": 0.1}) as w:
        client = await w.client()
        client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (408, "close")
        assert answer.json["error"]["type"] == "RequestTimeout"
        assert await client.closed()
        assert w.metric("pdproxy_deadline_total", wait="client_body") == 1
        assert not w.prefill[0].requests


def _uploads(path: str, size: int) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
        f"{size}\r\n\r\n"
    )
    return head.encode()


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
async def test_a_large_body_over_a_slow_network(path: str) -> None:
    """It takes as long as it takes while enough of it comes; nothing is counted as late."""
    clock = ManualClock()
    content = json.dumps(completion(user="x" * 300_000)).encode()
    async with world(clock=clock, deadlines={"client_body": 60, "total": 3600}) as w:
        client = await w.client()
        client.send(_uploads(path, len(content)))
        for start in range(0, len(content), 80_000):
            before = w.body_bytes
            client.send(content[start : start + 80_000])
            if start + 80_000 < len(content):
                await until(lambda before=before: w.body_bytes >= before + 80_000)  # type: ignore[misc]
                await clock.advance(59)
        assert (await client.answer()).status == 200
        assert w.metric("pdproxy_deadline_total", wait="client_body") == 0


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
@pytest.mark.parametrize(("rate", "piece"), [(1024, 60_000), (0, 0)])
async def test_a_body_that_trickles(path: str, rate: int, piece: int) -> None:
    """Too few bytes in `client_body`: 408, whatever came before. With a rate of 0, one byte is
    enough, none is not.
    """
    clock = ManualClock()
    async with world(
        clock=clock, deadlines={"client_body": 60, "total": 3600}, limits={"min_send_rate": rate}
    ) as w:
        client = await w.client()
        client.send(_uploads(path, 1_000_000))
        for size in (70_000 if rate else 1, piece):
            before = w.body_bytes
            client.send(b" " * size)
            await until(lambda before=before, size=size: w.body_bytes >= before + size)  # type: ignore[misc]
            await clock.reach(60)
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (408, "close")
        assert f"{piece} bytes in 60 s" in answer.json["error"]["message"]
        assert await client.closed()
        assert w.metric("pdproxy_deadline_total", wait="client_body") == 1


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
async def test_a_body_that_is_never_complete(path: str) -> None:
    """A client that sends just enough in each `client_body` holds its connection for no longer than
    a request may take.
    """
    clock = ManualClock()
    async with world(
        clock=clock, deadlines={"client_body": 60, "total": 150}, limits={"min_send_rate": 1}
    ) as w:
        client = await w.client()
        client.send(_uploads(path, 1_000_000))
        for number, seconds in enumerate((60, 60, 30), 1):
            client.send(b" " * 60)
            await until(lambda number=number: w.body_bytes == 60 * number)  # type: ignore[misc]
            await clock.reach(seconds)
        answer = await client.answer()
        assert (answer.status, answer.json["error"]["message"]) == (
            408,
            "The body was not complete in 150 s",
        )


async def test_a_connection_that_never_asks_anything() -> None:
    """It is closed after `client_head`; one that has asked is kept for the next request."""
    async with world(deadlines={"client_head": 0.15}) as w:
        mute, kept = await w.client(), await w.client()
        kept.post(COMPLETIONS, completion())
        assert (await kept.answer()).status == 200
        assert await mute.closed()
        kept.post(COMPLETIONS, completion())
        assert (await kept.answer()).status == 200


async def test_a_connection_without_a_request_is_kept_for_long() -> None:
    """Longer than any balancer keeps its own ones: for 75 s, or what the settings say. Then it is
    closed.
    """
    async with world() as w:
        assert uvicorn_config(w.proxy).timeout_keep_alive == 75

    def shorter(settings: Settings) -> Settings:
        return msgspec.structs.replace(
            settings, listen=msgspec.structs.replace(settings.listen, keep_alive=0.2)
        )

    async with world(adjust=shorter) as w:
        client = await w.client()
        client.post(COMPLETIONS, completion())
        assert (await client.answer()).status == 200
        assert await client.closed()


@pytest.mark.parametrize("stream", [False, True])
async def test_total(stream: bool) -> None:
    """A request that takes too long in all: 504 before data, an error event after, on a connection
    that is kept.
    """
    clock = ManualClock()
    async with world(deadlines={"total": 7}, clock=clock) as w:
        w.decode[0].script(scripts.streams(WORD, then="stall") if stream else scripts.stall)
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=stream))
        await w.decode[0].asked()
        head = await client.head() if stream else None
        await clock.reach(7)
        answer = await (client.rest(head) if head else client.answer())
        assert answer.status == (200 if stream else 504)
        if stream:
            assert answer.events[0] == WORD
            assert b'"code":504' in answer.events[1]
            assert len(answer.events) == 2
            assert answer.ended
            client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await client.answer()).status == 200
        else:
            assert answer.json["error"]["type"] == "GatewayTimeoutError"
        assert w.metric("pdproxy_deadline_total", wait="total") == 1
        assert w.metric("pdproxy_deadline_total", wait="first_token") == 0
        assert (await w.ended()).outcome == "engine"
        await asyncio.wait_for(w.decode[0].requests[0].left.wait(), LONG)


async def test_thoughts_that_are_kept_back_have_no_first_token_deadline() -> None:
    """With `include_reasoning: false` an engine says nothing while it thinks: it may take until
    `total`, as if unstreamed.
    """
    thought, clock = asyncio.Event(), ManualClock()

    async def think(reply: Reply) -> None:
        await reply.start()
        await reply.piece(answers.role())
        await thought.wait()
        await reply.pieces(scripts.CHAT_WORD, answers.end(chat=True))
        await reply.finish()

    async with world(deadlines={"first_token": 7}, clock=clock) as w:
        for hidden in (True, False):
            thought.clear()
            w.decode[0].script(think)
            client = await w.client()
            client.post(CHAT, chat(stream=True, include_reasoning=not hidden))
            await w.decode[0].asked(2 - hidden)
            if hidden:
                await clock.advance(10)
                thought.set()
            else:
                await clock.reach(7)
            assert (await client.answer()).status == 200
            assert w.metric("pdproxy_deadline_total", wait="first_token") == (not hidden)


async def test_probe() -> None:
    """An engine whose health route is late three times in a row is not used, and /ready says so."""
    async with world() as w:
        # now that engines are up: their answers may take longer
        w.proxy.admin.deadlines = Deadlines(probe=0.1)
        w.decode[0].admin["/health"] = scripts.stall
        for late in range(1, 4):
            assert (await w.get("/ready")).status == 200
            await w.proxy.prober.probe(w.proxy.engines[w.decode[0].url], scrape=False)
            assert w.metric("pdproxy_deadline_total", wait="probe") == late
        ready = await w.get("/ready")
        assert ready.status == 503
        assert w.decode[0].url in ready.json["reason"]
        assert "/health did not answer in 0.1 s" in ready.json["reason"]


BIG = answers.piece(False, "x" * 30_000)


async def test_a_client_that_does_not_read_pauses_the_decode_engine_and_goes_on() -> None:
    """Backpressure reaches the engine: its writes stop; once the client reads, everything arrives,
    in order.
    """
    state = {"sent": 0}

    async def flood(reply: Reply) -> None:
        await reply.start()
        for _ in range(600):
            await reply.piece(BIG)
            state["sent"] += 1
        await reply.pieces(answers.end())
        await reply.finish()

    async with world() as w:
        w.decode[0].script(flood)
        client = await w.client(receive_buffer=16384)
        client.post(COMPLETIONS, completion(stream=True))
        head = await client.head()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        last = -1
        while state["sent"] != last:
            last = state["sent"]
            await later_turns()
        assert last < 500, "18 MB are not held for a client that does not read"
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await client.rest(head)
        assert answer.body == BIG * 600 + answers.end()
        assert (await w.ended()).outcome == "ok"


async def test_client_write() -> None:
    """A client that never reads on is dropped at its deadline: both connections close, nothing is
    held for it.
    """

    async def flood(reply: Reply) -> None:
        await reply.start()
        while True:
            await reply.piece(BIG)

    async with world(deadlines={"client_write": 0.3}) as w:
        w.decode[0].script(flood)
        client = await w.client(receive_buffer=16384)
        client.post(COMPLETIONS, completion(stream=True))
        await client.head()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        request = w.decode[0].requests[0]
        await asyncio.wait_for(request.left.wait(), LONG)
        assert w.metric("pdproxy_deadline_total", wait="client_write") == 1
        assert w.metric("pdproxy_deadline_total", wait="between_tokens") == 0
        assert (await w.ended()).outcome == "client_left"
        await until(lambda: not w.connections)


async def test_client_write_of_a_whole_answer() -> None:
    """An answer that isn't streamed and larger than the socket takes is no reason to keep its
    client for ever, either.
    """
    async with world(deadlines={"client_write": 0.3}, leaves=True) as w:
        w.decode[0].script(scripts.whole(answers.whole(False, [1, 2, 3], "x" * (8 << 20), 5)))
        client = await w.client(receive_buffer=16384)
        client.post(COMPLETIONS, completion())
        await client.head()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: not w.connections)
        assert w.metric("pdproxy_deadline_total", wait="client_write") == 1


async def test_a_slow_client_is_not_taken_for_a_silent_engine() -> None:
    """While the client does not read, the wait between tokens does not run."""

    clock, sent = ManualClock(), 0

    async def flood(reply: Reply) -> None:
        nonlocal sent
        await reply.start()
        for _ in range(300):
            await reply.piece(BIG)
            sent += 1
        await reply.pieces(answers.end())
        await reply.finish()

    async with world(deadlines={"between_tokens": 7, "client_write": 60}, clock=clock) as w:
        w.decode[0].script(flood)
        client = await w.client(receive_buffer=16384)
        client.post(COMPLETIONS, completion(stream=True))
        head = await client.head()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        last = -1
        while sent != last:
            last = sent
            await asyncio.sleep(0.1)
        await clock.advance(20)
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await client.rest(head)
        assert answer.body.endswith(answers.DONE)
        assert b'"error"' not in answer.body
