"""When a connection to an engine is used again, and when a request may be sent twice: early
answers, stale ends, failures.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import h11
import pytest

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import (
    ConnectionLostError,
    EngineError,
    EngineTimeoutError,
    StaleConnectionError,
    Wait,
)
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.upstream.client import EngineClient, Pending
from tests.fakes.legs import CHUNKED, HEAD, LAST, LIKE, OK, Heard, Wire

PATIENCE = 30.0
LARGE = b"x" * (8 << 20)
"""More than the sockets' buffers take."""
CLOSE = HEAD + b"connection: close\r\ncontent-length: 2\r\n\r\nok"


class Peer:
    """An engine's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def head(self) -> int:
        """Read a request's head; return its body's length."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n"), head
        return int(head.split(b"content-length: ")[1].split(b"\r\n")[0])

    async def request(self) -> bytes:
        """Read a whole request; return its body."""
        return await self._reader.readexactly(await self.head())

    async def body(self, length: int) -> bytes:
        return await self._reader.readexactly(length)

    def say(self, data: bytes) -> None:
        self._writer.write(data)

    def end(self) -> None:
        """Say no more, and go on reading."""
        self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()

    async def closed(self) -> None:
        """Wait until the client has closed, reading what comes."""
        try:
            while await self._reader.read(1 << 20):
                pass
        except ConnectionError:
            pass


Script = Callable[[Peer], Awaitable[None]]


class Engine:
    """A server with a script for each connection, in their order."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.connections = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script = self.scripts[self.connections]
        self.connections += 1
        self._tasks.append(asyncio.ensure_future(script(Peer(reader, writer))))
        await asyncio.wait(self._tasks[-1:])
        writer.close()

    async def done(self) -> None:
        """Wait until every script is over, and see that none failed."""
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*self._tasks)
        assert self.connections == len(self.scripts)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Engine, EngineClient]]:
    """An engine and the client of it. At the end all of the engine's scripts have run."""
    engine = Engine()
    listening = await asyncio.start_server(engine.serve, "127.0.0.1", 0, limit=1 << 16)
    port = listening.sockets[0].getsockname()[1]
    client = EngineClient(
        f"http://127.0.0.1:{port}",
        connect_timeout=PATIENCE,
        keepalive=60,
        clock=Clock(),
        budget=AnswerBudget(),
    )
    yield engine, client
    client.close()
    await engine.done()
    listening.close()


async def ask(client: EngineClient, body: bytes = b"{}", timeout: float = PATIENCE) -> bytes:
    """Ask and return the answer's body."""
    request = client.request("/v1/completions", (), body)
    return (await client.whole(request, timeout, Wait.TOTAL)).body


def answering(*said: bytes) -> Script:
    """Answer so many requests in this way, then wait for the client to close."""

    async def script(peer: Peer) -> None:
        for data in said:
            await peer.request()
            peer.say(data)
        await peer.closed()

    return script


# -- answers before the request is written


async def test_an_early_answer_and_the_end_of_the_connection(
    pair: tuple[Engine, EngineClient],
) -> None:
    """The answer counts although the request was never whole; nothing more of it is sent, and the
    connection is not kept.
    """
    engine, client = pair

    async def script(peer: Peer) -> None:
        await peer.head()
        peer.say(CLOSE)
        peer.end()
        await peer.closed()

    engine.scripts = [script, answering(OK)]
    assert await ask(client, LARGE) == b"ok"
    assert await ask(client) == b"ok"


# -- what is kept


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (OK, True),
        (OK.replace(b"200 OK", b"400 Bad Request"), True),
        (OK.replace(b"200 OK", b"500 Internal Server Error"), True),
        (CHUNKED + LIKE + LAST, True),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n" + OK, True),
        (CLOSE, False),
        (OK.replace(b"1.1", b"1.0"), False),
        (OK + OK, False),
        (OK + b"garbage", False),
    ],
)
async def test_what_is_used_again(
    pair: tuple[Engine, EngineClient], said: bytes, kept: bool
) -> None:
    """A good end of any status keeps the connection; an announced end, or anything behind the
    answer, does not.
    """
    engine, client = pair
    engine.scripts = [answering(said, OK)] if kept else [answering(said), answering(OK)]
    assert await ask(client) in (b"ok", b"hello")
    assert await ask(client) == b"ok"


@pytest.mark.parametrize("said", [b"", HEAD, CHUNKED + LIKE, OK[:-1]])
async def test_nothing_is_used_again_after_a_time_out(
    pair: tuple[Engine, EngineClient], said: bytes
) -> None:
    """A request that was given up takes its connection along, so that its late answer is nobody
    else's.
    """
    engine, client = pair
    engine.scripts = [answering(said), answering(OK, OK)]
    with pytest.raises(EngineTimeoutError):
        await ask(client, timeout=0.05)
    assert [await ask(client), await ask(client)] == [b"ok", b"ok"]


@pytest.mark.parametrize("said", [b"garbage\r\n\r\n", CHUNKED + b"zz\r\n", HEAD + b"x : y\r\n\r\n"])
async def test_nothing_is_used_again_after_a_failure(
    pair: tuple[Engine, EngineClient], said: bytes
) -> None:
    """What is no HTTP is a failure, not asked again, and ends the connection."""
    engine, client = pair
    engine.scripts = [answering(said), answering(OK)]
    with pytest.raises(EngineError, match="sends no valid HTTP"):
        await ask(client)
    assert await ask(client) == b"ok"


@pytest.mark.parametrize("late", [OK, b"x", LIKE])
async def test_what_comes_unasked_ends_the_connection(
    pair: tuple[Engine, EngineClient], late: bytes
) -> None:
    """Bytes of an idle connection are not the next request's answer."""
    engine, client = pair
    go, gone = asyncio.Event(), asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.say(OK)
        await go.wait()
        peer.say(late)
        await peer.closed()
        gone.set()

    engine.scripts = [script, answering(OK)]
    assert await ask(client) == b"ok"
    go.set()
    await asyncio.wait_for(gone.wait(), PATIENCE)
    assert await ask(client) == b"ok"


@pytest.mark.parametrize("fresh", [False, True])
async def test_a_request_that_can_not_be_made(
    pair: tuple[Engine, EngineClient], fresh: bool
) -> None:
    """Its connection is there for the next one, whether it was kept or is new."""
    engine, client = pair
    engine.scripts = [answering(OK, OK)] if not fresh else [answering(OK), answering(OK)]

    def broken() -> bytes:
        raise ValueError("no body")

    assert await ask(client) == b"ok"
    with pytest.raises(ValueError, match="no body"):
        await client.send(broken, Pending(AnswerBudget().share()), fresh=fresh)
    count = 2 if fresh else 1
    assert repr(client).endswith(f": {count} connections, {count} idle>")
    assert await ask(client) == b"ok"


# -- stale connections


@pytest.mark.parametrize("how", [Peer.close, Peer.abort])
async def test_a_connection_that_closes_as_it_is_used(
    pair: tuple[Engine, EngineClient], how: Callable[[Peer], None]
) -> None:
    """A kept connection that ends without a byte when a request meets it: the request is sent once
    more, on a new one.
    """
    engine, client = pair

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.say(OK)
        await peer.request()
        how(peer)

    engine.scripts = [script, answering(OK)]
    assert [await ask(client), await ask(client)] == [b"ok", b"ok"]


async def test_a_connection_that_closed_while_it_was_idle(
    pair: tuple[Engine, EngineClient],
) -> None:
    """It is out of the pool as soon as its end is seen."""
    engine, client = pair

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.say(OK)

    engine.scripts = [script, answering(OK)]
    assert await ask(client) == b"ok"
    async with asyncio.timeout(PATIENCE):
        while "0 connections" not in repr(client):
            await asyncio.sleep(0.001)
    assert await ask(client) == b"ok"


@pytest.mark.parametrize(
    "reads",
    [[HEAD], [b"H"], [b"HTTP/1.1 100 Continue\r\n\r\n"], [CHUNKED, LIKE], [CHUNKED, LIKE, b"0"]],
)
@pytest.mark.parametrize("broken", [None, ConnectionResetError()])
async def test_an_engine_that_began_to_answer_is_not_stale(
    reads: list[bytes], broken: Exception | None
) -> None:
    """One byte shows that it saw the request, which must not be sent again as it is."""
    wire = Wire()
    wire.ask(Heard(), [OK])
    heard = wire.ask(Heard(), reads)
    wire.connection.connection_lost(broken)
    assert type(heard.error) is ConnectionLostError


@pytest.mark.parametrize("broken", [None, ConnectionResetError(), BrokenPipeError()])
@pytest.mark.parametrize(
    ("before", "within", "stale"),
    [(1, 10.0, True), (3, 10.0, True), (0, 10.0, False), (1, 0.0, False)],
)
async def test_what_counts_as_stale(
    monkeypatch: pytest.MonkeyPatch,
    before: int,
    within: float,
    stale: bool,
    broken: Exception | None,
) -> None:
    """A connection that was used before and ends at once; neither a new one nor one that ends
    later.
    """
    monkeypatch.setattr("pdproxy.upstream.connection.STALE_WITHIN", within)
    wire = Wire()
    for _ in range(before):
        wire.ask(Heard(), [CHUNKED, LIKE, LAST])
    heard = wire.ask(Heard(), [])
    wire.connection.connection_lost(broken)
    assert type(heard.error) is (StaleConnectionError if stale else ConnectionLostError)


async def test_an_answer_without_a_frame_that_breaks_is_not_whole() -> None:
    """The end of the connection ends such an answer; a reset does not."""
    wire = Wire()
    heard = wire.ask(Heard(), [HEAD + b"\r\n", LIKE])
    wire.connection.connection_lost(ConnectionResetError())
    assert (heard.body, heard.ending) == (LIKE, "failed")


# -- requests


@pytest.mark.parametrize("body", [b"", b"{}", LIKE, b"\r\n\r\n" + OK, b"x" * 100_000], ids=len)
async def test_requests_as_another_parser_reads_them(body: bytes) -> None:
    """One request of the right length, with one host and the headers that were given."""
    client = EngineClient(
        "http://engine:8000",
        connect_timeout=1,
        keepalive=1,
        clock=Clock(),
        budget=AnswerBudget(),
        key=lambda: "k",
    )
    reader = h11.Connection(h11.SERVER)
    made = client.request("/v1/completions", ((b"x-request-id", b"a"),), body)
    reader.receive_data(made if isinstance(made, bytes) else b"".join(made))
    request = reader.next_event()
    assert isinstance(request, h11.Request)
    assert (request.method, request.target) == (b"POST", b"/v1/completions")
    assert sorted(request.headers) == sorted(
        [(b"host", b"engine:8000"), (b"content-type", b"application/json"), (b"content-length",
        b"%d" % len(body)),
         (b"x-request-id", b"a"), (b"authorization", b"Bearer k")]
    )  # fmt: skip
    read = b""
    while isinstance(event := reader.next_event(), h11.Data):
        read += bytes(event.data)
    assert isinstance(event, h11.EndOfMessage)
    assert (read, reader.trailing_data[0]) == (body, b"")
