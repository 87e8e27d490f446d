"""Admission: all waiting happens here, before any engine has worked.

Owns the number of requests being served. A prefilled request is never held back: its KV lease is running.

A place that comes free goes to the client with the fewest places among those that wait, and there to its oldest
request. Where the queue is full, a client with fewer requests in it takes the place of the newest one of the client
with the most. While somebody waits, a client with more places than its share loses those whose answers it reads too
slowly.
"""

from __future__ import annotations

import asyncio

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import OverloadedError, Wait
from pdproxy.observe.events import DeadlinePassed, Evicted, Observers
from pdproxy.serving.clients import Client, Clients


class Admission:
    """At most `max_inflight` requests at once; up to `max_queue` wait, each `timeout` seconds."""

    def __init__(
        self,
        max_inflight: int,
        max_queue: int,
        timeout: float,
        observers: Observers,
        clock: Clock,
        clients: Clients,
    ) -> None:
        self._max_inflight = max_inflight
        self._max_queue = max_queue
        self._timeout = timeout
        self._observers = observers
        self._clock = clock
        self._clients = clients
        self._inflight = 0
        self._waiting = 0
        self._lines: dict[Client, None] = {}
        """Clients with requests that wait, in the order in which they began to."""
        self._holders = 0
        """Clients with a place."""
        self._closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    def __repr__(self) -> str:
        return f"<Admission {self._inflight} in flight, {self._waiting} waiting{', closed' * self._closed}>"

    @property
    def inflight(self) -> int:
        """Requests being served."""
        return self._inflight

    @property
    def waiting(self) -> int:
        """Requests waiting for a place."""
        return self._waiting

    @property
    def closed(self) -> bool:
        """Whether new requests are refused because of a shutdown."""
        return self._closed

    async def enter(self, client: Client) -> None:
        """Take a place. Each success is matched by one `leave`.

        Raises:
            OverloadedError: shutting down, the queue is full, or no place came free in time.
        """
        if self._closed:
            raise OverloadedError("pdproxy is shutting down")
        if self._inflight < self._max_inflight and not self._waiting:
            self._take(client)
            return
        if self._waiting >= self._max_queue and not self._displace(client):
            raise OverloadedError(f"{self._inflight} requests are being served and {self._waiting} are waiting")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        client.waiting.append(place)
        self._lines[client] = None
        self._waiting += 1
        self._evict_slow(client)
        try:
            async with self._clock.within(self._timeout):
                await place
        except TimeoutError:
            if _given(place):
                return  # in the very moment of giving up
            self._observers.notify(DeadlinePassed(Wait.QUEUE.value))
            raise OverloadedError(f"no place came free in {self._timeout:g} s") from None
        except BaseException:
            if _given(place):
                self.leave(client)
            raise
        finally:
            if place in client.waiting:
                client.waiting.remove(place)
                self._no_longer_waits(client)

    def leave(self, client: Client) -> None:
        """Give the place back, or on to a request that waits."""
        self._inflight -= 1
        client.places -= 1
        if not client.places:
            self._holders -= 1
        while self._lines and self._inflight < self._max_inflight:
            following = min(self._lines, key=_places)
            place = following.waiting.popleft()
            del self._lines[following]  # of two clients with as many places, the other one is next
            self._waiting -= 1
            if following.waiting:
                self._lines[following] = None
            if not place.done():
                self._take(following)
                place.set_result(None)
                return
        if self._inflight == 0:
            self._empty.set()

    async def close(self) -> None:
        """Refuse new requests and those that wait, and return when no request is left."""
        self._closed = True
        for client in self._lines:
            for place in client.waiting:
                if not place.done():
                    place.set_exception(OverloadedError("pdproxy is shutting down"))
        await self._empty.wait()

    def crowds_out(self, client: Client) -> bool:
        """Tell whether a client holds more places than its share while others wait for one."""
        others = len(self._lines) - (client in self._lines)
        return bool(others) and client.places * self._shared_by() > self._max_inflight

    def _shared_by(self) -> int:
        return self._holders + sum(1 for client in self._lines if not client.places)

    def _take(self, client: Client) -> None:
        self._inflight += 1
        if not client.places:
            self._holders += 1
        client.places += 1
        self._empty.clear()

    def _no_longer_waits(self, client: Client) -> None:
        self._waiting -= 1
        if not client.waiting:
            self._lines.pop(client, None)

    def _displace(self, client: Client) -> bool:
        """Make room in the queue at the expense of the client that has the most in it; tell whether there is."""
        most = max(self._lines, key=_in_line, default=client)
        if len(most.waiting) <= len(client.waiting) + 1:
            return False
        place = most.waiting.pop()
        self._no_longer_waits(most)
        if not place.done():
            self._observers.notify(Evicted("queue"))
            place.set_exception(OverloadedError("requests of other clients wait, and this client has the most of them"))
        return True

    def _evict_slow(self, client: Client) -> None:
        """Take a place from a client that has too many and does not read what it asked for."""
        for other in self._clients.with_slow:
            if other is not client and self.crowds_out(other):
                next(iter(other.slow)).evict(OverloadedError("others wait, and the client reads too slowly"))
                return


def _given(place: asyncio.Future[None]) -> bool:
    return place.done() and not place.cancelled() and place.exception() is None


def _places(client: Client) -> int:
    return client.places


def _in_line(client: Client) -> int:
    return len(client.waiting)
