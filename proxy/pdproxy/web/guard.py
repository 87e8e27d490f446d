"""Limits on what a client sends, beyond those of uvicorn and the parser: size and time of heads,
time and parts of bodies.

Owns the answers to clients that send no HTTP, too many bytes, or their bytes too late.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, NoReturn

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from pdproxy.kit.clock import Timer
from pdproxy.kit.errors import (
    BadRequestError,
    BodyTimeoutError,
    HeadTimeoutError,
    HeadTooLargeError,
    OverloadedError,
    PathTooLongError,
    PdproxyError,
    RefusalReason,
    Wait,
)
from pdproxy.kit.frames import drop_traceback
from pdproxy.observe.events import DeadlinePassed
from pdproxy.web.connection_bounds import (
    MAX_PARTS,
    MAX_PATH,
    MAX_PIPELINED,
    MIN_PART,
    small_parts_error,
)
from pdproxy.web.lean_flow_control import LARGE_READ
from pdproxy.web.slow_senders import SendWatch
from pdproxy.web.wanted_bodies import WantedBodiesConnection

_LINE = len(b": \r\n")
"""Bytes of a header line besides its name and value."""
_HOST = re.compile(rb"[\w.~%!$&'()*+,;=:\[\]-]*", re.ASCII)
"""The characters of a URI's host and port (RFC 3986, 3.2.2); empty where the target has none."""


class GuardedProtocol(WantedBodiesConnection):
    """A client's connection with bounds on what the client sends."""

    __slots__ = (
        "_deadline",
        "_head_bytes",
        "_hosts",
        "_in_body",
        "_in_head",
        "_part_bytes",
        "_parts",
        "_progress",
        "_refusal",
        "_unparsed",
    )

    # Of uvicorn. `super()` looks through the classes at each call, and these are called for each
    # request.
    _begin_message = HttpToolsProtocol.on_message_begin
    _keep_url = HttpToolsProtocol.on_url
    _keep_header = HttpToolsProtocol.on_header
    _start_next = HttpToolsProtocol.on_response_complete

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._in_head = self._in_body = False
        self._head_bytes = 0
        self._hosts = self._parts = self._part_bytes = self._unparsed = 0
        self._progress = False
        """Whether the parser has called back during this read."""
        self._refusal: PdproxyError | None = None
        """Why the parser was stopped."""
        self._deadline: Timer | SendWatch | None = None
        """The deadline for what the client has to send next: a request, the rest of a head, the
        rest of a body.
        """

    # -- for the rest of the package

    def refuse_body(self, cycle: RequestResponseCycle, error: PdproxyError) -> None:
        """Refuse a request whose body is not complete."""
        if cycle is self.active and not cycle.response_started:
            cycle.disconnected = True  # the application's own answer would come too late
            cycle.message_event.set()
            self.answer_error(error)
        elif self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()  # those before it are answered, then the connection closes
            before = self.pipeline[0][0] if self.pipeline else self.active
            assert before is not None  # a request waits only behind another
            before.keep_alive = False
            self.cycle = before
        else:
            self.transport.close()

    @property
    def idle(self) -> bool:
        """Whether no engine works for the connection: it has no request, or one that is not
        complete.
        """
        answered = self._discarding or self._waits_for_reader or self.nothing_to_answer()
        return answered or (self._in_body and self.cycle is self.active)

    def evict(self, error: PdproxyError) -> None:
        """Close an idle connection: another client needs its place."""
        if self._discarding or self.transport.get_write_buffer_size():
            self.drop()
        elif self.nothing_to_answer():
            self.transport.close()
        else:
            self.refuse_body(self.cycle, error)

    def leave(self) -> None:
        """Close behind the answer that is due, if its head can still say so."""
        if self.active is not None and not self.active.response_started:
            self.active.keep_alive = False

    def nothing_to_answer(self) -> bool:
        """Return whether every request that was read was answered."""
        return self.cycle is None or self.cycle.response_complete

    def linger(self) -> None:
        self._cancel_deadline()
        super().linger()

    def ends_soon(self) -> bool:
        """Return whether a body is being read whose rest comes with one more read."""
        return False

    def switched(self, behind: bytes) -> bool:
        """Return whether the request whose head was just read has changed the protocol. `behind`:
        what has come behind the head.
        """
        return False

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._set_deadline()  # a connection on which nothing is sent must not be kept

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        self._progress = False
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:  # uvicorn's own method writes a log line for each
            self._refuse(self._refusal or BadRequestError("Invalid HTTP request received."))
            return
        except httptools.HttpParserUpgrade as stop:
            at = stop.args[0]
            if self.switched(data[at:]):
                return
        else:
            if self._discarding or self.transport.is_closing():
                return
            # The parser keeps a header's value until it is complete.
            self._unparsed = 0 if self._progress else self._unparsed + len(data)
            if self._unparsed > self.bounds.max_header_bytes:
                self._refuse(self._too_large())
                return
            self._set_deadline()
            if len(data) >= LARGE_READ and not self.ends_soon():
                self.flow.received(len(data))  # type: ignore[attr-defined]
            return
        if self._offer is not None and not self._discarding:
            self.ignore_offer()
            self.data_received(data[at:])
            return
        self._discarding, self._in_body = True, False  # CONNECT: what follows is no HTTP
        self._cancel_deadline()
        self.cycle.keep_alive = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        if self._refusal is not None:
            # which holds this connection, in the frames of the parser's callbacks
            drop_traceback(self._refusal)
        for cycle in (self.active, *(queued for queued, _ in self.pipeline)):
            if cycle is not None:
                self.left(cycle)
        super().connection_lost(exc)
        self.pipeline.clear()
        # They refer to each other: only the garbage collector would free them.
        self.cycle = self.active = None  # type: ignore[assignment]
        self.scope = {}  # type: ignore[typeddict-item]

    def left(self, cycle: RequestResponseCycle) -> None:
        """End what waits for a request or its answer: its client has left. uvicorn tells only the
        last one that was read.
        """
        cycle.disconnected = True
        cycle.message_event.set()

    # -- httptools

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise OverloadedError(
                "too many requests wait on this connection", RefusalReason.CONNECTIONS
            )  # stops the parser
        self._begin_message()
        self._in_head = self._progress = True
        self._head_bytes = self._hosts = 0

    def on_url(self, url: bytes) -> None:
        self._progress = True
        self._head_bytes += len(url)
        if self._head_bytes > self.bounds.max_header_bytes:
            self._stop_head()
        self._keep_url(url)
        if len(self.url) > MAX_PATH and len(self.url.partition(b"?")[0]) > MAX_PATH:
            self._refusal = PathTooLongError(f"The request's path is longer than {MAX_PATH} bytes")
            raise self._refusal  # stops the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self._progress = True
        self._head_bytes += len(name) + len(value) + _LINE
        if self._head_bytes > self.bounds.max_header_bytes:
            self._stop_head()
        # trailers are ignored: what headers have decided may not change behind the body
        if self._in_head:
            self._keep_header(name, value)
            size = len(name)
            if size == 4 and name.lower() == b"host":
                self._hosts += 1 if _HOST.fullmatch(value) else 2
            if size == 6 and self.expect_100_continue and self.parser.get_http_version() == "1.0":
                # A client of HTTP/1.0 knows no interim answers: it would take one for the answer.
                self.expect_100_continue = False

    def on_headers_complete(self) -> None:
        self.check_host()
        if self.parser.should_upgrade():
            self.note_offer()
        super().on_headers_complete()
        self.begin_body()  # behind uvicorn, which may still refuse the head

    def on_body(self, body: bytes) -> None:
        self.count_part(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offer is None:
            self.end_body()
            super().on_message_complete()

    # -- what the parser has found

    def check_host(self) -> None:
        """Refuse a request in which two servers could read different hosts (RFC 9112, 3.2)."""
        if self._hosts != 1 and (self._hosts or self.parser.get_http_version() > "1.0"):
            self._refusal = BadRequestError(
                "A request of HTTP/1.1 needs one Host header, with a host in it"
            )
            raise self._refusal  # stops the parser

    def begin_body(self) -> None:
        """The head is complete."""
        self._in_head, self._in_body = False, True
        self._parts = self._part_bytes = 0
        self._cancel_deadline()

    def count_part(self, size: int) -> None:
        """Count a part of the body. Refuse a body of too many small ones."""
        self._progress = True
        self._parts += 1
        self._part_bytes += size
        if self._parts > MAX_PARTS and self._part_bytes < self._parts * MIN_PART:
            self._refusal = small_parts_error()
            raise self._refusal  # stops the parser

    def end_body(self) -> None:
        """The body is complete."""
        self._in_body, self._progress = False, True
        self._cancel_deadline()

    # -- uvicorn

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: object) -> None:
        if self._waits_for_reader:  # as if that answer were not complete
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, app))  # type: ignore[arg-type]
            return
        self.active = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def on_response_complete(self) -> None:
        if self.transport.get_write_buffer_size() and self.wait_for_reader():
            return  # this is called again once the answer is read
        if self._lingering:
            return  # requests behind this one are not answered
        self._start_next()
        if (self._in_head or self._in_body) and not self.transport.is_closing():
            self._set_deadline()

    # -- deadlines

    def _set_deadline(self) -> None:
        if self._deadline is not None or self._discarding:
            return
        if self._in_body:
            if self.active is self.cycle:  # else reading is paused until its turn comes
                self._unset_keepalive_if_required()
                self._deadline = SendWatch(
                    self.bounds, lambda: self._part_bytes, self._body_is_late
                )
        elif self.nothing_to_answer() and (self._in_head or self.timeout_keep_alive_task is None):
            self._unset_keepalive_if_required()
            self._call_after(self.bounds.head_timeout, self._head_is_late)

    def _call_after(self, seconds: float, then: Callable[[], None]) -> None:
        self._deadline = self.bounds.slow_readers.clock.after(seconds, then)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _head_is_late(self) -> None:
        self.observers.notify(DeadlinePassed(Wait.CLIENT_HEAD.value))
        if self._in_head:
            self._refuse(
                HeadTimeoutError(
                    f"The request's head was not complete in {self.bounds.head_timeout:g} s"
                )
            )
        else:
            self.transport.close()

    def _body_is_late(self, error: BodyTimeoutError) -> None:
        self.observers.notify(DeadlinePassed(Wait.CLIENT_BODY.value))
        self._refuse(error)

    # -- refusals

    def _stop_head(self) -> NoReturn:
        self._refusal = self._too_large()
        raise self._refusal  # stops the parser

    def _too_large(self) -> HeadTooLargeError:
        return HeadTooLargeError(
            f"The request's head is larger than {self.bounds.max_header_bytes} bytes"
        )

    def _refuse(self, error: PdproxyError) -> None:
        if self._discarding:
            return
        self._discarding = True
        self._cancel_deadline()
        if self.nothing_to_answer():
            if self._in_body:
                self.transport.close()  # the rest of a body whose request was answered
            else:
                self.answer_error(error)
        elif self._in_body:
            self.refuse_body(self.cycle, error)
        else:
            self.cycle.keep_alive = False  # those before are answered, then the connection closes
