"""One keep-alive HTTP/1.1 connection to an engine, as an asyncio protocol on httptools.

Owns the socket, the response parser and, while a request is on it, the sink of the answer. The sink
is called once per TCP read with all body bytes of that read, whole HTTP chunks or not, so a relay
pays per read and not per chunk. Whole chunks with the usual framing, and whole answers of a known
form, go past the parser. This module limits what an engine sends beside the body (heads, interim
answers, chunk extensions, trailers); the sink limits the body.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Protocol, cast

import httptools
import msgspec

from pdproxy.kit.errors import (
    ConnectionLostError,
    EngineError,
    EngineTlsError,
    StaleConnectionError,
)
from pdproxy.upstream.answer_form import AnswerForm
from pdproxy.wire.chunks import whole_chunks

STALE_WITHIN = 0.25
"""Seconds. If a kept connection closes so soon after a request, the engine had probably closed it
before the request arrived: that says nothing against the engine. Whether it has read the request is
not known.
"""

LARGE_READ = 128 << 10
"""Bytes. After a read of this size, other sockets are read before this one again. uvloop reads a
socket that is always full 32 times in a row, 8 MB, and does so for each engine that sends as fast
as it can.
"""
TWO_READS = 500_000
"""Bytes of an answer of known length that is whole behind a second read: uvloop reads 256,000 bytes
at once. The second one need not wait for a turn of the event loop.
"""
MAX_HEAD = 64 << 10
"""Bytes of an answer's headers, and bytes in a row that are not body: heads, interim answers, chunk
extensions, trailers.
"""

Headers = list[tuple[bytes, bytes]]
Message = bytes | tuple[bytes | memoryview, ...]
"""A whole request; or its head and the parts of its body, if the body is large."""


class Sink(Protocol):
    """What receives an answer: `head` first, then `data` any number of times, then `end` or
    `failed`. `failed` may come alone.

    `head` and `data` may raise an EngineError to refuse the rest: the connection closes, and
    `failed` gets that error.
    """

    def head(self, status: int, headers: Headers) -> None:
        """The status line and headers (names in lower case) are whole."""

    def data(self, chunk: bytes) -> None:
        """Body bytes, not empty."""

    def end(self) -> None:
        """The answer is whole."""

    def failed(self, error: EngineError) -> None:
        """No more will come."""


ForwardRead = Callable[[bytes], int]
"""Gets a read that begins between two chunks. Forwards the whole chunks at its beginning, returns
their bytes with framing.
"""


class Reads(Protocol):
    """What a relay needs of a leg."""

    def pause(self) -> None:
        """Stop reading."""

    def resume(self) -> None:
        """Read again."""

    def offer_reads(self, forward: ForwardRead) -> None:
        """From now on, pass reads that begin between two chunks to `forward`."""


class Leg(msgspec.Struct, eq=False):
    """One request on a connection. Does nothing once its answer is over: the connection may carry
    another request by then.
    """

    _connection: EngineConnection
    _number: int

    def __repr__(self) -> str:
        return f"<Leg {self._number} on {self._connection!r}>"

    def close(self) -> None:
        """Close the connection: the engine aborts the request."""
        if self._connection.carries(self._number):
            self._connection.close()

    def let_finish(self, seconds: float) -> None:
        """Close the connection only if the answer isn't whole within `seconds`: the caller has what
        it needs of it.
        """
        if self._connection.carries(self._number):
            self._connection.loop.call_later(seconds, self.close)

    def pause(self) -> None:
        """Stop reading: the engine's writes block once the buffers are full."""
        if self._connection.carries(self._number):
            self._connection.pause()

    def resume(self) -> None:
        """Read again."""
        if self._connection.carries(self._number):
            self._connection.resume()

    def offer_reads(self, forward: ForwardRead) -> None:
        """From now on, pass reads that begin between two chunks to `forward`. The sink gets what it
        leaves.
        """
        if self._connection.carries(self._number):
            self._connection.offer_reads(forward)


class EngineConnection(asyncio.Protocol):
    """One connection. `on_free` is called when it can take another request, `on_lost` once when it
    is gone.
    """

    __slots__ = (
        "_answering",
        "_between",
        "_complete",
        "_extra",
        "_final",
        "_fits",
        "_form",
        "_forward",
        "_forward_next",
        "_headers",
        "_keep",
        "_name",
        "_on_free",
        "_on_lost",
        "_parser",
        "_parts",
        "_paused",
        "_requests",
        "_sent_at",
        "_sink",
        "_stopped_between",
        "_stopped_by",
        "_transport",
        "_until_eof",
        "address",
        "idle_since",
        "loop",
    )

    def __init__(
        self,
        name: str,
        on_free: Callable[[EngineConnection], None],
        on_lost: Callable[[EngineConnection], None],
        form: AnswerForm | None = None,
    ) -> None:
        self._name = name
        self._form = form or AnswerForm()
        self._on_free = on_free
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._sink: Sink | None = None
        self._headers: Headers = []
        self._parts: list[bytes] = []
        self._complete = False
        self._final = False
        self._keep = False
        self._answering = False
        self._until_eof = False
        self._fits = False  # the answer has a known length of at most `TWO_READS`
        self._requests = 0
        self._sent_at = 0.0
        self._paused = False
        self._forward: ForwardRead | None = None
        # as `_forward`, while the parser stands between two chunks
        self._forward_next: ForwardRead | None = None
        self._between = False
        self._stopped_between = False  # what was read so far ends between two chunks
        self._extra = 0  # bytes since the last body byte, including those that are being parsed
        self._stopped_by: EngineError | None = None  # raised inside the parser
        self.idle_since = 0.0
        self.address: str | None = None
        """The address that it goes to, if that is one of those of a name."""

    def __repr__(self) -> str:
        state = "busy" if self._sink else "idle"
        return f"<EngineConnection {self._name} {state}, {self._requests} requests>"

    @property
    def usable(self) -> bool:
        """Whether a request may be sent."""
        return (
            self._transport is not None and not self._transport.is_closing() and self._sink is None
        )

    @property
    def is_stale(self) -> bool:
        """Whether a connection that closes now had been closed before its request, as far as that
        can be seen.
        """
        return (
            self._sink is not None
            and self._requests > 1
            and not self._answering
            and self._age() < STALE_WITHIN
        )

    def send(self, request: Message, sink: Sink) -> Leg:
        """Write a whole request; its answer goes to `sink`. Return the caller's hold on it."""
        if self._transport is None or self._sink is not None:
            raise RuntimeError(f"{self!r} can't take a request")
        self._sink = sink
        self._requests += 1
        self._answering = False
        self._extra = 0
        self._sent_at = self.loop.time()
        if self._paused:  # the request before ended while its client was not reading
            self._paused = False
            self._transport.resume_reading()
        if isinstance(request, bytes):
            self._transport.write(request)
        else:
            self._transport.writelines(request)
        return Leg(self, self._requests)

    def offer_reads(self, forward: ForwardRead) -> None:
        """Pass reads of the present answer that begin between two chunks to `forward`."""
        self._forward = forward
        if self._stopped_between:
            self._forward_next = forward

    def carries(self, number: int) -> bool:
        """Return whether the connection is still at work on its `number`th request."""
        return self._sink is not None and self._requests == number

    def close(self) -> None:
        """Drop the connection at once. The sink is not called any more."""
        self._sink = self._forward = self._forward_next = None
        self._stopped_between = False
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Stop reading: the engine's writes block once the buffers are full."""
        if self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # Before Python 3.12, to ask for the running loop is a system call.
        self.loop = asyncio.get_running_loop()
        # Not made before, since parser and connection refer to each other until the connection is
        # lost.
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        is_large = len(data) >= LARGE_READ
        if is_large and (self._answering or self._sink is None):
            self._pause_shortly()
        forward = self._forward_next
        if forward is not None:
            # The parser stands between two chunks, and may stay there while whole chunks go past
            # it.
            forwarded = forward(data)
            if forwarded:
                if forwarded == len(data):
                    return
                data = data[forwarded:]
            payloads, rest = whole_chunks(data)
            if payloads:
                self._parts = payloads
                self._flush()
            if rest == len(data):
                return
            data = data[rest:] if rest else data
        sink = self._sink
        if sink is None:
            self.close()  # bytes without a request
            return
        begins = not self._answering
        self._answering = True
        if begins and (whole := self._form.whole(data)) is not None:
            self._take_whole(*whole)
            return
        self._extra += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._flush()
            if self._complete:  # the bytes behind the answer are invalid, or a second answer
                self._finish(keep=False)
                return
            self._fail(
                self._stopped_by or EngineError(f"{self._name} sends no valid HTTP/1.1: {error}")
            )
            return
        if is_large and begins and not self._fits:
            self._pause_shortly()
        if self._parts or self._complete:
            self._extra = 0
        elif self._extra > MAX_HEAD:
            # The parser keeps a header's value until it is whole, and reports neither interim
            # answers nor chunk extensions.
            self._fail(self._too_much())
            return
        # An incomplete size line does not end so, and for a complete one `on_chunk_header` was
        # called.
        self._stopped_between = self._between and data.endswith(b"\r\n")
        self._forward_next = self._forward if self._stopped_between else None
        self._flush()
        if self._complete and self._sink is sink:
            if begins and self._keep:
                self._form.learn(data)
            self._finish(keep=self._keep)

    def _take_whole(self, headers: Headers, body: bytes) -> None:
        """Pass on a whole answer with status 200 that the parser has not seen: it stands before the
        next one.
        """
        sink = self._sink
        assert sink is not None
        try:
            sink.head(200, headers)
            if body and self._sink is sink:
                sink.data(body)
        except EngineError as error:
            self._fail(error)
            return
        if self._sink is sink:
            self._finish(keep=True)

    def _pause_shortly(self) -> None:
        if self._transport is not None and not self._paused and not self._transport.is_closing():
            self._transport.pause_reading()
            self.loop.call_soon(self._resume_unless_paused)

    def _resume_unless_paused(self) -> None:
        if self._transport is not None and not self._paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self)
        del self._parser  # it refers to this connection
        if self._sink is None:
            return
        if self._until_eof and exc is None:
            self._finish(keep=False)
        elif isinstance(exc, ssl.SSLError) and self._requests == 1 and not self._answering:
            # With TLS 1.3 an engine refuses our certificate only after our side of the handshake.
            self._fail(
                EngineTlsError(
                    f"{self._name} refused TLS: {(exc.reason or '').replace('_', ' ').lower()}"
                )
            )
        elif self.is_stale:
            self._fail(StaleConnectionError(f"{self._name} closed a kept connection"))
        else:
            why = f": {exc}" if exc else ""
            self._fail(
                ConnectionLostError(
                    f"{self._name} closed the connection before its answer was whole{why}"
                )
            )

    # -- httptools

    def on_message_begin(self) -> None:
        if self._complete:
            raise EngineError("an answer without a request")  # stops the parser
        self._headers = []
        self._final = False

    def on_header(self, name: bytes, value: bytes) -> None:
        # trailers are dropped: the sink has its list already
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._final = status >= 200
        if not self._final or self._sink is None:
            return
        if (
            self._extra > MAX_HEAD
            and sum(len(name) + len(value) for name, value in self._headers) > MAX_HEAD
        ):
            self._stopped_by = self._too_much()
            raise self._stopped_by  # stops the parser
        headers, self._headers = self._headers, []  # a stream's sink drops them long before its end
        by_name = dict(headers)
        length = by_name.get(b"content-length")
        self._fits = length is not None and int(length) <= TWO_READS
        framed = length is not None or b"transfer-encoding" in by_name
        self._until_eof = not framed and status not in (204, 304)
        try:
            self._sink.head(status, headers)
        except EngineError as error:
            self._stopped_by = error
            raise  # stops the parser

    def on_body(self, body: bytes) -> None:
        if self._final:  # the body of an interim answer is dropped
            self._parts.append(body)

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = self._final

    def on_message_complete(self) -> None:
        self._between = False
        self._complete = self._final
        self._keep = self._parser.should_keep_alive()  # the parser forgets it after the message

    def _too_much(self) -> EngineError:
        return EngineError(f"{self._name} sent more than {MAX_HEAD} bytes that are not body")

    def _age(self) -> float:
        return self.loop.time() - self._sent_at

    # -- endings

    def _flush(self) -> None:
        if self._parts and self._sink is not None:
            parts, self._parts = self._parts, []
            try:
                self._sink.data(parts[0] if len(parts) == 1 else b"".join(parts))
            except EngineError as error:
                self._fail(error)

    def _finish(self, *, keep: bool) -> None:
        sink, self._sink = self._sink, None
        self._forward = self._forward_next = None
        self._stopped_between = False
        self._complete = False
        # An engine may answer before it has read the whole request: the next one would wait behind
        # the rest.
        if keep and not self._transport.get_write_buffer_size():  # type: ignore[union-attr]  # the answer came over it
            self._on_free(self)
        else:
            self.close()
        if sink is not None:
            sink.end()

    def _fail(self, error: EngineError) -> None:
        sink, self._stopped_by = self._sink, None
        self.close()
        if sink is not None:
            sink.failed(error.with_traceback(None))  # a traceback would refer to the sink
