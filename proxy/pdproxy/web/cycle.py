"""One generating request on a client's connection: its body is collected, it is served, and answered without ASGI.

Owns what is written to the client's socket for that request. Thousands of these are open at once: one has slots, and lets go of
the request's head once its answer has one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from pdproxy.kit.errors import BodyTooLargeError, Fault, OverloadedError, PdproxyError
from pdproxy.kit.frames import frames
from pdproxy.observe.events import Observers
from pdproxy.upstream.connection import Headers
from pdproxy.web.body_budget import BodyBudget
from pdproxy.web.connection_bounds import Bounds
from pdproxy.web.cors import CorsHeaders
from pdproxy.web.guard import GuardedProtocol
from pdproxy.web.identify import Identify
from pdproxy.wire.body_bounds import LARGE
from pdproxy.wire.chunks import chunk
from pdproxy.wire.errors import error_body
from pdproxy.wire.request import Incoming, Route

logger = logging.getLogger("pdproxy")

SMALL_ANSWER = 65_536
"""Bytes of an answer that is written in one piece with its head, and not counted while its client reads it."""

FORWARDED = frozenset({b"traceparent", b"tracestate", b"x-session-id", b"x-vllm-priority"})
"""Headers of a client that engines get: tracing, and what vLLM 0.32.0 reads. All others stop here."""

Generate = Callable[[Incoming, "GenerateCycle"], Awaitable[None]]


class DataPath:
    """What the protocol needs to know. One for the whole process; `max_body` in bytes."""

    def __init__(
        self,
        generate: Generate,
        identify: Identify,
        observers: Observers,
        bounds: Bounds,
        cors: CorsHeaders,
        room: BodyBudget,
        *,
        max_body: int,
    ) -> None:
        self.generate = generate
        self.identify = identify
        self.cors = cors
        self.observers = observers
        self.bounds = bounds
        self.max_body = max_body
        self.room = room


class GenerateCycle(RequestResponseCycle):
    """One generating request on a client's connection: uvicorn's cycle without ASGI, and the service's `Output`."""

    # uvicorn's own attributes stand here beside ours: what is left out of its constructor, only its own methods read.
    __slots__ = (
        "_body",
        "_body_ended",
        "_chunked",
        "_connection",
        "_data_path",
        "_fed",
        "_headers",
        "_identified",
        "_pause",
        "_refusal",
        "_resume",
        "_route",
        "_serving",
        "_size",
        "_stranger",
        "_waiting",
        "client",
        "default_headers",
        "disconnected",
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
        route: Route,
        data_path: DataPath,
        connection: GuardedProtocol,
        headers: Headers,
        *,
        chunked: bool,
        keep_alive: bool,
        expect_100_continue: bool,
    ) -> None:
        self.transport = connection.transport
        self.flow = connection.flow
        self.default_headers = connection.server_state.default_headers
        self.message_event = _UNHEARD
        self.disconnected = False
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = expect_100_continue
        self.response_started = False
        self.response_complete = False
        self.client, self._stranger = data_path.identify(
            connection.peer, headers, speaks_for_others=connection.speaks_for_others
        )
        self._route = route
        self._data_path = data_path
        self._connection = connection
        self._headers = headers
        self._chunked = chunked
        self._body: bytes | bytearray = b""
        self._size = 0
        self._identified = True
        self._fed = False
        self._body_ended = False
        self._refusal: PdproxyError | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._pause: Callable[[], None] | None = None
        self._resume: Callable[[], None] | None = None

    # -- what the protocol tells

    def feed(self, body: bytes) -> None:
        """Take a part of the request's body."""
        if self._body_ended:
            return
        size = self._size + len(body)
        path = self._data_path
        if size > path.max_body:
            self.refuse(BodyTooLargeError(f"The body is larger than {path.max_body} bytes", param="body"))
            return
        try:
            path.room.take(self.client, len(body))
        except OverloadedError as error:
            self.refuse(error)
            return
        if self._size == 0:
            self._body = body  # most bodies come in one read: no copy is made of those
        else:
            # One buffer: a list of tiny parts would cost many times their bytes.
            if not isinstance(self._body, bytearray):
                self._body = bytearray(self._body)
            self._body += body
        self._size = size
        if self._waiting is not None:
            self._wait_last()

    def fed(self) -> None:
        """The request's body is whole."""
        self._fed = True
        self._end_body(None)

    def refuse(self, error: PdproxyError) -> None:
        """The request's body will not be taken: it is too large, too late, or no HTTP."""
        self._forget_body()
        self._end_body(error)

    def evict(self, error: PdproxyError) -> None:
        """Give up the request's body, which is not whole: another client needs its room."""
        self.refuse(error)

    def _wait_last(self) -> None:
        """Of the client's bodies that are not whole, this one has had a part last."""
        self.client.bodies.pop(self, None)
        self.client.bodies[self] = None

    def _end_body(self, error: PdproxyError | None) -> None:
        if self._body_ended:
            return
        if self._waiting is not None:
            self.client.bodies.pop(self, None)
        self._body_ended, self._refusal = True, error
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _forget_body(self) -> None:
        if self._size:
            self._data_path.room.give_back(self.client, self._size)
        self._body, self._size = b"", 0

    def _end(self) -> None:
        """Hold nothing of the client's any more, and know it no longer. The second time, nothing is left to do."""
        self._forget_body()
        self._body_ended = True  # what is still to come of it is not kept
        if self._waiting is not None:
            self.client.bodies.pop(self, None)
        if self._identified:
            self._identified = False
            self._data_path.bounds.clients.leave(self.client)

    def left(self) -> None:
        """The client has closed the connection."""
        self.disconnected = True
        if self._serving is None:
            self._end()
        elif not self.response_complete:
            self._serving.cancel()

    def pressure(self, paused: bool) -> None:
        """The client has stopped, or gone on, reading."""
        react = self._pause if paused else self._resume
        if react is not None:
            react()

    # -- the service's side

    async def run_asgi(self, app: object) -> None:
        """Serve the request. uvicorn runs this as the request's task."""
        self._serving = asyncio.current_task()
        try:
            if self.disconnected:
                return
            incoming = await self._incoming()
            if incoming is not None:
                await self._data_path.generate(incoming, self)
        except asyncio.CancelledError:
            if not self.disconnected:
                self.break_off()  # cancelled by the shutdown
        except Exception as failed:
            logger.error("a request failed in pdproxy itself: %s", frames(failed))  # noqa: TRY400
            self.break_off()
        finally:
            self._pause = self._resume = None
            self._end()

    async def _incoming(self) -> Incoming | None:
        headers = self._headers
        found = dict(reversed([*headers]))  # of a header that came twice, engines read the first
        if self._stranger is not None:
            # A stranger's body is not waited for. The service refuses the request with its report, as any other.
            if not self._body_ended:
                self.keep_alive = False
                self.refuse(self._stranger)
            return self._as_read(found)
        length = found.get(b"content-length", b"0")
        if int(length or b"0") > self._data_path.max_body and not self._body_ended:
            self.refuse(BodyTooLargeError(f"The body is larger than {self._data_path.max_body} bytes", param="body"))
        elif self.waiting_for_100_continue and self._refusal is None and not self._unwritable():
            self.waiting_for_100_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self._body_ended:  # most bodies come in one read with their head
            self._waiting = asyncio.get_running_loop().create_future()
            self._wait_last()
            await self._waiting  # the connection has a deadline for it
            self._waiting = None
        error = self._refusal
        if error is not None:
            self.keep_alive = False
            retry = [(b"retry-after", b"1")] if error.fault is Fault.CAPACITY else []
            self.whole(error.status, [(b"content-type", b"application/json"), *retry], error_body(error))
            return None
        return self._as_read(found)

    def _as_read(self, found: dict[bytes, bytes]) -> Incoming:
        # A large body stays the buffer that it came in, to which nothing is added any more: a copy would hold up the event loop.
        body, self._body = self._body if self._size > LARGE else bytes(self._body), b""
        return Incoming(
            route=self._route,
            request_id=found[b"x-request-id"].decode("latin-1") if b"x-request-id" in found else None,
            authorization=found.get(b"authorization"),
            content_type=found.get(b"content-type", b"").decode("latin-1"),
            forward=tuple(header for header in self._headers if header[0] in FORWARDED),
            body=body,
        )

    def let_go_of_body(self) -> None:
        """No engine may need the request's body any more: others may have its room."""
        self._forget_body()

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
        """Whether the client reads slower than we write."""
        return self.flow.write_paused

    def on_pressure(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Have `pause` and `resume` called when the client stops and goes on reading."""
        self._pause, self._resume = pause, resume

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete answer."""
        if self._unwritable() or self.response_started:
            return
        head = self._head(status, [*headers, (b"content-length", b"%d" % len(body))])
        if len(body) <= SMALL_ANSWER:
            self.transport.write(head + body)
        else:  # not copied, and counted until its client has read it
            self.transport.write(head)
            self.transport.write(body)
            self._connection.hold_answer()
        self._complete()

    def begin(self, headers: Headers) -> None:
        """Send the status 200 and the headers of a stream."""
        if self._unwritable() or self.response_started:
            return
        if self._chunked:
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        else:
            self.keep_alive = False  # HTTP/1.0: the end of the connection is the end of the body
        self.transport.write(self._head(200, [*headers, (b"cache-control", b"no-cache")]))

    def write(self, data: bytes) -> None:
        """Send stream bytes."""
        if self._unwritable() or self.response_complete:
            return
        self.transport.write(chunk(data) if self._chunked else data)

    def chunk_writer(self) -> Callable[[bytes], None] | None:
        """Return what sends stream bytes that are framed as one HTTP chunk already; None if chunks can't be sent."""
        return self.transport.write if self._chunked else None

    def finish(self) -> None:
        """End the stream in good order."""
        if self._unwritable() or self.response_complete:
            return
        if self._chunked:
            self.transport.write(b"0\r\n\r\n")
        self._complete()

    def break_off(self) -> None:
        """End the stream and close the connection."""
        if self._unwritable() or self.response_complete:
            return
        self.keep_alive = False
        if self.response_started and self._chunked:
            self.transport.write(b"0\r\n\r\n")
        stuck = self.paused
        self._complete()
        if stuck:
            self.transport.abort()  # a close would wait for the client to read

    def _unwritable(self) -> bool:
        # uvloop raises where asyncio drops what is written between the loss of a connection and the notice of it.
        return self.disconnected or self.transport.is_closing()

    def _head(self, status: int, headers: Headers) -> bytes:
        self.response_started = True
        cors = self._data_path.cors(self._headers)
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
        self._connection.watch_reading()
        if not self.keep_alive:
            self._connection.end(all_read=self._fed)
        self._connection.on_response_complete()


_UNHEARD = asyncio.Event()
"""uvicorn tells its cycles of a lost connection by an event. Ours are told by a call, and nobody awaits this one."""
