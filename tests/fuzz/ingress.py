"""What must hold for any bytes that a client sends on a connection, however they are cut into
reads.

The reference for where a request begins and ends is h11, another parser than the proxy's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import h11
import httptools
import uvicorn
from uvicorn.server import ServerState

from pdproxy.kit.clock import Clock
from pdproxy.observe.events import Observers
from pdproxy.serving.access.clients import Clients
from pdproxy.serving.access.keys import Keys
from pdproxy.serving.request.incoming import Incoming
from pdproxy.settings.listen import Cors
from pdproxy.web.body_budget import BodyBudget
from pdproxy.web.client_identifier import ClientIdentifier
from pdproxy.web.connection_bounds import ConnectionBounds
from pdproxy.web.connections import Connections
from pdproxy.web.cors import CorsHeaders
from pdproxy.web.cycle import DataPath, GenerateCycle
from pdproxy.web.protocol import protocol_class
from pdproxy.web.slow_readers import SlowReaderPolicy
from pdproxy.web.unread_answers import UnreadAnswers
from pdproxy.wire.route import Route

ROUTES = {route.path.encode() for route in Route}
MAX_BODY = 1 << 20
_SPINS = 12
"""Turns of the loop after which a request that needs nothing from outside has been answered."""


class Transport(asyncio.Transport):
    """A socket's end: what was written, whether it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closing = self.reading_paused = self.eof = False

    def write(self, data: Any) -> None:
        assert not self.closing, "written to a closed connection"
        assert not self.eof, "written behind the end"
        self.written += bytes(data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing waits here: what is written is read."""

    def write_eof(self) -> None:
        self.eof = True

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        self.reading_paused = True

    def resume_reading(self) -> None:
        self.reading_paused = False


OTHER = "/other"
READING = {OTHER.encode(), *(route.path.encode() for route in Route)}
"""Paths of which the body is read, where they are posted to. Others' bodies are dropped."""


@dataclass
class Seen:
    """What became of a connection: the requests that were served (method, path, body), the answers,
    whether it was closed.
    """

    served: list[tuple[bytes, bytes, bytes]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    written: bytes = b""
    closed: bool = False


class Complaints(logging.Handler):
    """Errors that the proxy or its server wrote down."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(logging.Formatter().format(record))


class Answers:
    """Reads what was written as a client does."""

    def __init__(self, written: bytes, *, closed: bool) -> None:
        self.statuses: list[int] = []
        self.complete = 0
        self.framed = False
        self.parser = httptools.HttpResponseParser(self)
        self.parser.feed_data(written)
        if closed and self.statuses and not self.framed:
            self.complete += 1  # HTTP/1.0: the end of the connection is the end of the answer

    def on_message_begin(self) -> None:
        self.framed = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.framed = self.framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        if self.parser.get_status_code() >= 200:
            self.statuses.append(self.parser.get_status_code())

    def on_message_complete(self) -> None:
        self.complete += self.parser.get_status_code() >= 200


class Ingress:
    """An entry of which all but the socket, the engines and the service is real."""

    def __init__(self, max_body: int = MAX_BODY, clock: Clock | None = None) -> None:
        self.seen = Seen()
        observers, clients = Observers([]), Clients()
        connections = Connections(1 << 20, observers)
        policy = SlowReaderPolicy(1, 60, clock or Clock(), clients, observers, lambda _: False)
        self.path = DataPath(
            self._generate,
            ClientIdentifier(clients, Keys()),
            observers,
            ConnectionBounds(
                60, 60, 65_536, policy, clients, connections, UnreadAnswers(1 << 30, observers)
            ),
            CorsHeaders(Cors()),
            BodyBudget(4 * max_body, observers),
            max_body=max_body,
        )
        self.config = uvicorn.Config(
            self._application,
            http=type(
                "Protocol", (protocol_class(self.path),), {"reading": {OTHER: "/v1/embeddings"}}
            ),
            log_config=None,
            access_log=False,
            lifespan="off",
            interface="asgi3",
            ws="none",
        )
        self.config.load()

    async def _generate(self, incoming: Incoming, output: GenerateCycle) -> None:
        self.seen.served.append((b"POST", incoming.route.path.encode(), bytes(incoming.body)))
        if len(incoming.body) % 2:
            output.whole(200, [(b"content-type", b"application/json")], b"{}")
        else:
            output.begin([(b"content-type", b"text/event-stream")])
            await asyncio.sleep(0)
            output.write(b"data: x\n\n")
            output.finish()

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        self.seen.served.append((scope["method"].encode(), scope["path"].encode(), body))
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
        )
        await send({"type": "http.response.body", "body": b""})

    async def connection(self, pieces: Sequence[bytes]) -> Seen:
        """Send reads on a connection of their own, wait until all is answered, leave."""
        self.seen = Seen()
        loop = asyncio.get_running_loop()
        state, transport = ServerState(), Transport()
        protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=state, app_state={}, _loop=loop
        )
        protocol.connection_made(transport)
        for piece in pieces:
            for _ in range(_SPINS * 70 if transport.reading_paused else 0):
                if not transport.reading_paused:
                    break
                await asyncio.sleep(0)
            if transport.closing or transport.eof:
                break
            if piece:
                protocol.data_received(piece)
            await asyncio.sleep(0)
        for _ in range(_SPINS * 70):
            if not state.tasks:
                break
            await asyncio.sleep(0)
        self.seen.written, self.seen.closed = transport.written, transport.closing or transport.eof
        answers = Answers(transport.written, closed=self.seen.closed)
        assert answers.complete == len(answers.statuses), "half an answer"
        self.seen.statuses = answers.statuses
        protocol.connection_lost(None)
        for _ in range(_SPINS):
            await asyncio.sleep(0)
        assert not state.tasks, "a task is left"
        assert self.path.body_budget.held == 0, "bytes of a body are left"
        return self.seen


def requests_by_h11(data: bytes) -> tuple[list[tuple[bytes, bytes, bytes]], bool]:
    """Return the whole requests that another parser finds, and whether it found all of the bytes
    right.
    """
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    found: list[tuple[bytes, bytes, bytes]] = []
    request, body = None, b""
    connection.receive_data(data)
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                request, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                assert request is not None
                found.append((request.method, request.target, body))
                response = h11.Response(status_code=200, headers=[("content-length", "0")])
                connection.send(response)
                connection.send(h11.EndOfMessage())
                if connection.our_state is h11.MUST_CLOSE:
                    return found, True
                connection.start_next_cycle()
            else:
                return found, True
    except h11.ProtocolError:
        return found, False


async def check_ingress(ingress: Ingress, data: bytes, cuts: Sequence[int]) -> None:
    """Assert that each request gets one well-formed answer or the connection closes, that nothing
    is smuggled or left.
    """
    complaints, errors = Complaints(), list[Any]()
    loggers = [logging.getLogger(name) for name in ("pdproxy", "uvicorn.error", "asyncio")]
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    for logger in loggers:
        logger.addHandler(complaints)
    try:
        bounds = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
        whole = await ingress.connection([data])
        cut = await ingress.connection([data[one:two] for one, two in pairwise(bounds)])
    finally:
        for logger in loggers:
            logger.removeHandler(complaints)
    assert not complaints.found, complaints.found
    assert not errors, errors
    for seen in (whole, cut):
        refused = [status for status in seen.statuses if status != 200]
        assert len(refused) <= 1, "more than one refusal on a connection"
        assert len(seen.statuses) - len(refused) <= len(seen.served), (
            "an answer that nobody asked for"
        )
    most = min(len(whole.served), len(cut.served))
    assert whole.served[:most] == cut.served[:most], "the cuts decide what was asked"
    expected, right = requests_by_h11(data)
    for got, wanted in zip(whole.served, expected, strict=False):
        assert got[0] == wanted[0], "another method"
        reads = got[0] == b"POST" and got[1] in READING
        assert got[2] == (wanted[2] if reads else b""), "another body"
    assert not right or len(whole.served) <= len(expected), "a request more than there are"
