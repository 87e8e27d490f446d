"""The data path's entry: a uvicorn protocol class that takes the two generating routes and leaves the rest to ASGI.

Owns the client's connection while a generating request is on it. Requests of other routes get uvicorn's own cycle and reach
FastAPI; a generating request gets a `GenerateCycle`, which collects the body, runs the service in a task and writes to
the socket without ASGI in between. The names used of uvicorn's class are few, and a test checks each of them. What
bounds every connection is in `web.guard`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote_to_bytes

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from pdproxy.kit.errors import BodyTooLargeError, Fault, OverloadedError, PdproxyError, UnauthorizedError
from pdproxy.kit.frames import frames
from pdproxy.observe.events import Observers
from pdproxy.upstream.connection import Headers
from pdproxy.web.cors import CorsHeaders
from pdproxy.web.guard import Bounds, GuardedProtocol
from pdproxy.web.room import BodyRoom
from pdproxy.wire.chunks import chunk
from pdproxy.wire.errors import error_body
from pdproxy.wire.request import Incoming, Route

logger = logging.getLogger("pdproxy")

_ROUTES = {route.value.encode(): route for route in Route}
FORWARDED = frozenset({b"traceparent", b"tracestate", b"x-session-id", b"x-vllm-priority"})
"""Headers of a client that engines get: tracing, and what vLLM 0.32.0 reads. All others stop here."""

Generate = Callable[[Incoming, "GenerateCycle"], Awaitable[None]]


class DataPath:
    """What the protocol needs to know. One for the whole process; `max_body` in bytes."""

    def __init__(
        self,
        generate: Generate,
        check_key: Callable[[bytes | None], None],
        observers: Observers,
        bounds: Bounds,
        cors: CorsHeaders,
        room: BodyRoom,
        *,
        max_body: int,
    ) -> None:
        self.generate = generate
        self.check_key = check_key
        self.cors = cors
        self.observers = observers
        self.bounds = bounds
        self.max_body = max_body
        self.room = room


class GenerateCycle(RequestResponseCycle):
    """One generating request on a client's connection: uvicorn's cycle without ASGI, and the service's `Output`."""

    def __init__(
        self, route: Route, data_path: DataPath, connection: GuardedProtocol, chunked: bool, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._route = route
        self._data_path = data_path
        self._connection = connection
        self._chunked = chunked
        self._body: bytes | bytearray = b""
        self._size = 0
        self.loop = asyncio.get_running_loop()
        self._whole_body: asyncio.Future[PdproxyError | None] = self.loop.create_future()
        self._fed = False
        self._serving: asyncio.Task[None] | None = None
        self._pause: Callable[[], None] | None = None
        self._resume: Callable[[], None] | None = None

    # -- what the protocol tells

    def feed(self, body: bytes) -> None:
        """Take a part of the request's body."""
        if self._whole_body.done():
            return
        size = self._size + len(body)
        path = self._data_path
        if size > path.max_body:
            self.refuse(BodyTooLargeError(f"The body is larger than {path.max_body} bytes", param="body"))
            return
        try:
            path.room.take(len(body))
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

    def fed(self) -> None:
        """The request's body is whole."""
        self._fed = True
        if not self._whole_body.done():
            self._whole_body.set_result(None)

    def refuse(self, error: PdproxyError) -> None:
        """The request's body will not be taken: it is too large, too late, or no HTTP."""
        self._forget_body()
        if not self._whole_body.done():
            self._whole_body.set_result(error)

    def _forget_body(self) -> None:
        self._data_path.room.give_back(self._size)
        self._body, self._size = b"", 0

    def left(self) -> None:
        """The client has closed the connection."""
        self.disconnected = True
        if self._serving is None:
            self._forget_body()
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
            self.on_response = _nothing
            self._forget_body()
            self._whole_body.cancel()  # what is still to come of it is not kept

    async def _incoming(self) -> Incoming | None:
        headers = self.scope["headers"]
        found = dict(reversed([*headers]))  # of a header that came twice, engines read the first
        try:
            self._data_path.check_key(found.get(b"authorization"))
        except UnauthorizedError as stranger:
            # A stranger's body is not waited for. The service refuses the request with its report, as any other.
            if not self._whole_body.done():
                self.keep_alive = False
                self.refuse(stranger)
            return self._as_read(found)
        length = found.get(b"content-length", b"0")
        if int(length or b"0") > self._data_path.max_body and not self._whole_body.done():
            self.refuse(BodyTooLargeError(f"The body is larger than {self._data_path.max_body} bytes", param="body"))
        elif self.waiting_for_100_continue:
            self.waiting_for_100_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self._whole_body.done():  # most bodies come in one read with their head
            await self._whole_body  # the connection has a deadline for it
        error = self._whole_body.result()
        if error is not None:
            self.keep_alive = False
            retry = [(b"retry-after", b"1")] if error.fault is Fault.CAPACITY else []
            self.whole(error.status, [(b"content-type", b"application/json"), *retry], error_body(error))
            return None
        return self._as_read(found)

    def _as_read(self, found: dict[bytes, bytes]) -> Incoming:
        body, self._body = bytes(self._body), b""
        return Incoming(
            route=self._route,
            request_id=found[b"x-request-id"].decode("latin-1") if b"x-request-id" in found else None,
            authorization=found.get(b"authorization"),
            content_type=found.get(b"content-type", b"").decode("latin-1"),
            forward=tuple(header for header in self.scope["headers"] if header[0] in FORWARDED),
            body=body,
        )

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
        self.transport.write(head + body)
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
        cors = self._data_path.cors(self.scope["headers"])
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
        self.on_response()


def _nothing() -> None:
    """The request is over: no one is to be told."""


class DataPathProtocol(GuardedProtocol):
    """uvicorn's protocol, guarded, with generating requests taken out. Subclassed by `protocol_class` for one data path."""

    data_path: DataPath

    def refuse_body(self, cycle: RequestResponseCycle, error: PdproxyError) -> None:
        if isinstance(cycle, GenerateCycle):
            cycle.refuse(error)
        else:
            super().refuse_body(cycle, error)

    def on_headers_complete(self) -> None:
        route = _ROUTES.get(self._path()) if self.parser.get_method() == b"POST" else None
        if route is None or (self.parser.should_upgrade() and self._should_upgrade()):
            super().on_headers_complete()
            return
        http_1_1 = self.parser.get_http_version() == "1.1"
        self.scope["method"] = "POST"
        existing = self.cycle
        last = existing is not None and existing.response_complete and not existing.keep_alive
        self.cycle = cycle = GenerateCycle(
            route,
            self.data_path,
            self,
            chunked=http_1_1,
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=http_1_1 and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        self.begin_body()
        cycle.disconnected = last  # the connection ends with the answer before: nobody would read this one's
        if existing is None or existing.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:  # pipelined: it waits for the one before
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def _path(self) -> bytes:
        # The absolute form is one that a server must take, too.
        path = self.url.split(b"?", 1)[0] if self.url[:1] == b"/" else httptools.parse_url(self.url).path or b""
        return unquote_to_bytes(path) if b"%" in path else path

    def on_body(self, body: bytes) -> None:
        if isinstance(self.cycle, GenerateCycle):
            self.made_progress()
            self.cycle.feed(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if isinstance(self.cycle, GenerateCycle):
            self.end_body()
            self.cycle.fed()
        else:
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in (self.active, *(queued for queued, _ in self.pipeline)):
            if isinstance(cycle, GenerateCycle):
                cycle.left()
            elif cycle is not None:  # uvicorn itself tells the last request that was read, and no other
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.forget_reading()
        if isinstance(self.active, GenerateCycle):
            self.active.pressure(paused=True)
        else:
            self.watch_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.forget_reading()
        if self.nothing_to_answer():
            self.watch_reading()
        if isinstance(self.active, GenerateCycle):
            self.active.pressure(paused=False)


def protocol_class(path: DataPath) -> type[DataPathProtocol]:
    """Return a protocol class for uvicorn's `http` setting that serves `path`."""
    bound = {"data_path": path, "bounds": path and path.bounds, "observers": path and path.observers}
    return type("BoundDataPathProtocol", (DataPathProtocol,), bound)
