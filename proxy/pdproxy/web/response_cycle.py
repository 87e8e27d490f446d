"""The answer of one generating request, written to the client's socket without ASGI.

Owns what is written. `web.cycle` has the request's body and task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from pdproxy.kit.errors import PdproxyError
from pdproxy.serving.access.clients import Client
from pdproxy.upstream.connection import Headers
from pdproxy.web.cors import CorsHeaders
from pdproxy.web.guard import GuardedProtocol
from pdproxy.wire.chunks import chunk

SMALL_ANSWER = 65_536
"""A whole answer of up to so many bytes is written together with its head: a larger one is not copied."""


class ResponseCycle(RequestResponseCycle):
    """uvicorn's cycle without ASGI, and most of the service's `ResponseWriter`. `client`: whose request it is."""

    # These are uvicorn's own attributes and ours. uvicorn's constructor is not called: only its methods read the others.
    __slots__ = (
        "_chunked",
        "_connection",
        "_cors",
        "_fed",
        "_headers",
        "_pause",
        "_resume",
        "client",
        "default_headers",
        "disconnected",
        "ended_by",
        "flow",
        "keep_alive",
        "message_event",
        "response_complete",
        "response_started",
        "transport",
        "waiting_for_100_continue",
    )

    def __init__(
        self,
        connection: GuardedProtocol,
        client: Client,
        headers: Headers,
        cors: CorsHeaders,
        *,
        chunked: bool,
        keep_alive: bool,
        expect_100_continue: bool,
    ) -> None:
        self.transport = connection.transport
        self.flow = connection.flow
        self.default_headers = connection.server_state.default_headers
        self.message_event = _UNUSED_EVENT
        self.disconnected = False
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = expect_100_continue
        self.response_started = False
        self.response_complete = False
        self.client = client
        self.ended_by: PdproxyError | None = None
        """Why the request is ended although its client is there; None if it is not."""
        self._connection = connection
        self._headers = headers
        """The request's headers. Dropped once the answer has a head."""
        self._cors = cors
        self._chunked = chunked
        self._fed = False
        """Whether the request's body is complete."""
        self._pause: Callable[[], None] | None = None
        self._resume: Callable[[], None] | None = None

    def pressure(self, paused: bool) -> None:
        """The client has stopped reading, or continues."""
        react = self._pause if paused else self._resume
        if react is not None:
            react()

    @property
    def begun(self) -> bool:
        """Whether anything was sent."""
        return self.response_started

    @property
    def gone(self) -> bool:
        """Whether the client has left."""
        return self.disconnected

    @property
    def paused(self) -> bool:
        """Whether the client reads more slowly than we write."""
        return self.flow.write_paused

    def on_pressure(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Have `pause` and `resume` called when the client stops and continues to read."""
        self._pause, self._resume = pause, resume

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete answer."""
        if self._unwritable() or self.response_started:
            return
        head = self._head(status, [*headers, (b"content-length", b"%d" % len(body))])
        if len(body) <= SMALL_ANSWER:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)
        self._complete()

    def begin(self, headers: Headers) -> None:
        """Send the status 200 and the headers of a stream."""
        if self._unwritable() or self.response_started:
            return
        if self._chunked:  # else the end of the connection is the end of the body: HTTP/1.0 keeps none
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        self.transport.write(self._head(200, headers))

    def write(self, data: bytes) -> None:
        """Send stream bytes."""
        if self._unwritable() or self.response_complete:
            return
        self.transport.write(chunk(data) if self._chunked else data)

    def chunk_writer(self) -> Callable[[bytes], None] | None:
        """Return what sends stream bytes that are framed as one HTTP chunk already; None if chunks can't be sent."""
        return self.transport.write if self._chunked else None

    def finish(self) -> None:
        """End the stream normally."""
        if self._unwritable() or self.response_complete:
            return
        if self._chunked:
            self.transport.write(b"0\r\n\r\n")
        self._complete()

    def break_off(self) -> None:
        """Close the connection in the middle of the stream: without the last chunk, nobody takes it for whole."""
        if self._unwritable() or self.response_complete:
            return
        self.keep_alive = False
        stuck = self.paused
        self._complete()
        if stuck:
            self.transport.abort()  # a close would wait for the client to read

    def _unwritable(self) -> bool:
        # uvloop raises where asyncio drops what is written between the loss of a connection and the callback for it.
        return self.disconnected or self.transport.is_closing()

    def _head(self, status: int, headers: Headers) -> bytes:
        self.response_started = True
        cors = self._cors(self._headers)
        self._headers = []
        lines = [STATUS_LINE[status]]
        lines += [b"%b: %b\r\n" % header for header in (*self.default_headers, *headers, *cors)]
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def _complete(self) -> None:
        self.response_complete = True
        self._pause = self._resume = None
        if not self.keep_alive:
            self._connection.end(all_read=self._fed)
        self._connection.on_response_complete()


_UNUSED_EVENT = asyncio.Event()
"""uvicorn sets an event of a cycle when its connection is lost. Our cycles get a call instead, and nothing awaits this event."""
