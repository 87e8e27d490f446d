"""One keep-alive HTTP/1.1 connection to an engine, as an asyncio protocol on httptools.

Owns the socket, the response parser and, while a request is on it, the sink that hears of the answer. The sink is called
once a TCP read with all body bytes of that read, whole HTTP chunks or not, so a relay pays per read and not per chunk. Whole
chunks that are framed as servers do it go past the parser. What an engine sends beside the body (heads, interim answers, chunk
extensions, trailers) is bounded here; the body is the sink's to bound.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from pdproxy.kit.errors import EngineError, EngineTlsError, StaleConnectionError
from pdproxy.wire.chunks import whole

STALE_WITHIN = 0.25
"""Seconds. A kept connection that closes so soon after a request was shut before the engine saw it; later, the engine may
have begun to work, and the request must not be sent again as it is (a KV handle used twice makes wrong tokens)."""

LARGE_READ = 128 << 10
"""Bytes. Behind a read like this, others have their turn before the next: uvloop reads a socket that is always full 32 times in a
row, 8 MB, and so with each engine that sends as fast as it can."""
MOST_HEAD = 64 << 10
"""Bytes of an answer's headers, and bytes in a row that are no body: heads, interim answers, chunk extensions, trailers."""

Headers = list[tuple[bytes, bytes]]
Message = bytes | tuple[bytes, bytes]
"""A whole request; or its head and its body, where that is large."""


class Sink(Protocol):
    """Who hears of an answer. `head` first, then `data` any number of times, then `end` or `failed`; `failed` may come alone.

    `head` and `data` may raise an EngineError where they want no more: the answer is given up, and `failed` hears of that error.
    """

    def head(self, status: int, headers: Headers) -> None:
        """The status line and headers (names in lower case) are whole."""

    def data(self, chunk: bytes) -> None:
        """Body bytes, not empty."""

    def end(self) -> None:
        """The answer is whole."""

    def failed(self, error: EngineError) -> None:
        """No more will come."""


TakeRead = Callable[[bytes], int]
"""Takes whole chunks off a read that begins between two of them, as it was on the wire; tells how many bytes it took."""


class Leg:
    """One request on a connection. Once its answer is over it does nothing: the connection may carry another's by then."""

    __slots__ = ("_connection", "_number")

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection = connection
        self._number = number

    def __repr__(self) -> str:
        return f"<Leg {self._number} on {self._connection!r}>"

    def close(self) -> None:
        """Give the answer up: the engine sees its client leave."""
        if self._connection.carries(self._number):
            self._connection.close()

    def let_finish(self, seconds: float) -> None:
        """The caller has what it wanted: give up only if the answer isn't whole within `seconds`."""
        if self._connection.carries(self._number):
            asyncio.get_running_loop().call_later(seconds, self.close)

    def pause(self) -> None:
        """Stop reading: the engine's sends block once the buffers are full."""
        if self._connection.carries(self._number):
            self._connection.pause()

    def resume(self) -> None:
        """Read again."""
        if self._connection.carries(self._number):
            self._connection.resume()

    def take_reads(self, take: TakeRead) -> None:
        """From now on, offer reads that begin between two chunks to `take` as they are, and not to the sink."""
        if self._connection.carries(self._number):
            self._connection.take_reads(take)


class Connection(asyncio.Protocol):
    """One connection. `on_free` is called when it can take another request, `on_lost` once when it is gone."""

    __slots__ = (
        "_answering",
        "_between",
        "_complete",
        "_extra",
        "_final",
        "_headers",
        "_keep",
        "_lane",
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
        "_take",
        "_transport",
        "_until_eof",
        "_wrong",
        "idle_since",
    )

    def __init__(self, name: str, on_free: Callable[[Connection], None], on_lost: Callable[[Connection], None]) -> None:
        self._name = name
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
        self._requests = 0
        self._sent_at = 0.0
        self._paused = False
        self._take: TakeRead | None = None
        self._lane: TakeRead | None = None  # as `_take`, while the parser stands between two chunks
        self._between = False
        self._stopped_between = False  # what was read so far ends between two chunks
        self._extra = 0  # bytes since the last one of a body, those that are being parsed among them
        self._wrong: EngineError | None = None  # why the parser was stopped
        self.idle_since = 0.0

    def __repr__(self) -> str:
        state = "busy" if self._sink else "idle"
        return f"<Connection {self._name} {state}, {self._requests} requests>"

    @property
    def usable(self) -> bool:
        """Whether a request may be sent."""
        return self._transport is not None and not self._transport.is_closing() and self._sink is None

    def send(self, request: Message, sink: Sink) -> Leg:
        """Write a whole request; its answer goes to `sink`. Return the caller's hold on it."""
        if self._transport is None or self._sink is not None:
            raise RuntimeError(f"{self!r} can't take a request")
        self._sink = sink
        self._requests += 1
        self._answering = False
        self._extra = 0
        self._sent_at = asyncio.get_running_loop().time()
        if self._paused:  # the request before ended while its client was not reading
            self._paused = False
            self._transport.resume_reading()
        if isinstance(request, bytes):
            self._transport.write(request)
        else:
            for part in request:
                self._transport.write(part)
        return Leg(self, self._requests)

    def take_reads(self, take: TakeRead) -> None:
        """Offer reads of the present answer that begin between two chunks to `take`."""
        self._take = take
        if self._stopped_between:
            self._lane = take

    def carries(self, number: int) -> bool:
        """Tell whether the connection is still at work on its `number`th request."""
        return self._sink is not None and self._requests == number

    def close(self) -> None:
        """Drop the connection at once. The sink hears nothing more."""
        self._sink = self._take = self._lane = None
        self._stopped_between = False
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Stop reading: the engine's sends block once the buffers are full."""
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
        self._parser = httptools.HttpResponseParser(
            self
        )  # not before, since each holds the other until the connection is lost

    def data_received(self, data: bytes) -> None:
        if len(data) >= LARGE_READ:
            self._give_way()
        lane = self._lane
        if lane is not None:
            # The parser stands between two chunks, and may stay there while whole ones go past it.
            taken = lane(data)
            if taken:
                if taken == len(data):
                    return
                data = data[taken:]
            payloads, rest = whole(data)
            if payloads:
                self._parts = payloads
                self._flush()
            if rest == len(data):
                return
            data = data[rest:] if rest else data
        sink = self._sink
        if sink is None:
            self.close()  # bytes nobody asked for: the stream is out of step
            return
        self._answering = True
        self._extra += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._flush()
            if self._complete:  # what followed the answer was wrong, or a second one
                self._finish(keep=False)
                return
            self._fail(self._wrong or EngineError(f"{self._name} does not speak HTTP/1.1: {error}"))
            return
        if self._parts or self._complete:
            self._extra = 0
        elif self._extra > MOST_HEAD:
            # A header's value is kept by the parser until it is whole; nobody hears of interim answers and chunk extensions.
            self._fail(self._too_much())
            return
        # A size line that has only begun does not end like this; one that is whole has been told.
        self._stopped_between = self._between and data.endswith(b"\r\n")
        self._lane = self._take if self._stopped_between else None
        self._flush()
        if self._complete and self._sink is sink:
            self._finish(keep=self._keep)

    def _give_way(self) -> None:
        if self._transport is not None and not self._paused and not self._transport.is_closing():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._transport is not None and not self._paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self)
        del self._parser  # each holds the other
        if self._sink is None:
            return
        if self._until_eof and exc is None:
            self._finish(keep=False)
        elif isinstance(exc, ssl.SSLError) and self._requests == 1 and not self._answering:
            # With TLS 1.3 an engine that wants a certificate, and not ours, says so only after our side of the handshake.
            self._fail(EngineTlsError(f"{self._name} refused TLS: {(exc.reason or '').replace('_', ' ').lower()}"))
        elif self._requests > 1 and not self._answering and self._age() < STALE_WITHIN:
            self._fail(StaleConnectionError(f"{self._name} closed a kept connection"))
        else:
            why = f": {exc}" if exc else ""
            self._fail(EngineError(f"{self._name} closed the connection before its answer was whole{why}"))

    # -- httptools

    def on_message_begin(self) -> None:
        if self._complete:
            raise EngineError("an answer to nothing")  # stops the parser
        self._headers = []
        self._final = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._final:  # a trailer is no header: nothing may change behind what was decided
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._final = status >= 200
        if not self._final or self._sink is None:
            return
        if self._extra > MOST_HEAD and sum(len(name) + len(value) for name, value in self._headers) > MOST_HEAD:
            self._wrong = self._too_much()
            raise self._wrong  # stops the parser
        names = [name for name, _ in self._headers]
        framed = b"content-length" in names or b"transfer-encoding" in names
        self._until_eof = not framed and status not in (204, 304)
        headers, self._headers = self._headers, []  # the sink's: a stream lets go of them long before it ends
        try:
            self._sink.head(status, headers)
        except EngineError as error:
            self._wrong = error
            raise  # stops the parser

    def on_body(self, body: bytes) -> None:
        if self._final:  # an informational answer that has a body is no reason to take it for the real one's
            self._parts.append(body)

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = self._final

    def on_message_complete(self) -> None:
        self._between = False
        self._complete = self._final
        self._keep = self._parser.should_keep_alive()  # asked here, since the parser forgets it after the message

    def _too_much(self) -> EngineError:
        return EngineError(f"{self._name} sent more than {MOST_HEAD} bytes that are no body")

    def _age(self) -> float:
        return asyncio.get_running_loop().time() - self._sent_at

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
        self._take = self._lane = None
        self._stopped_between = False
        self._complete = False
        if keep:
            self._on_free(self)
        else:
            self.close()
        if sink is not None:
            sink.end()

    def _fail(self, error: EngineError) -> None:
        sink, self._wrong = self._sink, None
        self.close()
        if sink is not None:
            sink.failed(error.with_traceback(None))  # which would refer to all that it passed
