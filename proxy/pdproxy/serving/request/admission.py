"""Admission: all waiting happens here, before any engine has worked.

Owns the places of requests being served; `kit.fair_places` decides who is next. A prefilled request is never held back: its
KV lease is running. While somebody waits, a client with more places than its share loses those whose answers it reads
too slowly.
"""

from __future__ import annotations

import asyncio

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import OverloadedError, Wait
from pdproxy.kit.fair_places import FairPlaces, NoPlaceError
from pdproxy.observe.events import DeadlinePassed, Evicted, Observers
from pdproxy.serving.access.clients import Client, Clients


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
        self._turns = FairPlaces(max_inflight, max_queue, lambda: observers.notify(Evicted("queue")))
        self._timeout = timeout
        self._observers = observers
        self._clock = clock
        self._clients = clients
        self._closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    def __repr__(self) -> str:
        return f"<Admission {self.inflight} in flight, {self.waiting} waiting{', closed' * self._closed}>"

    @property
    def inflight(self) -> int:
        """Requests being served."""
        return self._turns.taken

    @property
    def waiting(self) -> int:
        """Requests waiting for a place."""
        return self._turns.waiting

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
        if not self._turns.take(client):
            await self._wait(client)
        self._empty.clear()

    def leave(self, client: Client) -> None:
        """Give the place back, or on to a request that waits."""
        self._turns.leave(client)
        if not self._turns.taken:
            self._empty.set()

    async def close(self) -> None:
        """Refuse new requests and those that wait, and return when no request is left."""
        self._closed = True
        self._turns.refuse(OverloadedError("pdproxy is shutting down"))
        await self._empty.wait()

    def crowds_out(self, client: Client) -> bool:
        """Tell whether a client holds more places than its share while others wait for one."""
        return self._turns.over_share(client)

    async def _wait(self, client: Client) -> None:
        try:
            place = self._turns.line_up(client)
            self._evict_slow(client)
            async with self._clock.within(self._timeout):
                await self._turns.wait(client, place)
        except TimeoutError:
            self._observers.notify(DeadlinePassed(Wait.QUEUE.value))
            raise OverloadedError(f"no place came free in {self._timeout:g} s") from None
        except NoPlaceError as error:
            if error.displaced:
                raise OverloadedError("requests of other clients wait, and this client has the most of them") from None
            raise OverloadedError(f"{self.inflight} requests are being served and {self.waiting} are waiting") from None
        finally:
            if not self._turns.taken:
                self._empty.set()  # a place that came in the moment of giving up was given back

    def _evict_slow(self, client: Client) -> None:
        """Take a place from a client that has too many and does not read what it asked for."""
        for other in self._clients.with_slow:
            if other is not client and self.crowds_out(other):
                next(iter(other.slow)).evict(OverloadedError("others wait, and the client reads too slowly"))
                return
