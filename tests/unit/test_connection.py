"""What one kept connection promises to the requests that follow one another on it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator

import pytest

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import EngineError, Wait
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.upstream.client import EngineClient
from pdproxy.upstream.connection import (
    LARGE_READ,
    MAX_HEAD,
    TWO_READS,
    EngineConnection,
    Headers,
    Message,
)
from tests.fakes.legs import CHUNKED, LAST, Heard
from tests.fuzz.ingress import Transport

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Sink:
    """Notes what it hears."""

    def __init__(self) -> None:
        self.body = b""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def head(self, status: int, headers: Headers) -> None:
        assert status == 200

    def data(self, chunk: bytes) -> None:
        self.body += chunk

    def end(self) -> None:
        self.over.set_result(None)

    def failed(self, error: EngineError) -> None:
        self.over.set_exception(error)


class Server:
    """Answers what a test tells it to, on each of its connections."""

    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []
        self.heard: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            while await reader.readuntil(b"\r\n\r\nx"):
                self.heard.put_nowait(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, EngineClient]]:
    """A server and the client of it."""
    told = Server()
    listening = await asyncio.start_server(told.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    client = EngineClient(
        f"http://127.0.0.1:{port}",
        connect_timeout=30,
        keepalive=60,
        clock=Clock(),
        budget=AnswerBudget(),
    )
    yield told, client
    client.close()
    listening.close()


def request(client: EngineClient) -> Message:
    return client.request("/v1/completions", (), b"x")


async def test_a_finished_leg_never_touches_the_next_request(
    server: tuple[Server, EngineClient],
) -> None:
    """Whoever held a leg may close, pause or time it out after its end: the request that came next
    goes on undisturbed.
    """
    told, client = server
    first = Sink()
    leg = await client.send(request(client), first)
    (await told.heard.get()).write(WHOLE)
    await first.over
    second = Sink()
    await client.send(request(client), second)
    writer = await told.heard.get()
    assert len(told.writers) == 1, "the second request is on the first one's connection"
    leg.let_finish(0)
    leg.pause()
    leg.close()
    await asyncio.sleep(0)
    writer.write(WHOLE)
    async with asyncio.timeout(30):
        await second.over
    assert second.body == b"ok"


async def test_an_unfinished_leg_is_dropped_after_its_grace(
    server: tuple[Server, EngineClient],
) -> None:
    """An engine that never ends an answer whose end mark was seen loses the connection, so that
    none is occupied for ever.
    """
    told, client = server
    sink = Sink()
    leg = await client.send(request(client), sink)
    await told.heard.get()
    leg.let_finish(0.01)
    async with asyncio.timeout(30):
        while not told.writers[0].is_closing():
            await asyncio.sleep(0.01)
    assert not sink.over.done(), "a leg that was given up is told nothing"


async def test_a_paused_leg_leaves_no_pause_behind(server: tuple[Server, EngineClient]) -> None:
    """A client that stopped reading in its last moment must not freeze the next request on that
    engine connection.
    """
    told, client = server
    first = Sink()
    leg = await client.send(request(client), first)
    writer = await told.heard.get()
    writer.write(WHOLE)
    leg_paused_in_data = first.data

    def data(chunk: bytes) -> None:
        leg_paused_in_data(chunk)
        leg.pause()

    first.data = data  # type: ignore[method-assign]
    await first.over
    second = Sink()
    await client.send(request(client), second)
    assert (await told.heard.get()) is writer
    writer.write(WHOLE)
    async with asyncio.timeout(30):
        await second.over
    assert second.body == b"ok"


async def test_connections_that_idle_are_not_kept_for_ever() -> None:
    """An engine that closes none of them keeps no more open than were used lately."""
    told = Server()
    listening = await asyncio.start_server(told.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    client = EngineClient(
        f"http://127.0.0.1:{port}",
        connect_timeout=30,
        keepalive=0.05,
        clock=Clock(),
        budget=AnswerBudget(),
    )
    sinks = [Sink() for _ in range(5)]
    for sink in sinks:
        await client.send(request(client), sink)
    for _ in sinks:
        (await told.heard.get()).write(WHOLE)
    await asyncio.gather(*(sink.over for sink in sinks))
    await asyncio.sleep(0.1)
    last = Sink()
    await client.send(request(client), last, fresh=True)
    (await told.heard.get()).write(WHOLE)
    await last.over
    assert repr(client).endswith(" 1 idle>")
    client.close()
    listening.close()


def test_a_large_body_is_not_copied() -> None:
    """It is written behind its head; a small one goes with it in one write."""
    client = EngineClient(
        "http://engine:8000", connect_timeout=1, keepalive=1, clock=Clock(), budget=AnswerBudget()
    )
    large = b"x" * 70_000
    made = client.request("/v1/completions", (), large)
    assert isinstance(made, tuple)
    assert made[1] is large
    assert isinstance(client.request("/v1/completions", (), b"x" * 60_000), bytes)


async def test_what_came_during_a_hold_up_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that stood still reads its sockets before it judges a deadline."""
    heard, held_up, said = threading.Event(), threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            taken, _ = listener.accept()
            with taken:
                taken.recv(4096)
                heard.set()
                held_up.wait(30)
                taken.sendall(WHOLE)
                said.set()
                taken.recv(4096)

        loop = asyncio.get_running_loop()
        serving = loop.run_in_executor(None, serve)
        port = listener.getsockname()[1]
        client = EngineClient(
            f"http://127.0.0.1:{port}",
            connect_timeout=30,
            keepalive=60,
            clock=Clock(),
            budget=AnswerBudget(),
        )
        asked = asyncio.ensure_future(client.whole(request(client), 60, Wait.RELEASE))
        while not heard.is_set():
            await asyncio.sleep(0.001)
        held_up.set()
        assert said.wait(30)
        time_of = loop.time
        # the loop has stood still for so long
        monkeypatch.setattr(loop, "time", lambda: time_of() + 100)
        assert (await asked).body == b"ok"
        client.close()
        await serving


async def test_others_have_their_turn_behind_a_large_read() -> None:
    """An engine that sends as fast as it can is read again in the next turn of the loop, unless its
    client has paused it.
    """

    transport = Transport()
    connection = EngineConnection("engine", lambda _: None, lambda _: None)
    connection.connection_made(transport)
    leg = connection.send(b"", Heard())
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * LARGE_READ)
    assert transport.reading_paused
    await asyncio.sleep(0)
    assert not transport.reading_paused
    connection.data_received(b"x" * LARGE_READ)
    leg.pause()
    await asyncio.sleep(0)
    assert transport.reading_paused, "the pause of the client stays"
    leg.resume()
    assert not transport.reading_paused


@pytest.mark.parametrize(
    ("length", "waits"), [(TWO_READS, False), (TWO_READS + 1, True)], ids=["fits", "does not"]
)
async def test_an_answer_of_two_reads_needs_one_turn(length: int, waits: bool) -> None:
    """Its second read comes at once. A third never does: others have their turn first."""
    transport = Transport()
    connection = EngineConnection("engine", lambda _: None, lambda _: None)
    connection.connection_made(transport)
    connection.send(b"", Heard())
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % length
    connection.data_received(head + b"x" * LARGE_READ)
    assert transport.reading_paused == waits
    await asyncio.sleep(0)
    connection.data_received(b"x" * LARGE_READ)
    assert transport.reading_paused


class Stuck(Transport):
    """A socket's end whose other side does not read: so many bytes wait."""

    waiting = 0

    def get_write_buffer_size(self) -> int:
        return self.waiting


@pytest.mark.parametrize("waiting", [0, 1])
async def test_a_connection_with_unsent_bytes_is_not_used_again(waiting: int) -> None:
    """An engine that answers before it has read the whole request: the next one would wait behind
    the rest of it.
    """
    free: list[EngineConnection] = []
    transport, heard = Stuck(), Heard()
    connection = EngineConnection("engine", free.append, lambda _: None)
    connection.connection_made(transport)
    connection.send((b"head", b"x" * 100_000), heard)
    transport.waiting = waiting
    connection.data_received(WHOLE)
    assert heard.ending == "whole", "its answer is whole all the same"
    assert (free, transport.closing) == (([], True) if waiting else ([connection], False))


async def test_a_request_behind_an_early_answer_gets_a_connection_of_its_own(
    server: tuple[Server, EngineClient],
) -> None:
    """It is answered at once, although the engine never reads the rest of the request before."""
    told, client = server
    first = Sink()
    await client.send(client.request("/v1/completions", (), b"x" * (64 << 20)), first)
    writer = await told.heard.get()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(WHOLE)
    await first.over
    second = Sink()
    await client.send(request(client), second)
    async with asyncio.timeout(30):
        other = await told.heard.get()
    assert other is not writer
    other.write(WHOLE)
    await second.over


async def test_what_forwards_reads_is_forgotten_with_its_answer() -> None:
    """The next answer's chunks go to its own sink."""
    forwarded: list[bytes] = []

    def forward(data: bytes) -> int:
        if data == LAST:
            return 0
        forwarded.append(data)
        return len(data)

    transport, heard = Transport(), Heard()
    connection = EngineConnection("engine", lambda _: None, lambda _: None)
    connection.connection_made(transport)
    connection.send(b"", heard).offer_reads(forward)
    connection.data_received(CHUNKED + b"1\r\na\r\n")
    connection.data_received(b"1\r\nb\r\n")
    assert forwarded == [b"1\r\nb\r\n"]
    connection.data_received(LAST)
    assert heard.ending == "whole"
    after = Heard()
    connection.send(b"", after)
    connection.data_received(CHUNKED + b"1\r\nc\r\n")
    connection.data_received(b"1\r\nd\r\n")
    assert len(forwarded) == 1
    assert after.body == b"cd"


async def test_a_read_that_begins_within_a_size_is_not_taken_for_chunks() -> None:
    """Although the rest of the size, and the begin of what its chunk holds, look like one."""
    heard = Heard()
    connection = EngineConnection("engine", lambda _: None, lambda _: None)
    connection.connection_made(Transport())
    connection.send(b"", heard).offer_reads(lambda _: 0)
    inside = b"a" * 0xE + b"\r\n" + b"b" * 0xE
    size = b"%x\r\n" % len(inside)
    for read in (CHUNKED + b"1\r\na\r\n", size[:1], size[1:] + inside + b"\r\n", LAST):
        connection.data_received(read)
    assert (heard.ending, heard.body) == ("whole", b"a" + inside)


async def test_a_long_body_is_not_counted_with_what_is_no_body() -> None:
    """Behind it, a read may hold a part of a chunk's frame alone."""
    transport, heard = Transport(), Heard()
    connection = EngineConnection("engine", lambda _: None, lambda _: None)
    connection.connection_made(transport)
    connection.send(b"", heard)
    connection.data_received(CHUNKED + b"%x\r\n" % (2 * MAX_HEAD) + b"x" * (2 * MAX_HEAD - 1))
    for read in (b"x", b"\r", b"\n", b"1", b"\r\ny\r\n", LAST):
        connection.data_received(read)
    assert heard.ending == "whole"
    assert len(heard.body) == 2 * MAX_HEAD + 1
