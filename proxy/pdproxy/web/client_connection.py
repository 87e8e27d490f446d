"""A client's connection: which client it belongs to, how it is counted, how it ends, and how fast
the client reads.

Owns what is written and not read yet. It is counted from the moment at which writing is paused,
whoever wrote it. Until a complete answer is read, the next request of the connection does not
begin.

Owns the end of a connection. A connection that is refused gets one last answer, if the answers
before it are complete. Then it is closed for writing, and what the client still sends is discarded
for `LINGER` seconds. Without that, unread bytes would turn the close into a reset, and the client
would lose the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set as AbstractSet
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from pdproxy.kit.errors import OverloadedError, PdproxyError, UnauthorizedError
from pdproxy.observe.events import Observers
from pdproxy.serving.access.clients import Client, address_name
from pdproxy.serving.access.keys import CHALLENGE
from pdproxy.web.connection_bounds import LINGER, MAX_REFUSED, MAX_UNSENT, ConnectionBounds
from pdproxy.web.lean_flow_control import LeanFlowControl, LeanPipeline
from pdproxy.web.piecewise_transport import PiecewiseTransport
from pdproxy.web.refusals import report_refusal
from pdproxy.web.revocable import MakeError, RevocableRequest, ShownCertificate
from pdproxy.web.slow_readers import ReadWatch
from pdproxy.wire.errors import error_body, retry_headers


class ClientConnection(HttpToolsProtocol):
    """uvicorn's protocol on a counted connection. Subclasses set `bounds` and `observers`."""

    bounds: ConnectionBounds
    observers: Observers
    # uvicorn's class has a dictionary, whose keys all connections share as long as they are no more
    # than 30.
    __slots__ = (
        "_discarding",
        "_lingering",
        "_read_watch",
        "_unread_client",
        "_waits_for_reader",
        "active",
        "certificate",
        "passed",
        "passthrough_client",
        "peer",
        "peer_is_trusted",
    )

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.pipeline = LeanPipeline()  # type: ignore[assignment]
        self.active: RequestResponseCycle | None = None
        """The request being served; with requests in the pipeline, `cycle` is the last one that was
        read.
        """
        self._discarding = False
        """Whether everything that the client still sends is discarded."""
        self._lingering = False
        self._read_watch: ReadWatch | None = None
        self._unread_client: Client | None = None
        """The client of what is not read yet."""
        self._waits_for_reader = False
        """Whether an answer is complete, and what follows it waits until it is read."""
        self.passthrough_client: Client | None = None
        """The client of the last request on a passed-through route."""
        self.passed: RevocableRequest | None = None
        """The request on such a route that is being answered."""
        self.certificate: ShownCertificate | None = None
        self.peer: Client
        """The client by the address that the connection comes from."""
        self.peer_is_trusted = False
        """Whether the peer is a trusted proxy, which names its clients."""

    def more_headers(self) -> list[tuple[bytes, bytes]]:
        """Return additional headers for an answer of the proxy itself, by the request's head as far
        as it is known.
        """
        return []

    def request_client(self) -> Client:
        """Return the client whose request is being answered."""
        return self.passthrough_client or self.peer

    # -- the end

    def revoke(self, error: MakeError, keys: AbstractSet[bytes] | None) -> int:
        """See `RevocableConnection`."""
        return 0 if self.passed is None else int(self.passed.revoke(error, keys))

    def shut_out(self, error: MakeError) -> None:
        """See `RevocableConnection`. What its client does not read within `LINGER` seconds it does
        not get.
        """
        for cycle in (self.active, self.cycle, *(queued for queued, _ in self.pipeline)):
            if cycle is not None:
                cycle.keep_alive = False
        self.revoke(error, None)
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        self.loop.call_later(LINGER, self.transport.abort)

    def end(self, *, all_read: bool) -> None:
        """Close the connection after an answer; `all_read`: whether its request was read
        completely.
        """
        if all_read and not self._discarding:
            self.transport.close()
        else:
            self.linger()

    def linger(self) -> None:
        """Close for writing, and completely once the client has left or after `LINGER` seconds."""
        self._discarding = self._lingering = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER, self.transport.abort)
        else:
            self.transport.close()

    def drop(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def answer_error(self, error: PdproxyError) -> None:
        """Answer an error outside of any request's cycle, and close."""
        if self.transport.is_closing():
            return
        report_refusal(self.observers, error, str(self.peer.name))
        body = error_body(error)
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
            % len(body)
        )
        challenge = [CHALLENGE] if isinstance(error, UnauthorizedError) else []
        head += b"".join(
            [
                b"%b: %b\r\n" % line
                for line in (*retry_headers(error), *challenge, *self.more_headers())
            ]
        )
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        self.linger()

    # -- how fast the client reads

    def watch_reading(self) -> None:
        """Drop the client if it reads what is left to be sent too slowly (`web.slow_readers`)."""
        if not self.transport.get_write_buffer_size():
            return
        client = self.request_client()
        if self._read_watch is not None and self._read_watch.client is not client:
            self._read_watch.stop()  # its client has read the answer
            self._read_watch = None
        if self._read_watch is None:
            self._read_watch = ReadWatch(
                self.bounds.slow_readers, client, self.transport, self._caught_up
            )

    def _caught_up(self) -> None:
        self._read_watch = None
        self._answer_read()

    def _hold_unread(self) -> None:
        """Count what is left to be sent until the client has read it."""
        if self._unread_client is None:
            self._unread_client = self.request_client()
        self.bounds.unread_answers.hold(
            self._unread_client, self, self.transport.get_write_buffer_size()
        )

    def wait_for_reader(self) -> bool:
        """An answer is complete, and not all of it is sent. Return whether what follows it has to
        wait until it is read.
        """
        self.watch_reading()
        if not self.flow.write_paused or self._lingering:
            return False
        self._hold_unread()  # more of it by now
        self._waits_for_reader = True
        return True

    def written_in_pieces(self) -> None:
        """More was written: count it, too."""
        if self.flow.write_paused:
            self._hold_unread()

    def _answer_read(self) -> None:
        """What was left was read, or never will be."""
        if self._unread_client is not None:
            self.bounds.unread_answers.release(self._unread_client, self)
            self._unread_client = None

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.flow = LeanFlowControl(self.transport)  # type: ignore[assignment]
        self.transport.set_write_buffer_limits(high=MAX_UNSENT)
        if self.scheme == "https":
            self.transport = PiecewiseTransport(self.transport)  # type: ignore[assignment]
        bounds = self.bounds
        address = self.client[0] if self.client else ""
        self.peer = bounds.clients.enter(address_name(address))
        self.peer_is_trusted = bounds.clients.trusts(address)
        try:
            bounds.connections.opened(self.peer, self)
        except OverloadedError as error:
            self._discarding = True
            if bounds.connections.open > bounds.connections.max_open + MAX_REFUSED:
                report_refusal(self.observers, error, str(self.peer.name))
                self.transport.abort()
            else:
                self.answer_error(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._read_watch is not None:
            self._read_watch.stop()
        self._caught_up()
        self.bounds.connections.closed(self.peer, self)
        self.bounds.clients.leave(self.peer)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.watch_reading()
        self._hold_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._answer_read()
        if self._waits_for_reader:
            self._waits_for_reader = False
            if (
                self.active is not None
                and not self.active.keep_alive
                and not self.transport.is_closing()
            ):
                self.end(all_read=True)  # what came behind the answer was refused
            self.on_response_complete()

    @property
    def idle(self) -> bool:
        """Whether no engine works for the connection."""
        raise NotImplementedError

    def evict(self, error: PdproxyError) -> None:
        """Close an idle connection: another client needs its place."""
        raise NotImplementedError
