"""The data path's entry: a uvicorn protocol class that takes the two generating routes and leaves the rest to ASGI.

Owns the client's connection while a generating request is on it. Requests of other routes get uvicorn's own cycle and reach
FastAPI; a generating request gets a `GenerateCycle`, which collects the body, runs the service in a task and writes to
the socket without ASGI in between. The names used of uvicorn's class are few, and a test checks each of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote_to_bytes

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from pdproxy.kit.errors import BodyTimeoutError, BodyTooLargeError, Wait
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.upstream.connection import Headers
from pdproxy.web.cors import CorsHeaders
from pdproxy.wire.errors import error_body
from pdproxy.wire.request import Incoming, Route

logger = logging.getLogger("pdproxy")

_ROUTES = {route.value.encode(): route for route in Route}
FORWARDED = frozenset({b"traceparent", b"tracestate", b"x-session-id", b"x-vllm-priority"})
"""Headers of a client that engines get: tracing, and what vLLM 0.32.0 reads. All others stop here."""

Generate = Callable[[Incoming, "GenerateCycle"], Awaitable[None]]


class DataPath:
    """What the protocol needs to know. One for the whole process; timeouts in seconds, `max_body` in bytes."""

    def __init__(
        self,
        generate: Generate,
        observers: Observers,
        cors: CorsHeaders,
        *,
        max_body: int,
        body_timeout: float,
        write_timeout: float,
    ) -> None:
        self.generate = generate
        self.cors = cors
        self.observers = observers
        self.max_body = max_body
        self.body_timeout = body_timeout
        self.write_timeout = write_timeout


class GenerateCycle(RequestResponseCycle):
    """One generating request on a client's connection: uvicorn's cycle without ASGI, and the service's `Output`."""

    def __init__(self, route: Route, data_path: DataPath, chunked: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._route = route
        self._data_path = data_path
        self._chunked = chunked
        self._parts: list[bytes] = []
        self._size = 0
        self.loop = asyncio.get_running_loop()
        self._whole_body: asyncio.Future[bool] = self.loop.create_future()
        self._serving: asyncio.Task[None] | None = None
        self._pause: Callable[[], None] | None = None
        self._resume: Callable[[], None] | None = None

    # -- what the protocol tells

    def feed(self, body: bytes) -> None:
        """Take a part of the request's body."""
        self._size += len(body)
        if self._size <= self._data_path.max_body:
            self._parts.append(body)
        elif not self._whole_body.done():
            self._whole_body.set_result(False)

    def fed(self) -> None:
        """The request's body is whole."""
        if not self._whole_body.done():
            self._whole_body.set_result(True)

    def left(self) -> None:
        """The client has closed the connection."""
        self.disconnected = True
        if self._serving is not None and not self.response_complete:
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
        if self.disconnected:
            return
        try:
            incoming = await self._incoming()
            if incoming is not None:
                await self._data_path.generate(incoming, self)
        except asyncio.CancelledError:
            if not self.disconnected:
                self.break_off()  # cancelled by the shutdown
        except Exception:
            logger.exception("a request failed in pdproxy itself")
            self.break_off()
        finally:
            self.on_response = _nothing

    async def _incoming(self) -> Incoming | None:
        headers = self.scope["headers"]
        length = next((value for name, value in headers if name == b"content-length"), b"0")
        if int(length) > self._data_path.max_body and not self._whole_body.done():
            self._whole_body.set_result(False)
        elif self.waiting_for_100_continue:
            self.waiting_for_100_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            if not self._whole_body.done():  # most bodies come in one read with their head
                async with asyncio.timeout(self._data_path.body_timeout):
                    await self._whole_body
            fits = self._whole_body.result()
        except TimeoutError:
            self._data_path.observers.notify(DeadlinePassed(Wait.CLIENT_BODY.value))
            late = BodyTimeoutError(f"The body was not whole within {self._data_path.body_timeout:g} s", param="body")
            self.keep_alive = False
            self.whole(late.status, [(b"content-type", b"application/json")], error_body(late))
            return None
        if not fits:
            too_large = BodyTooLargeError(f"The body is larger than {self._data_path.max_body} bytes", param="body")
            self.keep_alive = False
            self.whole(too_large.status, [(b"content-type", b"application/json")], error_body(too_large))
            return None
        found = dict(headers)
        parts, self._parts = self._parts, []
        return Incoming(
            route=self._route,
            request_id=found[b"x-request-id"].decode("latin-1") if b"x-request-id" in found else None,
            authorization=found.get(b"authorization"),
            content_type=found.get(b"content-type", b"").decode("latin-1"),
            forward=tuple(header for header in headers if header[0] in FORWARDED),
            body=parts[0] if len(parts) == 1 else b"".join(parts),
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
        if self.paused:  # the answer is larger than the socket takes: the client has to read some of it
            self.loop.call_later(
                self._data_path.write_timeout, self._drop_unread, self.transport.get_write_buffer_size()
            )
        self._complete()

    def _drop_unread(self, before: int) -> None:
        """Drop a client that has read nothing of its answer since there were `before` bytes of it left."""
        left = self.transport.get_write_buffer_size()
        if not left:
            return
        if left < before:
            self.loop.call_later(self._data_path.write_timeout, self._drop_unread, left)
            return
        self._data_path.observers.notify(DeadlinePassed(Wait.CLIENT_WRITE.value))
        self.transport.abort()

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
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

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
        if not self.keep_alive:
            self.transport.close()
        self.on_response()


def _nothing() -> None:
    """The request is over: no one is to be told."""


class DataPathProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with generating requests taken out. Subclassed by `protocol_class` for one data path."""

    data_path: DataPath
    active: RequestResponseCycle | None = None
    """The request being served; with requests in the pipeline, `cycle` is the last one that was read."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        # A connection that never asks for anything must not be kept for ever.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.data_path.body_timeout, self.timeout_keep_alive_handler
        )

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.active = cycle
        super()._start_asgi_task(cycle, app)

    def on_headers_complete(self) -> None:
        route = _ROUTES.get(self._path()) if self.parser.get_method() == b"POST" else None
        if route is None or (self.parser.should_upgrade() and self._should_upgrade()):
            super().on_headers_complete()
            return
        http_1_1 = self.parser.get_http_version() != "1.0"
        self.scope["method"] = "POST"
        existing = self.cycle
        self.cycle = cycle = GenerateCycle(
            route,
            self.data_path,
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
            self.cycle.feed(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if isinstance(self.cycle, GenerateCycle):
            self.cycle.fed()
        else:
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in (self.active, *(queued for queued, _ in self.pipeline)):
            if isinstance(cycle, GenerateCycle):
                cycle.left()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if isinstance(self.active, GenerateCycle):
            self.active.pressure(paused=True)

    def resume_writing(self) -> None:
        super().resume_writing()
        if isinstance(self.active, GenerateCycle):
            self.active.pressure(paused=False)


def protocol_class(path: DataPath) -> type[DataPathProtocol]:
    """Return a protocol class for uvicorn's `http` setting that serves `path`."""
    return type("BoundDataPathProtocol", (DataPathProtocol,), {"data_path": path})
