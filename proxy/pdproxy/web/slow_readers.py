"""Clients that read: a floor of their speed, which counts only while bytes wait to be sent.

Owns what is noted of one connection while its client reads slower than we write. Its stream holds a place and KV on an
engine: a client that takes a byte now and then must not hold them for ever, nor keep others waiting.
"""

from __future__ import annotations

import socket
import struct
from asyncio import Transport
from collections.abc import Callable
from dataclasses import dataclass

from pdproxy.kit.clock import Clock, Timer
from pdproxy.kit.errors import PdproxyError, Wait
from pdproxy.observe.events import DeadlinePassed, Evicted, Observers
from pdproxy.serving.access.clients import Client, Clients

SAMPLES = 12
"""Looks at a client's speed within `deadlines.client_write`."""
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_BYTES_ACKED = struct.Struct("120x Q")
"""Where Linux's `struct tcp_info` has `tcpi_bytes_acked`: the bytes that the other side's kernel has taken."""


@dataclass(frozen=True, slots=True)
class Floor:
    """How slowly clients may read: `rate` in bytes per second, 0 for none, for up to `seconds`; who else waits meanwhile."""

    rate: int
    seconds: float
    clock: Clock
    clients: Clients
    observers: Observers
    crowds_out: Callable[[Client], bool]


class Reading:
    """A look at a client's speed from time to time, from the moment on when it reads slower than we write, until it has
    caught up."""

    __slots__ = ("_caught_up", "_floor", "_left", "_slow_since", "_taken", "_timer", "_transport", "client")

    def __init__(self, floor: Floor, client: Client, transport: Transport, caught_up: Callable[[], None]) -> None:
        self._floor = floor
        self.client = client
        self._transport = transport
        self._caught_up = caught_up
        self._left = transport.get_write_buffer_size()
        self._taken = bytes_taken(transport)
        self._slow_since: float | None = None
        self._timer: Timer = floor.clock.after(floor.seconds / SAMPLES, self._look)

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()
        self._floor.clients.reads_again(self.client, self)

    def evict(self, error: PdproxyError) -> None:
        """Drop the client: others wait for what its stream holds."""
        self._floor.observers.notify(Evicted("reader"))
        self.stop()
        self._transport.abort()

    def _look(self) -> None:
        floor, left, taken = self._floor, self._transport.get_write_buffer_size(), bytes_taken(self._transport)
        window = floor.seconds / SAMPLES
        if not left:
            self.stop()
            self._caught_up()
            return
        enough = left < self._left  # all that can be seen where the system does not say more
        if taken is not None and self._taken is not None:
            enough = taken - self._taken >= max(1, floor.rate * window)
        self._left, self._taken = left, taken
        now = floor.clock.now()
        self._timer = floor.clock.after(window, self._look)
        if enough:
            self._slow_since = None
            floor.clients.reads_again(self.client, self)
            return
        if self._slow_since is None:
            self._slow_since = now - window
            floor.clients.reads_slowly(self.client, self)
        if now - self._slow_since >= floor.seconds - window / 2:
            floor.observers.notify(DeadlinePassed(Wait.CLIENT_WRITE.value))
            self.stop()
            self._transport.abort()
        elif floor.crowds_out(self.client):
            self.evict(PdproxyError("others wait"))


def bytes_taken(transport: Transport) -> int | None:
    """Return how many bytes the other side has taken since the connection began; None where the system does not say."""
    if _TCP_INFO is None:
        return None
    try:
        info = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_ACKED.size)
        (taken,) = _BYTES_ACKED.unpack(info)
    except (OSError, struct.error, AttributeError):
        return None
    return int(taken)
