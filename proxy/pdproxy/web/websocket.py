"""A client's WebSocket: its handshake, its messages, pings, and its end.

Owns the connection from the handshake on; `websockets` reads and writes the frames. What a client
may send is bounded: a message in bytes (`wire.realtime.MAX_MESSAGE`, `limits.max_body_bytes`), all
that is held of it in `limits.max_buffered_bytes`, frames that bring no message forward in their
number. Frames are read in small pieces, and while a whole message waits to be taken nothing more is
read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

from websockets.datastructures import Headers as HandshakeHeaders
from websockets.exceptions import InvalidHeader
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import SERVER, Protocol, State
from websockets.server import ServerProtocol

from pdproxy.kit.clock import Timer
from pdproxy.kit.errors import (
    BadRequestError,
    BodyTooLargeError,
    ForbiddenError,
    OverloadedError,
    PdproxyError,
    Wait,
)
from pdproxy.kit.frames import drop_traceback, frames
from pdproxy.observe.description import MergeRule, gauge
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.serving.access.routes import RouteEntry
from pdproxy.serving.request.incoming import IncomingPassthrough
from pdproxy.serving.stream.client_websocket import ClientWebSocket
from pdproxy.settings.keys import KeyRights
from pdproxy.upstream.connection import Headers
from pdproxy.web.cycle import FORWARDED, DataPath, ResponseCycle
from pdproxy.web.guard import GuardedProtocol
from pdproxy.wire.realtime import MAX_MESSAGE

logger = logging.getLogger("pdproxy")

PING = 20.0
"""Seconds between two pings. A client of which nothing has come since the last one is gone: its
system would keep the connection of a machine without power for hours.
"""
PIECE = 4096
"""Bytes that are read at once: 700 of the smallest frames, in 4 ms."""
MAX_FRAMES, MIN_PART = 1024, 256
"""Frames between the ends of two messages of a client: pings, and parts of a message, which may be
more if they have `MIN_PART` bytes on average. Each costs 5 us.
"""
_SILENT = logging.Logger("websockets", logging.CRITICAL + 1)
"""The library logs what it reads, and how connections end."""
_NORMAL, _UNSUPPORTED, _POLICY = 1000, 1003, 1008

Serve = Callable[[IncomingPassthrough, ClientWebSocket], Awaitable[None]]


WEBSOCKETS = gauge(
    "pdproxy_websockets",
    "connections",
    "Open WebSockets of clients. Each is one of pdproxy_connections, too, and has a place in "
    "pdproxy_inflight once it has named its model",
    workers=MergeRule.SUM,
)


class WebSockets:
    """What WebSockets need. One for the whole process. `session` returns the session that a
    request's headers name, None where they name none.
    """

    __slots__ = ("open", "serve", "session")

    def __init__(
        self,
        serve: Serve,
        observers: Observers,
        session: Callable[[Mapping[bytes, bytes]], str | None],
    ) -> None:
        self.serve = serve
        self.session = session
        self.open = 0
        """How many are open: from the handshake's answer to the end."""
        observers.show(WEBSOCKETS, lambda: [((), self.open)])


class WebSocketCycle(ResponseCycle):
    """One WebSocket, from its request on: the service's `ClientWebSocket`."""

    __slots__ = (
        "_closed",
        "_ended",
        "_entry",
        "_frames",
        "_heard",
        "_held",
        "_messages",
        "_part_bytes",
        "_parts",
        "_pinging",
        "_small",
        "_unread",
        "_waiting",
        "_websockets",
    )

    def __init__(
        self,
        entry: RouteEntry,
        websockets: WebSockets,
        data_path: DataPath,
        connection: GuardedProtocol,
        headers: Headers,
    ) -> None:
        super().__init__(
            entry.path,
            data_path,
            connection,
            headers,
            chunked=False,
            keep_alive=False,
            expect_100_continue=False,
        )
        self._entry = entry
        self._websockets = websockets
        limit = min(MAX_MESSAGE, data_path.max_body)
        self._frames = Protocol(SERVER, max_size=limit, logger=_SILENT)
        self._unread = memoryview(b"")
        """What was read, and not given to the parser yet."""
        self._held = 0
        """Bytes that count in the budget for bodies: what has come behind the last message that was
        taken, that included.
        """
        self._parts: list[bytes] = []
        """Of a message that is not complete."""
        self._part_bytes = self._small = 0
        self._messages: deque[bytes] = deque()
        """Those that wait to be taken: one, and what is whole in the same piece."""
        self._waiting: asyncio.Future[None] | None = None
        self._ended: PdproxyError | None = None
        """Why no more messages come; None if the client has closed the WebSocket, or has not."""
        self._closed = False
        """Whether nothing is sent any more."""
        self._pinging: Timer | None = None
        self._heard = True
        """Whether anything has come since the last ping."""

    # -- what the protocol reports

    def switched(self, behind: bytes) -> None:
        """The head is complete, and what follows it are frames: `behind`, and all that comes."""
        self.transport.set_protocol(_Switched(self, self._connection))
        self.flow.pause_reading()
        self._take(behind)

    def feed(self, data: bytes) -> None:
        """Take what the client sends."""
        self._heard = True
        if self._is_over:
            return
        self._take(data)
        self._read()
        self.flow.received(len(data))  # type: ignore[attr-defined]

    def _take(self, data: bytes) -> None:
        try:
            self._data_path.body_budget.take(self.client, len(data))
        except OverloadedError as error:
            drop_traceback(error)
            self._ended = error
            self._wake()
            return
        self._held += len(data)
        self._unread = memoryview(bytes(self._unread) + data if self._unread else data)

    def written(self) -> None:
        """The client reads again: its pings are answered again."""
        self._read()

    def _end_by(self, error: PdproxyError) -> None:
        self.refuse(error)

    def refuse(self, error: PdproxyError) -> None:
        """End it: an error is what the client gets last."""
        if self.ended_by is None:
            self.ended_by = error
            if self._serving is not None:
                self._serving.cancel()

    def evict(self, error: PdproxyError) -> None:
        """End it while its message is not complete: another client needs its space."""
        self.refuse(error)

    # -- frames

    def _read(self) -> None:
        """Read frames until a message is whole, or nothing is left."""
        if not self.begun or self._unwritable():
            return
        protocol = self._frames
        while self._unread and not self._messages and not self._is_over and not self.paused:
            piece, self._unread = self._unread[:PIECE], self._unread[PIECE:]
            protocol.receive_data(piece)  # type: ignore[arg-type]  # it adds it to a buffer
            for frame in protocol.events_received():
                assert isinstance(frame, Frame)  # the others are of handshakes
                self._found(frame.opcode, bytes(frame.data), is_last=frame.fin)
            self._write()
            if protocol.state is not State.OPEN:
                self._ended = self._why_closed()
        bodies = self.client.bodies
        bodies.pop(self, None)
        if self._held and not self._messages:
            bodies[self] = None
        if self._messages or self._is_over:
            self._wake()
        if not self._is_over and (self._unread or self._messages or self.paused):
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()

    def _found(self, opcode: Opcode, data: bytes, *, is_last: bool) -> None:
        if self._ended is not None:
            return
        if opcode is Opcode.BINARY:
            self._fail(_UNSUPPORTED, "Only messages of text are taken")
        elif opcode is Opcode.TEXT or opcode is Opcode.CONT:
            self._parts.append(data)
            self._part_bytes += len(data)
            if is_last:
                parts, self._parts = self._parts, []
                self._messages.append(parts[0] if len(parts) == 1 else b"".join(parts))
                self._part_bytes = self._small = 0
                return
        self._small += 1
        if self._small > MAX_FRAMES and self._part_bytes < self._small * MIN_PART:
            self._fail(_POLICY, f"More than {MAX_FRAMES} small frames without a message")

    def _fail(self, code: int, why: str) -> None:
        self._frames.fail(code, why)
        self._ended = BadRequestError(why)

    def _why_closed(self) -> PdproxyError | None:
        sent = self._frames.close_sent
        if self._ended is not None or self._frames.close_rcvd is not None or sent is None:
            return self._ended
        if sent.code == 1009:
            return BodyTooLargeError(f"The message is too large: {sent.reason}")
        return BadRequestError(f"What came is no WebSocket: {sent.reason}")

    @property
    def _is_over(self) -> bool:
        """Whether no more messages come."""
        is_closed = self._closed or self.response_complete
        return is_closed or self._ended is not None or self._frames.state is not State.OPEN

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _write(self) -> None:
        data = b"".join(self._frames.data_to_send())
        if data and not self._unwritable():
            self.transport.write(data)

    def _ping(self) -> None:
        clock = self._data_path.bounds.slow_readers.clock
        if not self._heard and not self.flow.read_paused:
            self._data_path.observers.notify(DeadlinePassed(Wait.PONG.value))
            self.transport.abort()
            return
        if not self.paused and self._frames.state is State.OPEN:
            self._heard = False
            self._frames.send_ping(b"")
            self._write()
        self._pinging = clock.after(PING, self._ping)

    # -- what the service calls

    def accept(self, headers: Headers) -> None:
        """See `ClientWebSocket`."""
        lines = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self._headers]
        made = dict(self._headers)
        if made.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in made:
            raise BadRequestError("A request that opens a WebSocket has no body")
        if not self._data_path.cors.may_connect(self._headers):
            raise ForbiddenError("Pages of this site may not open a WebSocket here (listen.cors)")
        asked = ServerProtocol(logger=_SILENT)
        answer = asked.accept(Request(self._entry.path, HandshakeHeaders(lines)))
        if answer.status_code != 101:
            why = asked.handshake_exc
            text = f"{why}" if isinstance(why, InvalidHeader) else "it is not one of version 13"
            raise BadRequestError(f"The handshake of the WebSocket is wrong: {text}")
        for name, value in headers:
            answer.headers[name.decode("latin-1")] = value.decode("latin-1")
        self.response_started = True
        self.transport.write(answer.serialize())
        self._websockets.open += 1
        self._pinging = self._data_path.bounds.slow_readers.clock.after(PING, self._ping)
        self._read()

    async def next_message(self) -> bytes | None:
        """See `ClientWebSocket`."""
        self._release()
        if not self._messages:
            self._read()
        while not self._messages and not self._is_over:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        if self._messages:
            return self._messages.popleft()
        if self._ended is not None:
            raise self._ended
        return None

    def _release(self) -> None:
        """Give back the space of messages that were taken: all but what is not complete."""
        if not self._messages:
            left = len(self._unread) + self._part_bytes + len(self._frames.reader.buffer)
            if left < self._held:
                self._data_path.body_budget.release(self.client, self._held - left)
                self._held = left

    async def send_message(self, message: bytes) -> None:
        """See `ClientWebSocket`."""
        self._send(message)
        if self.paused:
            await self.flow.drain()

    def _send(self, message: bytes) -> None:
        if self._frames.state is State.OPEN:
            self._frames.send_text(message)
            self._write()

    def keep(self) -> None:
        """See `ClientWebSocket`."""
        self._connection.end_body()

    def close(self, code: int, last: bytes | None = None) -> None:
        """See `ClientWebSocket`."""
        if self._closed or not self.begun or self.response_complete:
            return
        if last is not None:
            self._send(last)
        if self._frames.state is State.OPEN:
            self._frames.send_close(code)
            self._write()
        self._closed = True
        stuck = self.paused
        self._fed = self._frames.close_rcvd is not None
        if not self._unwritable():
            self.flow.resume_reading()  # what still comes is dropped
            self._complete()
            if stuck:
                self.transport.abort()  # a close would wait for the client to read

    async def run_asgi(self, app: object) -> None:
        """Serve it. uvicorn runs this as the request's task."""
        self._serving = asyncio.current_task()
        try:
            if not self.disconnected:
                await self._websockets.serve(self._incoming(), self)
        except asyncio.CancelledError:
            pass  # its client has left, or it was ended
        except Exception as failed:
            logger.error("a WebSocket failed in pdproxy itself: %s", frames(failed))  # noqa: TRY400
        finally:
            self.close(_NORMAL)
            if not self.begun and not self._unwritable():
                self.transport.close()
            self._end()

    def _end(self) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
            self._pinging = None
            self._websockets.open -= 1
        self.client.bodies.pop(self, None)
        self._data_path.body_budget.release(self.client, self._held)
        self._held = 0
        self._unread, self._parts = memoryview(b""), []
        self._messages.clear()
        self._closed = True
        super()._end()

    def _incoming(self) -> IncomingPassthrough:
        found = dict(reversed([*self._headers]))  # if a header came twice, the first one counts
        return IncomingPassthrough(
            entry=self._entry,
            request_id=found[b"x-request-id"].decode("latin-1")
            if b"x-request-id" in found
            else None,
            authorization=found.get(b"authorization"),
            content_type="",
            forward=tuple([line for line in self._headers if line[0] in FORWARDED]),
            body=b"",
            head=self,
            client=self._address,
            key=None if self._key is None else self._key.name,
            session=self._websockets.session(found),
            salt=self._salt,
            found=self._key,
            refusal=self._key_error,
        )

    def check_head(self, rights: KeyRights) -> None:
        """See `serving.access.keys.Head`."""
        self._data_path.identify.check_head(rights, self._headers, self._entry.path)


class _Switched(asyncio.Protocol):
    """The protocol of a connection whose bytes are frames. All but these is the connection's."""

    def __init__(self, cycle: WebSocketCycle, connection: GuardedProtocol) -> None:
        self._cycle, self._connection = cycle, connection

    def data_received(self, data: bytes) -> None:
        self._cycle.feed(data)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
        self._cycle.written()

    def written_in_pieces(self) -> None:
        self._connection.written_in_pieces()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)
        del self._cycle, self._connection  # they refer to the transport, and that to this
