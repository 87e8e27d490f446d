"""The ASGI side of routes that one engine serves whole: reads the body, writes the answer, notices
that the client has left.

Owns the body's limit and the two tasks of a request. The connection has the deadlines of clients
that send or read too slowly (`web.guard`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pdproxy.kit.errors import (
    BodyTooLargeError,
    ClientLeftError,
    PdproxyError,
)
from pdproxy.serving.access.clients import Client, Clients
from pdproxy.serving.access.routes import RouteEntry
from pdproxy.serving.request.hints import TIMEOUT
from pdproxy.serving.request.incoming import IncomingPassthrough
from pdproxy.serving.stream.async_response_writer import AsyncResponseWriter
from pdproxy.settings.keys import KeyRights
from pdproxy.upstream.connection import Headers
from pdproxy.web.body_budget import BodyBudget
from pdproxy.web.client_identifier import ClientIdentifier, Identified
from pdproxy.web.revocable import MakeError, RevocableRequest
from pdproxy.wire.api_errors import failure_body
from pdproxy.wire.body_bounds import LARGE, Body
from pdproxy.wire.errors import retry_headers

Line = tuple[bytes, bytes]
CONNECTION = "pdproxy.connection"
"""The key of an ASGI scope under which the request's connection is found."""
FOUND = "pdproxy.found"
"""The key under which it is found who sends the request, where the connection had to know it before
the body.
"""


class PassthroughConnection(Protocol):
    """What is needed of a client's connection."""

    peer: Client
    peer_is_trusted: bool
    passthrough_client: Client | None
    passed: RevocableRequest | None
    active: RequestResponseCycle | None

    def refuse_body(self, cycle: RequestResponseCycle, error: PdproxyError) -> None:
        """Refuse a request whose body is not complete."""


ServePassed = Callable[[IncomingPassthrough, AsyncResponseWriter], Awaitable[None]]


@dataclass(slots=True)
class PassthroughAsgi:
    """What these routes need. One for the whole process; `forwarded`: the headers that engines get;
    `max_body` in bytes.
    """

    serve: ServePassed
    identify: ClientIdentifier
    clients: Clients
    body_budget: BodyBudget
    forwarded: frozenset[bytes]
    max_body: int
    refused: Callable[[PdproxyError, str], None] = lambda error, client: None
    """Reports a body that is refused: the error, and the client's address."""
    session: Callable[[Mapping[bytes, bytes]], str | None] = lambda headers: None
    """Returns the session that a request's headers name, None where they name none or nothing needs
    it.
    """


class PassthroughResponse(Response):
    """The answer to one request. Sending it reads the body and has the request served."""

    def __init__(self, passthrough: PassthroughAsgi, entry: RouteEntry) -> None:
        super().__init__()
        self._passthrough = passthrough
        self._entry = entry
        self._size = 0
        self._head: list[Line]
        self._identified: Identified
        self._client: Client
        self._connection: PassthroughConnection
        self._output: _AsgiWriter
        self._serving: asyncio.Future[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, have the request served, and stop that when the client leaves."""
        connection = self._connection = scope[CONNECTION]
        headers = self._head = scope["headers"]
        identify = self._passthrough.identify
        found = scope.get(FOUND) or identify.find(connection, headers, self._entry.path)
        identified = self._identified = identify.enter(found, connection, headers)
        self._client = identified.client
        connection.passthrough_client = self._client
        connection.passed = self
        self._output = _AsgiWriter(send, self._client)
        try:
            # If its sender is refused, the body is not read: the service refuses the request, and
            # reports it.
            await self._serve(headers, receive, is_accepted=identified.error is None)
        finally:
            connection.passed = None
            self._forget_body()
            self._passthrough.clients.leave(self._client)

    def evict(self, error: PdproxyError) -> None:
        """Refuse the request's body, which is not complete: another client needs its space."""
        self._forget_body()
        if self._connection.active is not None:
            self._connection.refuse_body(self._connection.active, error)

    def revoke(self, error: MakeError, keys: AbstractSet[bytes] | None) -> bool:
        """See `RevocableRequest`."""
        serving, output = self._serving, self._output
        key = self._identified.key
        if output.ended_by is not None or (
            keys is not None and (key is None or key.digest not in keys)
        ):
            return False
        if serving is not None and (serving.done() or output.complete):
            return False
        output.ended_by = error()
        if serving is None:
            self.evict(output.ended_by)  # its body is not complete
        else:
            serving.cancel()
        return True

    def check_head(self, rights: KeyRights) -> None:
        """See `serving.access.keys.Head`."""
        self._passthrough.identify.check_head(rights, self._head, self._entry.path)

    def _forget_body(self) -> None:
        self._client.bodies.pop(self, None)
        if self._size:
            self._passthrough.body_budget.release(self._client, self._size)
            self._size = 0

    async def _serve(self, headers: list[Line], receive: Receive, *, is_accepted: bool) -> None:
        passthrough, output = self._passthrough, self._output
        try:
            body = (
                await self._body(headers, receive) if is_accepted and self._entry.has_body else b""
            )
        except ClientLeftError:
            return
        except PdproxyError as error:
            lines = [
                (b"content-type", b"application/json"),
                (b"connection", b"close"),
                *retry_headers(error),
            ]
            passthrough.refused(error, self._identified.address)
            with contextlib.suppress(ClientLeftError):
                await output.whole(error.status, lines, failure_body(self._entry.dialect, error))
            return
        found = dict(reversed(headers))  # if a header came twice, engines read the first one
        request = IncomingPassthrough(
            entry=self._entry,
            request_id=found[b"x-request-id"].decode("latin-1")
            if b"x-request-id" in found
            else None,
            authorization=found.get(b"authorization"),
            content_type=found.get(b"content-type", b"").decode("latin-1"),
            forward=tuple(line for line in headers if line[0] in passthrough.forwarded),
            body=body,
            client=self._identified.address,
            key=None if self._identified.key is None else self._identified.key.name,
            session=passthrough.session(found),
            hints=tuple(line for line in headers if line[0] == TIMEOUT),
            salt=self._identified.salt,
            found=self._identified.key,
            refusal=self._identified.error,
            head=self,
        )
        del body  # the request refers to it
        serving = self._serving = asyncio.ensure_future(passthrough.serve(request, output))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                output.gone = True
        finally:
            self._serving = None  # its frames refer to the answer, and the answer to this
            leaving.cancel()
            if not serving.done():
                serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"The body is larger than {self._passthrough.max_body} bytes", param="body"
        )

    async def _body(self, headers: list[Line], receive: Receive) -> Body:
        passthrough = self._passthrough
        length = next((value for name, value in headers if name == b"content-length"), b"0")
        if int(length or b"0") > passthrough.max_body:
            raise self._too_large()
        whole = bytearray()
        while True:  # for no longer than the connection allows (`web.guard`)
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError("the client left before its request was complete")
            part = message.get("body", b"")
            if len(whole) + len(part) > passthrough.max_body:
                raise self._too_large()
            self._client.bodies.pop(self, None)
            passthrough.body_budget.take(self._client, len(part))
            self._size += len(part)
            whole += part
            if not message.get("more_body", False):
                # a copy would hold up the event loop
                return whole if len(whole) > LARGE else bytes(whole)
            self._client.bodies[self] = None


async def _left(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _AsgiWriter:
    """The client's end, over ASGI. `gone` is set by the task that watches the client."""

    def __init__(self, send: Send, client: Client) -> None:
        self._send = send
        self.client = client
        self.begun = False
        self.gone = False
        self.complete = False
        self.ended_by: PdproxyError | None = None

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete answer."""
        await self._start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._body(body, more=False)

    async def begin(self, headers: Headers) -> None:
        """Send the status 200 and the headers of a stream."""
        await self._start(200, headers)

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
        self.complete = not more
        # A client that reads nothing has a deadline (`web.guard`); after it, the connection is
        # lost.
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
