"""Clients that read too slowly: a minimum speed, which applies only while bytes wait to be sent.

Owns the measurements of a connection while its client reads more slowly than we write. Its stream
holds a place and KV on an engine: a client that reads only a few bytes from time to time must not
hold these without end, and make other clients wait.
"""

from __future__ import annotations

import math
import socket
import struct
from asyncio import Transport
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdproxy.kit.clock import Clock, Timer
from pdproxy.kit.errors import PdproxyError, Wait
from pdproxy.observe.events import DeadlinePassed, Evicted, Observers
from pdproxy.serving.access.clients import Client, Clients

SAMPLES = 12
"""How often a client's speed is measured within `deadlines.client_write`."""
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_BYTES_ACKED = struct.Struct("120x Q")
"""Where Linux's `struct tcp_info` has `tcpi_bytes_acked`: the bytes that the other side's kernel
has taken.
"""


@dataclass(slots=True)
class SlowReaderPolicy:
    """How slowly clients may read: less than `min_rate` bytes per second (0: nothing at all) for up
    to `seconds`.

    `over_share`: whether a client holds more than its share while others wait. Then it is dropped
    once it is found slow.
    """

    min_rate: int
    seconds: float
    clock: Clock
    clients: Clients
    observers: Observers
    over_share: Callable[[Client], bool]


class ReadWatch:
    """Measures a client's speed from time to time, from when it reads more slowly than we write
    until it has caught up.
    """

    __slots__ = (
        "_caught_up",
        "_left",
        "_policy",
        "_reads",
        "_taken",
        "_timer",
        "_transport",
        "client",
    )

    def __init__(
        self,
        policy: SlowReaderPolicy,
        client: Client,
        transport: Transport,
        caught_up: Callable[[], None],
    ) -> None:
        self._policy = policy
        self.client = client
        self._transport = transport
        self._caught_up = caught_up
        self._left = transport.get_write_buffer_size()
        self._taken = bytes_taken(transport)
        self._reads: deque[float] = deque(maxlen=SAMPLES)
        """Bytes that were read between two measurements, of the last `policy.seconds`."""
        self._timer: Timer = policy.clock.after(policy.seconds / SAMPLES, self._measure)

    def stop(self) -> None:
        """Measure no more."""
        self._timer.cancel()
        self._policy.clients.unmark_slow(self.client, self)

    def evict(self, error: PdproxyError) -> None:
        """Drop the client: others wait for the place that its stream holds."""
        self._policy.observers.notify(Evicted("reader"))
        self.stop()
        self._transport.abort()

    def _measure(self) -> None:
        policy, left, taken = (
            self._policy,
            self._transport.get_write_buffer_size(),
            bytes_taken(self._transport),
        )
        window = policy.seconds / SAMPLES
        if not left:
            self.stop()
            self._caught_up()
            return
        read: float = 0 if taken is None or self._taken is None else taken - self._taken
        if taken is None and left < self._left:
            read = math.inf  # the system does not count: any progress is enough
        self._left, self._taken = left, taken
        self._reads.append(read)
        # The other side's system takes bytes in steps, which may be minutes apart: one step makes
        # no fast reader.
        if len(self._reads) == SAMPLES and sum(self._reads) < max(
            1, policy.min_rate * policy.seconds
        ):
            policy.observers.notify(DeadlinePassed(Wait.CLIENT_WRITE.value))
            self.stop()
            self._transport.abort()
            return
        self._timer = policy.clock.after(window, self._measure)
        if read >= max(1, policy.min_rate * window):
            policy.clients.unmark_slow(self.client, self)
        elif policy.over_share(self.client):
            self.evict(PdproxyError("others wait"))
        else:
            policy.clients.mark_slow(self.client, self)


def bytes_taken(transport: Transport) -> int | None:
    """Return how many bytes the other side has taken since the connection began; None where the
    system does not count them.
    """
    if _TCP_INFO is None:
        return None
    try:
        info = transport.get_extra_info("socket").getsockopt(
            socket.IPPROTO_TCP, _TCP_INFO, _BYTES_ACKED.size
        )
        (taken,) = _BYTES_ACKED.unpack(info)
    except (OSError, struct.error, AttributeError):
        return None
    return int(taken)
