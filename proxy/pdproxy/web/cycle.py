"""One generating request on a client's connection: its body is collected, a task serves it, and its
answer is written.

Owns the request's body and task, and what is written, without ASGI. Thousands of requests are open
at once. So each drops what it no longer needs, and has `__slots__`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from pdproxy.kit.errors import BodyTooLargeError, OverloadedError, PdproxyError
from pdproxy.kit.frames import drop_traceback, frames
from pdproxy.kit.pieces import Pieces, added, in_buffer, joined
from pdproxy.observe.events import Observers
from pdproxy.serving.request.incoming import Incoming
from pdproxy.settings.keys import KeyRights
from pdproxy.upstream.connection import Headers
from pdproxy.web.body_budget import BodyBudget
from pdproxy.web.client_identifier import ClientIdentifier
from pdproxy.web.connection_bounds import ConnectionBounds
from pdproxy.web.cors import CorsHeaders
from pdproxy.web.guard import GuardedProtocol
from pdproxy.web.refusals import report_refusal
from pdproxy.web.revocable import MakeError
from pdproxy.wire.body_bounds import LARGE, Body
from pdproxy.wire.chunks import chunk
from pdproxy.wire.client_routes import ADAPTER_HEADER
from pdproxy.wire.errors import error_body, retry_headers
from pdproxy.wire.route import Route

logger = logging.getLogger("pdproxy")

_INVOCATIONS = Route.INVOCATIONS
FORWARDED = frozenset(
    {
        b"traceparent",
        b"tracestate",
        b"baggage",
        b"x-session-id",
        b"x-vllm-priority",
        b"endpoint-load-metrics-format",
    }
)
"""Headers of a client that are forwarded to engines: tracing, and what vLLM 0.32.0 reads. No others
are.
"""

_NO_LINES: tuple[tuple[bytes, bytes], ...] = ()

Generate = Callable[[Incoming, "GenerateCycle"], Awaitable[None]]
SMALL_ANSWER = 65_536
"""A whole answer of up to so many bytes is written together with its head: a larger one is not
copied.
"""


class DataPath:
    """What a generating request needs. One for the whole process; `max_body` in bytes; `hints`:
    headers for the proxy itself.
    """

    def __init__(
        self,
        generate: Generate,
        identify: ClientIdentifier,
        observers: Observers,
        bounds: ConnectionBounds,
        cors: CorsHeaders,
        body_budget: BodyBudget,
        *,
        max_body: int,
        hints: frozenset[bytes] = frozenset(),
    ) -> None:
        self.generate = generate
        self.identify = identify
        self.cors = cors
        self.observers = observers
        self.bounds = bounds
        self.max_body = max_body
        self.note(hints)
        self.body_budget = body_budget

    def note(self, hints: frozenset[bytes]) -> None:
        """Read these headers for the proxy itself from now on."""
        self.hints = hints
        self.noted = FORWARDED | hints
        """All headers of a client that somebody reads, besides those of every request."""


class ResponseCycle(RequestResponseCycle):
    """uvicorn's cycle without ASGI: a request of a client that is known, its task, and most of the
    service's `ResponseWriter`. `path`: of its route.
    """

    # These are uvicorn's own attributes and ours. uvicorn's constructor is not called: only its
    # methods read the others.
    __slots__ = (
        "_address",
        "_chunked",
        "_connection",
        "_data_path",
        "_fed",
        "_headers",
        "_identified",
        "_key",
        "_key_error",
        "_pause",
        "_resume",
        "_salt",
        "_serving",
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
        path: str,
        data_path: DataPath,
        connection: GuardedProtocol,
        headers: Headers,
        *,
        chunked: bool,
        keep_alive: bool,
        expect_100_continue: bool,
    ) -> None:
        self.client, self._address, self._key, self._key_error, self._salt = data_path.identify(
            connection.peer, headers, path, peer_is_trusted=connection.peer_is_trusted
        )
        self._identified = True
        """Whether the client is in use for this request."""
        self._data_path = data_path
        self._serving: asyncio.Task[None] | None = None
        self.transport = connection.transport
        self.flow = connection.flow
        self.default_headers = connection.server_state.default_headers
        self.message_event = _UNUSED_EVENT
        self.disconnected = False
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = expect_100_continue
        self.response_started = False
        self.response_complete = False
        self.ended_by: PdproxyError | None = None
        """Why the request is ended although its client is there; None if it is not."""
        self._connection = connection
        self._headers = headers
        """The request's headers. Dropped once the answer has a head."""
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
        # else the end of the connection is the end of the body: HTTP/1.0 keeps none
        if self._chunked:
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        self.transport.write(self._head(200, headers))

    def write(self, data: bytes) -> None:
        """Send stream bytes."""
        if self._unwritable() or self.response_complete:
            return
        self.transport.write(chunk(data) if self._chunked else data)

    def chunk_writer(self) -> Callable[[bytes], None] | None:
        """Return what sends stream bytes that are framed as one HTTP chunk already; None if chunks
        can't be sent.
        """
        return self.transport.write if self._chunked else None

    def finish(self) -> None:
        """End the stream normally."""
        if self._unwritable() or self.response_complete:
            return
        if self._chunked:
            self.transport.write(b"0\r\n\r\n")
        self._complete()

    def break_off(self) -> None:
        """Close the connection in the middle of the stream: without the last chunk, nobody takes it
        for whole.
        """
        if self._unwritable() or self.response_complete:
            return
        self.keep_alive = False
        stuck = self.paused
        self._complete()
        if stuck:
            self.transport.abort()  # a close would wait for the client to read

    def _unwritable(self) -> bool:
        # uvloop raises where asyncio drops what is written between the loss of a connection and the
        # callback for it.
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
        if not self.keep_alive:
            self._connection.end(all_read=self._fed)
        self._connection.on_response_complete()

    # -- the client and its key

    def left(self) -> None:
        """The client has closed the connection."""
        self.disconnected = True
        if self._serving is None:
            self._end()
        elif not self.response_complete:
            self._serving.cancel()

    def revoke(self, error: MakeError, keys: AbstractSet[bytes] | None) -> bool:
        """See `RevocableRequest`."""
        is_over = self.response_complete or self.disconnected or self.ended_by is not None
        if is_over or (keys is not None and (self._key is None or self._key.digest not in keys)):
            return False
        self._end_by(error())
        return True

    def _end_by(self, error: PdproxyError) -> None:
        """End the request although its client is there."""
        raise NotImplementedError

    def _end(self) -> None:
        """Release what is held for the request. A second call changes nothing."""
        if self._identified:
            self._identified = False
            self._data_path.bounds.clients.leave(self.client)


_UNUSED_EVENT = asyncio.Event()
"""uvicorn sets an event of a cycle when its connection is lost. Our cycles get a call instead, and
nothing awaits this event.
"""


class GenerateCycle(ResponseCycle):
    """One generating request on a client's connection: its body, the task that serves it, and the
    service's `ResponseWriter`.
    """

    __slots__ = ("_body", "_body_ended", "_body_wait", "_refusal", "_route", "_size")

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
        super().__init__(
            route.path,
            data_path,
            connection,
            headers,
            chunked=chunked,
            keep_alive=keep_alive,
            expect_100_continue=expect_100_continue,
        )
        self._route = route
        self._body: Pieces = b""
        self._size = 0
        """Bytes of the body that are counted."""
        self._body_ended = self._key_error is not None
        """Whether the body is complete or refused: what still comes of it is not kept. Without a
        valid key nothing is.
        """
        self._refusal: PdproxyError | None = None
        """Why the body was refused."""
        self._body_wait: asyncio.Future[None] | None = None
        """Done once the body has ended. None while nothing waits for that."""

    # -- what the protocol reports

    def feed(self, body: bytes) -> None:
        """Take a part of the request's body."""
        if self._body_ended:
            return
        size = self._size + len(body)
        path = self._data_path
        if size > path.max_body:
            self.refuse(
                BodyTooLargeError(f"The body is larger than {path.max_body} bytes", param="body")
            )
            return
        try:
            path.body_budget.take(self.client, len(body))
        except OverloadedError as error:
            # it refers to this frame, which refers to the cycle and a part of the body
            drop_traceback(error)
            self.refuse(error)
            return
        if self._size == 0:
            self._body = body  # most bodies come in one read: those are not copied
        elif isinstance(self._body, bytearray):
            self._body += body
        else:
            self._body = added(self._body, body)
            if size > LARGE:
                self._body = in_buffer(self._body)  # see `_taken_body`
        self._size = size
        if self._body_wait is not None:
            self._mark_progress()

    @property
    def missing(self) -> float:
        """How many bytes of the body have not come yet, without end where its length is not known:
        in chunks.
        """
        for name, value in self._headers:
            if name == b"content-length" and value.isdigit():
                return int(value) - self._size
        return math.inf

    def fed(self) -> None:
        """The request's body is complete."""
        self._fed = True
        self._end_body(None)

    def refuse(self, error: PdproxyError) -> None:
        """Refuse the request's body: it is too large, too late, or not HTTP."""
        self._forget_body()
        self._end_body(error)

    def evict(self, error: PdproxyError) -> None:
        """Refuse the request's body, which is not complete: another client needs its space."""
        self.refuse(error)

    def _mark_progress(self) -> None:
        """Move this body to the end of the client's incomplete bodies: it is the one that received
        a part last.
        """
        self.client.bodies.pop(self, None)
        self.client.bodies[self] = None

    def _end_body(self, error: PdproxyError | None) -> None:
        if self._body_ended:
            return
        if self._body_wait is not None:
            self.client.bodies.pop(self, None)
        self._body_ended, self._refusal = True, error
        if self._body_wait is not None and not self._body_wait.done():
            self._body_wait.set_result(None)

    def _forget_body(self) -> None:
        if self._size:
            self._data_path.body_budget.release(self.client, self._size)
        self._body, self._size = b"", 0

    def _end(self) -> None:
        self._forget_body()
        self._body_ended = True  # the rest of it is not kept
        if self._body_wait is not None:
            self.client.bodies.pop(self, None)
        super()._end()

    def _end_by(self, error: PdproxyError) -> None:
        self.ended_by = error
        if self._serving is not None and self._body_wait is None:
            self._serving.cancel()
        else:  # it waits for its body, or for its turn
            self.keep_alive = False
            self.refuse(error)

    # -- what the service calls

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
        found = dict(reversed([*headers]))  # if a header came twice, engines read the first one
        refused = self.ended_by or self._key_error
        if refused is not None:
            # Without a valid key, the body is not waited for. The service refuses the request, and
            # reports it as any other.
            if not self._fed:
                self.keep_alive = False
            return self._as_read(found)
        length = found.get(b"content-length", b"0")
        if int(length or b"0") > self._data_path.max_body and not self._body_ended:
            self.refuse(
                BodyTooLargeError(
                    f"The body is larger than {self._data_path.max_body} bytes", param="body"
                )
            )
        elif self.waiting_for_100_continue and self._refusal is None and not self._unwritable():
            self.waiting_for_100_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self._body_ended:  # most bodies come in one read with their head
            self._body_wait = asyncio.get_running_loop().create_future()
            self._mark_progress()
            await self._body_wait  # the connection has a deadline for it
            self._body_wait = None
            if self.ended_by is not None:
                return self._as_read(found)
        error = self._refusal
        if error is not None:
            self.keep_alive = False
            report_refusal(self._data_path.observers, error, self._address)
            lines = [(b"content-type", b"application/json"), *retry_headers(error)]
            self.whole(error.status, lines, error_body(error))
            return None
        return self._as_read(found)

    def _as_read(self, found: dict[bytes, bytes]) -> Incoming:
        body, self._body = self._taken_body(), b""
        forward = hints = _NO_LINES
        path = self._data_path
        if not path.noted.isdisjoint(found):
            forward = tuple([line for line in self._headers if line[0] in FORWARDED])
            hints = tuple([line for line in self._headers if line[0] in path.hints])
        return Incoming(
            route=self._route,
            request_id=found[b"x-request-id"].decode("latin-1")
            if b"x-request-id" in found
            else None,
            authorization=found.get(b"authorization"),
            content_type=found.get(b"content-type", b"").decode("latin-1"),
            forward=forward,
            body=body,
            adapter=(found.get(ADAPTER_HEADER, b"").strip() or None)
            if self._route is _INVOCATIONS
            else None,
            client=self._address,
            key=None if self._key is None else self._key.name,
            hints=hints,
            salt=self._salt,
            found=self._key,
            refusal=self.ended_by or self._key_error,
            head=self,
        )

    def _taken_body(self) -> Body:
        # A large body stays in its buffer, which does not change from now on: a copy would hold up
        # the event loop.
        if self._size > LARGE and not isinstance(self._body, list):
            return self._body
        return joined(self._body)

    def check_head(self, rights: KeyRights) -> None:
        """See `serving.access.keys.Head`."""
        self._data_path.identify.check_head(rights, self._headers, self._route.path)

    def drop_body(self) -> None:
        """Release the request's body: no engine needs it any more."""
        self._forget_body()
