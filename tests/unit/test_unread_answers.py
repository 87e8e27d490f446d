"""Clients that do not read: on a transport whose buffer drains when the test says so, before each
thing that answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from pdproxy.kit.errors import OverloadedError, RefusalReason
from pdproxy.observe.events import DeadlinePassed, Event, Evicted, Observers
from pdproxy.serving.access.clients import Clients
from pdproxy.serving.access.keys import Keys
from pdproxy.serving.request.incoming import Incoming
from pdproxy.web.admin.gate import Gate
from pdproxy.web.admin.protocol import admin_protocol
from pdproxy.web.connection_bounds import MAX_PARTS, MAX_PIPELINED, MAX_UNSENT
from pdproxy.web.cycle import GenerateCycle
from pdproxy.web.piecewise_transport import PIECE, PiecewiseTransport
from pdproxy.web.unread_answers import UnreadAnswers
from tests.fakes.clock import ManualClock
from tests.fuzz.ingress import Ingress, Transport

SIZE = 60_000
"""Bytes of an answer: of those that are written together with their head."""
HEAD = 400
"""An answer's head has fewer bytes."""
SECONDS = 60
"""The deadline of clients that do not read, as in `Ingress`."""


class Unread(Transport):
    """A socket's end: what is written waits until the test reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = self.high = 0
        self.paused = self.aborted = False
        self.protocol: Any = None

    def write(self, data: Any) -> None:
        super().write(data)
        self.waiting += len(data)
        if self.waiting > self.high and not self.paused:
            self.paused = True
            self.protocol.pause_writing()

    def read(self, size: int | None = None) -> None:
        """Have the client read so many bytes, None: all."""
        self.waiting = 0 if size is None else self.waiting - size
        if self.paused and self.waiting <= self.high // 4:
            self.paused = False
            self.protocol.resume_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high or 0

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def get_protocol(self) -> Any:
        return self.protocol

    def abort(self) -> None:
        if not self.aborted:
            self.closing = self.aborted = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)


class Large(Ingress):
    """An entry whose answers have `size` bytes, those of applications so many `pieces` of that."""

    def __init__(self, *, streams: bool = False, size: int = SIZE, pieces: int = 1) -> None:
        self.clock = ManualClock()
        self.events: list[Event] = []
        super().__init__(clock=self.clock)
        self.streams, self.size, self.pieces = streams, size, pieces
        self.bounds = self.path.bounds
        self.bounds.slow_readers.observers = self.bounds.unread_answers._observers = Observers(
            [self]
        )

    def notify(self, event: Event) -> None:
        self.events.append(event)

    async def _generate(self, incoming: Incoming, output: GenerateCycle) -> None:
        self.seen.served.append((b"POST", b"", b""))
        if not self.streams:
            output.whole(200, [], b"x" * self.size)
            return
        output.begin([])
        output.write(b"x" * self.size)
        output.finish()

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        self.seen.served.append((b"GET", b"", b""))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for left in reversed(range(self.pieces)):
            await send(
                {"type": "http.response.body", "body": b"x" * self.size, "more_body": left > 0}
            )

    def open(self, *, admin: bool = False, tls: bool = False) -> tuple[Any, Unread]:
        """A connection: its protocol and its transport."""
        config = self.config
        if admin:
            gate = Gate(self._application, Keys(), Observers([self]), is_tcp=False)
            http = admin_protocol(self.bounds, Observers([self]), gate)
            config = uvicorn.Config(
                self._application,
                http=http,
                log_config=None,
                lifespan="off",
                ws="none",
                interface="asgi3",
            )
            config.load()
        transport = Unread()
        if tls:
            transport.get_extra_info = lambda name, default=None: name == "sslcontext" or default  # type: ignore[method-assign]
        loop = asyncio.get_running_loop()
        protocol = config.http_protocol_class(
            config=config, server_state=ServerState(), app_state={}, _loop=loop
        )  # type: ignore[call-arg]
        transport.protocol = protocol
        protocol.connection_made(transport)
        return protocol, transport


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


GENERATES = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
PAGE = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
KINDS: dict[str, tuple[bytes, dict[str, bool], dict[str, bool]]] = {
    "whole": (GENERATES, {}, {}),
    "stream": (GENERATES, {"streams": True}, {}),
    "page": (PAGE, {}, {}),
    "admin": (PAGE, {}, {"admin": True}),
    "whole, TLS": (GENERATES, {}, {"tls": True}),
}


@pytest.fixture(params=KINDS)
async def kind(
    request: pytest.FixtureRequest,
) -> tuple[Large, bytes, Callable[[], tuple[Any, Unread]]]:
    """An entry, a request, and what opens a connection there."""
    asked, made, opened = KINDS[request.param]
    entry = Large(**made)
    return entry, asked, lambda: entry.open(**opened)


Kind = tuple[Large, bytes, Callable[[], tuple[Any, Unread]]]


async def test_a_stream_of_an_application_waits_for_its_reader() -> None:
    """Piece by piece: one of them waits on the connection at most. The next request waits for the
    last of them.
    """
    entry = Large(pieces=5)
    protocol, transport = entry.open()
    protocol.data_received(PAGE * 2)
    for number in range(2 * entry.pieces):
        await turns()
        assert SIZE < transport.waiting < SIZE + HEAD
        assert entry.bounds.unread_answers.held == transport.waiting
        assert len(entry.seen.served) == 1 + number // entry.pieces
        transport.read()
    await turns()
    assert (transport.waiting, entry.bounds.unread_answers.held) == (0, 0)
    protocol.connection_lost(None)
    await turns()


@pytest.mark.parametrize("pipelined", [True, False])
async def test_who_does_not_read_gets_no_further_answer(kind: Kind, pipelined: bool) -> None:
    """The next request is not begun before the answer is read, however it came; each is served
    then. All bytes are counted.
    """
    entry, asked, opened = kind
    protocol, transport = opened()
    count = 10
    protocol.data_received(asked * (count if pipelined else 1))
    for number in range(1, count + 1):
        await turns()
        if not pipelined and number < count:
            protocol.data_received(asked)
            await turns()
        assert len(entry.seen.served) == number
        assert SIZE < transport.waiting < SIZE + HEAD
        assert entry.bounds.unread_answers.held == transport.waiting
        assert protocol.idle, "no engine works for it"
        transport.read()
    await turns()
    assert entry.bounds.unread_answers.held == 0
    assert not transport.closing
    assert len(entry.seen.served) == count
    protocol.connection_lost(None)
    await turns()


async def test_as_many_requests_wait_as_may(kind: Kind) -> None:
    """Those beyond are refused, as behind any request; what waits costs no answer."""
    entry, asked, opened = kind
    protocol, transport = opened()
    protocol.data_received(asked)
    await turns()
    protocol.data_received(asked * (MAX_PIPELINED + 10))
    await turns()
    assert len(entry.seen.served) == 1
    assert len(protocol.pipeline) == MAX_PIPELINED
    assert transport.waiting < SIZE + HEAD
    protocol.connection_lost(None)
    await turns()
    assert entry.bounds.unread_answers.held == 0


async def test_the_wait_for_a_reader_has_a_deadline(kind: Kind) -> None:
    """Then the client is dropped, whatever waits behind its answer, and the deadline counted."""
    entry, asked, opened = kind
    protocol, transport = opened()
    protocol.data_received(asked * 3)
    await turns()
    await entry.clock.advance(SECONDS - 1)
    assert not transport.aborted
    await entry.clock.advance(1)
    assert transport.aborted
    assert entry.events == [DeadlinePassed("client_write")]
    await turns()
    assert (len(entry.seen.served), entry.bounds.unread_answers.held, entry.clock.pending()) == (
        1,
        0,
        [],
    )


async def test_what_is_left_of_a_small_answer_has_a_deadline_too(kind: Kind) -> None:
    """Less waits than pauses anybody: the next request is served, but the client must read."""
    entry, asked, opened = kind
    entry.size = MAX_UNSENT // 2 - HEAD
    protocol, transport = opened()
    protocol.data_received(asked)
    await turns()
    assert (len(entry.seen.served), transport.paused, entry.bounds.unread_answers.held) == (
        1,
        False,
        0,
    )
    await entry.clock.advance(SECONDS)
    assert transport.aborted


async def test_without_space_the_oldest_goes(kind: Kind) -> None:
    """One bound for all of them: beyond it, the client with the most loses its oldest answer."""
    entry, asked, opened = kind
    entry.bounds.unread_answers.max_bytes = 3 * (SIZE + HEAD)
    connections = [opened() for _ in range(4)]
    for protocol, _ in connections:
        protocol.data_received(asked)
        await turns()
    assert [transport.aborted for _, transport in connections] == [True, False, False, False]
    assert entry.bounds.unread_answers.held == sum(one.waiting for _, one in connections[1:])
    assert entry.events == [Evicted("answer")]
    for protocol, transport in connections[1:]:
        protocol.connection_lost(None)
        assert not transport.aborted
    await turns()


async def test_it_gives_its_place_to_a_new_connection(kind: Kind) -> None:
    """With requests that wait as well: it is dropped, since no error could be read."""
    _, asked, opened = kind
    protocol, transport = opened()
    protocol.data_received(asked * 2)
    await turns()
    assert protocol.idle
    protocol.evict(OverloadedError("others wait", RefusalReason.CONNECTIONS))
    assert transport.aborted
    await turns()


async def test_the_rest_of_an_answer_comes_before_what_refuses_the_next_request() -> None:
    """A body that is refused while an answer waits to be read ends the connection behind that
    answer, whole.
    """
    entry = Large()
    protocol, transport = entry.open()
    protocol.data_received(PAGE)
    await turns()
    head = b"POST /elsewhere HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    protocol.data_received(head + b"1\r\nx\r\n" * (MAX_PARTS + 1))
    await turns()
    assert not transport.eof
    assert not transport.closing
    transport.read()
    assert transport.eof
    await turns()
    assert len(entry.seen.served) == 1
    assert transport.written.count(b"HTTP/1.1 ") == 1
    protocol.connection_lost(None)


@pytest.mark.parametrize("stuck", [True, False])
async def test_a_stream_that_breaks_off_does_not_wait_for_a_client_that_is_stuck(
    stuck: bool,
) -> None:
    """Closing would wait until all is read; one that reads gets all."""
    entry = Large()

    async def breaks(incoming: Incoming, output: GenerateCycle) -> None:
        output.begin([])
        output.write(b"x" * SIZE)
        if not stuck:
            transport.read()
        output.break_off()

    entry.path.generate = breaks
    protocol, transport = entry.open()
    protocol.data_received(GENERATES)
    await turns()
    assert (transport.aborted, transport.closing) == (stuck, True)
    if not stuck:
        protocol.connection_lost(None)
    await turns()
    assert entry.bounds.unread_answers.held == 0


def test_of_one_connection_the_last_count_is_the_count() -> None:
    """What has come to it is added, not what was counted before."""

    class Connection:
        def drop(self) -> None:
            """Nothing."""

    unread, client = UnreadAnswers(100, Observers([])), Clients().enter("a")
    one, other = Connection(), Connection()
    for size in (10, 30, 20):
        unread.hold(client, one, size)
        assert unread.held == size
    unread.hold(client, other, 5)
    unread.release(client, one)
    unread.release(client, one)
    assert unread.held == 5


class Hiding(Unread):
    """A socket's end with TLS: below it is a connection that takes all of a write, if it had less
    than `PIECE` before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.below = 0
        self.writes: list[int] = []

    def write(self, data: Any) -> None:
        self.writes.append(len(data))
        if self.below < PIECE:
            self.below += len(data)
        else:
            super().write(data)


@pytest.mark.parametrize("size", [1, PIECE, PIECE + 1, 5_000_000])
def test_tls_hides_no_more_than_two_pieces(size: int) -> None:
    """Of a write of any size; its protocol is told of a large one at its end."""

    class Told:
        count = 0

        def pause_writing(self) -> None:
            """Nothing."""

        def written_in_pieces(self) -> None:
            self.count += 1
            assert hides.below + hides.waiting == size

    hides = Hiding()
    hides.protocol = told = Told()
    transport = PiecewiseTransport(hides)
    transport.write(b"x" * size)
    assert sum(hides.writes) == size
    assert hides.below <= 2 * PIECE
    assert told.count == (size > PIECE)
    hides.abort = lambda: setattr(hides, "closing", True)  # type: ignore[method-assign]
    transport.abort()
    assert hides.closing
