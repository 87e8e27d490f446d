"""The bounds of a client's connection that neither uvicorn nor the parser sets: size and time of heads, time of bodies, reading.

Owns what is answered to a client that does not speak HTTP, speaks too much of it, or too slowly; and how such a connection ends:
with one answer where there is room for it behind those before, then closed for writing, with what the client still sends thrown
away for a moment, since a close with unread bytes is a reset, which would take the answer with it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from pdproxy.kit.clock import Timer
from pdproxy.kit.errors import (
    BadRequestError,
    BodyTimeoutError,
    Fault,
    HeadTimeoutError,
    HeadTooLargeError,
    OverloadedError,
    PathTooLongError,
    PdproxyError,
    Wait,
)
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.serving.access.clients import Client, address_name
from pdproxy.web.connection_bounds import (
    LEAST_PART,
    LINGER,
    MOST_PARTS,
    MOST_PATH,
    MOST_REFUSED,
    MOST_WAITING,
    UNSENT,
    Bounds,
    crumbs,
)
from pdproxy.web.lean_flow_control import Flow, Waiting
from pdproxy.web.slow_readers import Reading
from pdproxy.wire.errors import error_body

_HOST = re.compile(rb"[\w.~%!$&'()*+,;=:\[\]-]*", re.ASCII)
"""What a URI's host and port are made of (RFC 3986, 3.2.2); empty where the target has none."""


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds. Subclasses set `bounds` and `observers`."""

    bounds: Bounds
    observers: Observers
    # uvicorn's class has a dictionary, whose keys all connections share as long as they are no more than 30.
    __slots__ = (
        "_deaf",
        "_head_bytes",
        "_hosts",
        "_in_body",
        "_in_head",
        "_late",
        "_lingering",
        "_part_bytes",
        "_parts",
        "_progress",
        "_reading",
        "_refusal",
        "_unparsed",
        "_unread",
        "active",
        "passed_for",
        "peer",
        "speaks_for_others",
    )

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.pipeline = Waiting()  # type: ignore[assignment]
        self.active: RequestResponseCycle | None = None
        """The request being served; with requests in the pipeline, `cycle` is the last one that was read."""
        self._deaf = False
        """Nothing more is read: what comes is thrown away."""
        self._lingering = False
        self._in_head = self._in_body = False
        self._head_bytes = 0
        self._hosts = self._parts = self._part_bytes = self._unparsed = 0
        self._progress = False
        self._refusal: PdproxyError | None = None
        self._late: Timer | None = None
        self._reading: Reading | None = None
        self._unread: Client | None = None
        """Whose whole answer is not read yet."""
        self.passed_for: Client | None = None
        """Whose request on a passed route came last."""
        self.peer: Client
        """Whose address the connection comes from."""
        self.speaks_for_others = False
        """Whether that is a trusted proxy."""

    # -- what the rest of the web room asks

    def more_headers(self) -> list[tuple[bytes, bytes]]:
        """Return what an answer of ours has to say besides, as far as the request's head has come."""
        return []

    def end(self, *, all_read: bool) -> None:
        """Close the connection behind an answer; `all_read`: whether its request has come to its end."""
        if all_read and not self._deaf:
            self.transport.close()
        else:
            self.linger()

    def linger(self) -> None:
        """Close for writing, and for good once the client has left or a moment has passed."""
        self._deaf = self._lingering = True
        self._cancel_late()
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER, self.transport.abort)
        else:
            self.transport.close()

    def asker(self) -> Client:
        """Return whose request is being answered."""
        return self.passed_for or self.peer

    def watch_reading(self) -> None:
        """Drop the client if it reads too slowly what is left to be sent (`web.slow_readers`)."""
        if not self.transport.get_write_buffer_size():
            return
        asker = self.asker()
        if self._reading is not None and self._reading.client is not asker:
            self._reading.stop()  # what it looked at was read
            self._reading = None
        if self._reading is None:
            self._reading = Reading(self.bounds.floor, asker, self.transport, self._caught_up)

    def _caught_up(self) -> None:
        self._reading = None
        self.answer_read()

    def hold_answer(self) -> None:
        """Count what is left to be sent of a whole answer until its client has read it."""
        if (left := self.transport.get_write_buffer_size()) and self._unread is None:
            self._unread = self.asker()
            self.bounds.unread.hold(self._unread, self, left)
            self.watch_reading()

    def answer_read(self) -> None:
        """What was left of a whole answer has been read, or never will be."""
        if self._unread is not None:
            self.bounds.unread.let_go(self._unread, self)
            self._unread = None

    def refuse_body(self, cycle: RequestResponseCycle, error: PdproxyError) -> None:
        """Refuse a request whose body is under way."""
        if cycle is self.active and not cycle.response_started:
            cycle.disconnected = True  # the application's own answer would come too late
            cycle.message_event.set()
            self._answer(error)
        elif self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()  # those before it are answered, then the connection closes
            before = self.pipeline[0][0] if self.pipeline else self.active
            assert before is not None  # somebody is what it waits for
            before.keep_alive = False
            self.cycle = before
        else:
            self.transport.close()

    @property
    def idle(self) -> bool:
        """Whether no engine is at work for the connection: it has no request, or one that is not whole."""
        return self._deaf or self.nothing_to_answer() or (self._in_body and self.cycle is self.active)

    def evict(self, error: PdproxyError) -> None:
        """Close an idle connection: another client's needs its place."""
        if self._deaf or self.transport.get_write_buffer_size():
            self.drop()
        elif self.nothing_to_answer():
            self.transport.close()
        else:
            self.refuse_body(self.cycle, error)

    def drop(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.flow = Flow(self.transport)  # type: ignore[assignment]
        self.transport.set_write_buffer_limits(high=UNSENT)
        bounds = self.bounds
        address = self.client[0] if self.client else ""
        self.peer = bounds.clients.enter(address_name(address))
        self.speaks_for_others = bounds.clients.trusts(address)
        try:
            bounds.connections.opened(self.peer, self)
        except OverloadedError as error:
            self._deaf = True
            if bounds.connections.open > bounds.connections.most + MOST_REFUSED:
                self.transport.abort()
            else:
                self._answer(error)
            return
        self._watch()  # a connection that never asks for anything must not be kept for ever

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._progress = False
        super().data_received(data)
        if self._deaf or self.transport.is_closing():
            return
        # A header's value is kept by the parser until it is whole.
        self._unparsed = 0 if self._progress else self._unparsed + len(data)
        if self._unparsed > self.bounds.max_header_bytes:
            self._refuse(self._too_large())
            return
        self._watch()
        self.flow.took(len(data))  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_late()
        if self._reading is not None:
            self._reading.stop()
        self._caught_up()
        self.bounds.connections.closed(self.peer, self)
        self.bounds.clients.leave(self.peer)
        super().connection_lost(exc)

    # -- httptools

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MOST_WAITING:
            raise OverloadedError("too many requests wait on this connection")  # stops the parser
        super().on_message_begin()
        self._in_head = self._progress = True
        self._head_bytes = self._hosts = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)
        if len(self.url) > MOST_PATH and len(self.url.partition(b"?")[0]) > MOST_PATH:
            self._refusal = PathTooLongError(f"The request's path is longer than {MOST_PATH} bytes")
            raise self._refusal  # stops the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(b": \r\n"))
        if self._in_head:  # a trailer is no header: nothing that was decided by them may change behind the body
            super().on_header(name, value)
            if len(name) == 4 and name.lower() == b"host":
                self._hosts += 1 if _HOST.fullmatch(value) else 2
            if self.expect_100_continue and self.parser.get_http_version() == "1.0":
                self.expect_100_continue = (
                    False  # such a client knows no interim answers: it would take one for the answer
                )

    def on_headers_complete(self) -> None:
        self.one_host()
        super().on_headers_complete()
        self.begin_body()  # not before there is a request: uvicorn may yet refuse the head

    def on_body(self, body: bytes) -> None:
        self.took_part(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.end_body()
        super().on_message_complete()

    # -- what the parser has told

    def one_host(self) -> None:
        """Refuse a request that two servers could take for two hosts' (RFC 9112, 3.2)."""
        if self._hosts != 1 and (self._hosts or self.parser.get_http_version() > "1.0"):
            self._refusal = BadRequestError("A request of HTTP/1.1 needs one Host header, with a host in it")
            raise self._refusal  # stops the parser

    def begin_body(self) -> None:
        """The head is whole."""
        self._in_head, self._in_body = False, True
        self._parts = self._part_bytes = 0
        self._cancel_late()

    def took_part(self, size: int) -> None:
        """A part of the body has come. Refuse a body of too many tiny ones."""
        self._progress = True
        self._parts += 1
        self._part_bytes += size
        if self._parts > MOST_PARTS and self._part_bytes < self._parts * LEAST_PART:
            self._refusal = crumbs()
            raise self._refusal  # stops the parser

    def end_body(self) -> None:
        """The body is whole."""
        self._in_body, self._progress = False, True
        self._cancel_late()

    # -- uvicorn

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: object) -> None:
        self.active = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def on_response_complete(self) -> None:
        if self._lingering:
            return  # requests behind this one are not answered
        super().on_response_complete()
        if not self.transport.is_closing():
            self._watch()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or BadRequestError(msg))

    def _unsupported_upgrade_warning(self) -> None:
        # The parser has stopped at what would be the other protocol's: the request is served as if it had not asked.
        self._deaf = True
        self._in_body = False
        self._cancel_late()
        if self.cycle is not None:
            self.cycle.keep_alive = False

    # -- inside

    def _count(self, size: int) -> None:
        self._progress = True
        self._head_bytes += size
        if self._head_bytes > self.bounds.max_header_bytes:
            self._refusal = self._too_large()
            raise self._refusal  # stops the parser, which has uvicorn send its 400: see above

    def _too_large(self) -> HeadTooLargeError:
        return HeadTooLargeError(f"The request's head is larger than {self.bounds.max_header_bytes} bytes")

    def _watch(self) -> None:
        """Have the clock run while the client owes something: a request, the rest of a head, the rest of a body."""
        if self._late is not None or self._deaf:
            return
        if self._in_body:
            if self.active is self.cycle:  # else reading is paused until its turn comes
                self._unset_keepalive_if_required()
                self._run_clock(self.bounds.body_timeout, self._body_is_late)
        elif self.nothing_to_answer() and (self._in_head or self.timeout_keep_alive_task is None):
            self._unset_keepalive_if_required()
            self._run_clock(self.bounds.head_timeout, self._head_is_late)

    def _run_clock(self, seconds: float, then: Callable[[], None]) -> None:
        self._late = self.bounds.floor.clock.after(seconds, then)

    def nothing_to_answer(self) -> bool:
        """Whether every request that was read has had its answer."""
        return self.cycle is None or self.cycle.response_complete

    def _cancel_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _head_is_late(self) -> None:
        self.observers.notify(DeadlinePassed(Wait.CLIENT_HEAD.value))
        if self._in_head:
            self._refuse(HeadTimeoutError(f"The request's head was not whole within {self.bounds.head_timeout:g} s"))
        else:
            self.transport.close()

    def _body_is_late(self) -> None:
        self.observers.notify(DeadlinePassed(Wait.CLIENT_BODY.value))
        self._refuse(BodyTimeoutError(f"The body was not whole within {self.bounds.body_timeout:g} s", param="body"))

    def _refuse(self, error: PdproxyError) -> None:
        if self._deaf:
            return
        self._deaf = True
        self._cancel_late()
        if self.nothing_to_answer():
            if self._in_body:
                self.transport.close()  # the rest of a body whose request has had its answer
            else:
                self._answer(error)
        elif self._in_body:
            self.refuse_body(self.cycle, error)
        else:
            self.cycle.keep_alive = False  # those before are answered, then the connection closes

    def _answer(self, error: PdproxyError) -> None:
        if self.transport.is_closing():
            return
        body = error_body(error)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
        if error.fault is Fault.CAPACITY:
            head += b"retry-after: 1\r\n"
        head += b"".join([b"%b: %b\r\n" % line for line in self.more_headers()])
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        self.linger()
