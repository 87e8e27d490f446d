"""The way in for routes that are passed to one engine: a request's body read, its answer written, its client watched. ASGI.

Owns what the data path's protocol class owns for its requests: the body's limit, and the client's leaving. The deadlines of
clients that send or read too slowly are the connection's (`web.guard`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pdproxy.kit.errors import (
    BodyTooLargeError,
    ClientLeftError,
    Fault,
    PdproxyError,
)
from pdproxy.serving.access.clients import Client, Clients
from pdproxy.serving.access.routes import Entry
from pdproxy.serving.request.passthrough import IncomingPassthrough
from pdproxy.serving.stream.async_response_writer import AsyncResponseWriter
from pdproxy.upstream.connection import Headers
from pdproxy.web.body_budget import BodyBudget
from pdproxy.web.identify import Identify
from pdproxy.wire.api_errors import failure_body
from pdproxy.wire.body_bounds import LARGE, Body

Line = tuple[bytes, bytes]
CONNECTION = "pdproxy.connection"
"""Where a request's ASGI scope has the connection that it came on."""


class Connection(Protocol):
    """What is needed of a client's connection."""

    peer: Client
    speaks_for_others: bool

    passed_for: Client | None

    active: RequestResponseCycle | None

    def refuse_body(self, cycle: RequestResponseCycle, error: PdproxyError) -> None:
        """Refuse a request whose body is under way."""

    def hold_answer(self) -> None:
        """Count what is left to be sent of a whole answer until its client has read it."""


@dataclass(frozen=True, slots=True)
class PassthroughAsgi:
    """What the routes need to know. One for the whole process; `max_body` in bytes."""

    serve: Callable[[IncomingPassthrough, AsyncResponseWriter], Awaitable[None]]
    identify: Identify
    clients: Clients
    room: BodyBudget
    forwarded: frozenset[bytes]
    max_body: int


class PassedAnswer(Response):
    """The answer to one request, which does all the work once it is sent."""

    def __init__(self, passing: PassthroughAsgi, entry: Entry) -> None:
        super().__init__()
        self._passing = passing
        self._entry = entry
        self._size = 0
        self._asker: Client
        self._connection: Connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, have the request served, and stop that when the client leaves."""
        connection = self._connection = scope[CONNECTION]
        headers: list[Line] = scope["headers"]
        self._asker, stranger = self._passing.identify(
            connection.peer, headers, speaks_for_others=connection.speaks_for_others
        )
        connection.passed_for = self._asker
        try:
            # A stranger's body is not read; the service says no, with its report.
            await self._serve(headers, receive, send, known=stranger is None)
        finally:
            self._forget_body()
            self._passing.clients.leave(self._asker)

    def evict(self, error: PdproxyError) -> None:
        """Give up the request's body, which is not whole: another client needs its room."""
        self._forget_body()
        if self._connection.active is not None:
            self._connection.refuse_body(self._connection.active, error)

    def _forget_body(self) -> None:
        self._asker.bodies.pop(self, None)
        if self._size:
            self._passing.room.give_back(self._asker, self._size)
            self._size = 0

    async def _serve(self, headers: list[Line], receive: Receive, send: Send, *, known: bool) -> None:
        passing, client = self._passing, _Client(send, self._asker, self._connection)
        try:
            body = await self._body(headers, receive) if known else b""
        except ClientLeftError:
            return
        except PdproxyError as error:
            lines = [(b"content-type", b"application/json"), (b"connection", b"close")]
            if error.fault is Fault.CAPACITY:
                lines.append((b"retry-after", b"1"))
            with contextlib.suppress(ClientLeftError):
                await client.whole(error.status, lines, failure_body(self._entry.dialect, error))
            return
        found = dict(reversed(headers))  # of a header that came twice, engines read the first
        request = IncomingPassthrough(
            entry=self._entry,
            request_id=found[b"x-request-id"].decode("latin-1") if b"x-request-id" in found else None,
            authorization=found.get(b"authorization"),
            content_type=found.get(b"content-type", b"").decode("latin-1"),
            forward=tuple(line for line in headers if line[0] in passing.forwarded),
            body=body,
        )
        del body  # the request's, which lets go of it
        serving = asyncio.ensure_future(passing.serve(request, client))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                client.gone = True
        finally:
            leaving.cancel()
            if not serving.done():
                serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    async def _body(self, headers: list[Line], receive: Receive) -> Body:
        passing = self._passing
        too_large = BodyTooLargeError(f"The body is larger than {passing.max_body} bytes", param="body")
        length = next((value for name, value in headers if name == b"content-length"), b"0")
        if int(length or b"0") > passing.max_body:
            raise too_large
        whole = bytearray()
        while True:  # for no longer than the connection allows (`web.guard`)
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError("the client left before its request was whole")
            part = message.get("body", b"")
            if len(whole) + len(part) > passing.max_body:
                raise too_large
            self._asker.bodies.pop(self, None)
            passing.room.take(self._asker, len(part))
            self._size += len(part)
            whole += part
            if not message.get("more_body", False):
                return whole if len(whole) > LARGE else bytes(whole)  # a copy would hold up the event loop
            self._asker.bodies[self] = None


async def _left(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Client:
    """The client's end, over ASGI. `gone` is set by who watches it."""

    def __init__(self, send: Send, asker: Client, connection: Connection) -> None:
        self._send = send
        self._connection = connection
        self.client = asker
        self.begun = False
        self.gone = False

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete answer."""
        await self._start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._body(body, more=False)
        self._connection.hold_answer()

    async def begin(self, headers: Headers) -> None:
        """Send the status 200 and the headers of a stream."""
        await self._start(200, [*headers, (b"cache-control", b"no-cache")])

    async def write(self, data: bytes) -> None:
        """Send stream bytes."""
        await self._body(data, more=True)

    async def finish(self) -> None:
        """End the stream."""
        await self._body(b"", more=False)

    async def _start(self, status: int, headers: Headers) -> None:
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _body(self, data: bytes, *, more: bool) -> None:
        # The connection has a deadline for a client that reads nothing (`web.guard`), and then is lost.
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
