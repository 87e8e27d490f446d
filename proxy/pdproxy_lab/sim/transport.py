"""A simulated engine's HTTP connections: uvicorn's protocol class, with a transport that can hold
back what is written.

Owns what happens to a whole connection: held (a stopped process), its input ignored, reset, closed.
What happens to one answer is decided in `pdproxy_lab.sim.fault_middleware`, which gets the
connection from the request's ASGI scope.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import struct
import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any, Protocol, cast, runtime_checkable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pdproxy_lab.sim.faults.book import FaultBook, Situation

SCOPE_KEY = "pdproxy_lab.sim"
"""The key under which a request's scope has its `RequestConnection`."""


class Rendered:
    """What uvicorn would have written for one ASGI message."""

    def __init__(self) -> None:
        self.data = b""
        self.closes = False


@runtime_checkable
class Resets(Protocol):
    """A transport without a socket that can close with an RST."""

    def reset(self) -> None:
        """Close now with an RST."""


class Wire(asyncio.Transport):
    """The transport that uvicorn sees. Writes and closes go to the real one, or wait while it is
    held.
    """

    def __init__(self, real: asyncio.Transport) -> None:
        super().__init__()
        self._real = real
        self._rendered: Rendered | None = None
        self._held: list[bytes] | None = None
        self._close_held = False
        self._reading = True

    def write(self, data: Any) -> None:
        """Write bytes."""
        if self._rendered is not None:
            self._rendered.data += data
        elif self._held is not None:
            self._held.append(bytes(data))
        elif not self._real.is_closing():
            self._real.write(data)

    def close(self) -> None:
        """Close once all is written."""
        if self._rendered is not None:
            self._rendered.closes = True
        elif self._held is not None:
            self._close_held = True
        else:
            self._real.close()

    def abort(self) -> None:
        """Close now, as the kernel closes a dead process's sockets; held or not."""
        self._real.abort()

    def reset(self) -> None:
        """Close now with an RST; held or not."""
        if self._real.is_closing():
            return
        if isinstance(self._real, Resets):
            self._real.reset()
            return
        descriptor = self._real.get_extra_info("socket").fileno()
        # A duplicate, since the event loop keeps the socket itself to itself.
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._real.abort()

    @contextlib.contextmanager
    def rendering(self) -> Iterator[Rendered]:
        """Collect what is written instead of writing it."""
        self._rendered = rendered = Rendered()
        try:
            yield rendered
        finally:
            self._rendered = None

    def hold(self) -> None:
        """Write nothing and read nothing until `release`; that the client leaves is not noticed
        either.
        """
        if self._held is None and not self._real.is_closing():
            self._held = []
            self._real.pause_reading()

    def hold_output(self) -> None:
        """Write nothing any more; that the client leaves is still noticed."""
        if self._held is None:
            self._held = []

    def release(self) -> None:
        """Write what was held, and go on."""
        held, self._held = self._held, None
        if held is None or self._real.is_closing():
            return
        for data in held:
            self._real.write(data)
        if self._close_held:
            self._real.close()
        elif self._reading:
            self._real.resume_reading()

    def pause_reading(self) -> None:
        """Read nothing for now."""
        self._reading = False
        if self._held is None and not self._real.is_closing():
            self._real.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._reading = True
        if self._held is None and not self._real.is_closing():
            self._real.resume_reading()

    def is_closing(self) -> bool:
        """Return whether it is closed or about to be."""
        return self._close_held or self._real.is_closing()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Have another protocol get what comes."""
        self._real.set_protocol(protocol)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what is known of the socket."""
        return self._real.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        """Return how many bytes wait for the socket."""
        return self._real.get_write_buffer_size()


class ConnectionObserver(Protocol):
    """The request that is being answered on a connection."""

    def ended(self) -> None:
        """The engine itself ends the connection."""

    def left(self) -> None:
        """The connection is gone."""


class ConnectionControls:
    """The `Connection` that faults act on."""

    def __init__(self, protocol: SimProtocol) -> None:
        self._protocol = protocol

    def write(self, data: bytes) -> None:
        """Write bytes as they are."""
        self._protocol.wire.write(data)

    def close(self) -> None:
        """Close with a FIN after what was written."""
        self._protocol.wire.close()

    def reset(self) -> None:
        """Close now with an RST."""
        self._protocol.wire.reset()

    def ignore_input(self) -> None:
        """Drop everything that the client still sends."""
        self._protocol.ignores_input = True

    def pause_reading(self, seconds: float) -> None:
        """Read nothing for some seconds."""
        self._protocol.wire.pause_reading()
        self._protocol.loop.call_later(seconds, self._protocol.wire.resume_reading)


class RequestConnection:
    """A connection as one of its requests uses it."""

    def __init__(self, protocol: SimProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol, self._cycle = protocol, cycle
        self.number = protocol.number
        self.wire = protocol.wire
        self.controls = protocol.controls
        self._response_over = False

    def observe(self, observer: ConnectionObserver) -> None:
        """Call the observer when the connection is gone, now if it already is."""
        self._protocol.observer = observer
        if self._cycle.disconnected:
            observer.left()

    @property
    def gone(self) -> bool:
        """Whether the connection is gone."""
        return self._cycle.disconnected

    @property
    def complete(self) -> bool:
        """Whether the answer is complete for uvicorn."""
        return self._cycle.response_complete

    async def drain(self) -> None:
        """Wait until the socket takes more; a client that is gone takes everything."""
        if self._protocol.flow.write_paused and not self.gone:
            await self._protocol.flow.drain()

    @contextlib.contextmanager
    def rendering(self) -> Iterator[Rendered]:
        """Collect what uvicorn writes. The next pipelined request starts only after `written`."""
        on_response, self._cycle.on_response = self._cycle.on_response, self._note_response_over
        with self.wire.rendering() as rendered:
            try:
                yield rendered
            finally:
                self._cycle.on_response = on_response

    def _note_response_over(self) -> None:
        self._response_over = True

    def written(self) -> None:
        """Go on after what `rendering` collected has been written."""
        if self._response_over:
            self._response_over = False
            self._cycle.on_response()

    def answered(self) -> None:
        """Mark an answer that was not written by uvicorn as complete: the connection waits for its
        next request.
        """
        if not self._cycle.response_complete:
            self._cycle.response_started = self._cycle.response_complete = True
            self._cycle.message_event.set()
            self._cycle.on_response()


class Host(Protocol):
    """The server, as a connection uses it."""

    @property
    def faults(self) -> FaultBook:
        """The armed faults."""

    @property
    def frozen(self) -> bool:
        """Whether the process is stopped."""

    def connected(self) -> None:
        """A connection has been accepted."""


class SimProtocol(HttpToolsProtocol):
    """uvicorn's protocol on a `Wire`. `protocol_class` makes the class of one server."""

    host: Host
    numbers: Iterator[int]
    wire: Wire
    controls: ConnectionControls
    observer: ConnectionObserver | None = None
    ignores_input = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a connection."""
        self.number = next(self.numbers)
        self.wire = Wire(cast("asyncio.Transport", transport))
        self.controls = ConnectionControls(self)
        super().connection_made(self.wire)
        self.host.connected()
        if self.host.frozen:  # the event loop had accepted it before the listener was closed for it
            self.wire.hold()
        for one in self.host.faults.due("accept", Situation()):
            one.kind.on_connection(self.controls, one)

    def data_received(self, data: bytes) -> None:
        """Take bytes."""
        if not self.ignores_input:
            super().data_received(data)

    def on_message_begin(self) -> None:
        """Start a request, with the current date for its answer."""
        super().on_message_begin()
        stamp = formatdate(time.time(), usegmt=True).encode()
        self.server_state.default_headers = [(b"date", stamp), (b"server", b"uvicorn")]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cast("dict[str, Any]", cycle.scope)[SCOPE_KEY] = RequestConnection(self, cycle)
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notice that the connection is gone."""
        super().connection_lost(exc)
        if self.observer is not None:
            self.observer.left()

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def drop(self) -> None:
        """Close as the kernel closes the sockets of a process that is gone."""
        if self.observer is not None:
            self.observer.ended()
        self.wire.abort()


def protocol_class(host: Host) -> type[SimProtocol]:
    """Return a protocol class for uvicorn's `http` setting."""
    return type("BoundSimProtocol", (SimProtocol,), {"host": host, "numbers": itertools.count(1)})
