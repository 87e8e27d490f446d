"""Admission: requests wait here, before any engine works for them.

Owns the places of requests being served; `kit.fair_places` decides which request is next. A prefilled request never waits here,
because the lease on its KV is running. While a request waits, a client with more places than its share loses one place, if it
reads that answer too slowly.
"""

from __future__ import annotations

import asyncio

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import LimitError, OverloadedError, Reason, Wait
from pdproxy.kit.fair_places import FairPlaces, NoPlaceError
from pdproxy.observe.events import DeadlinePassed, Evicted, Observers
from pdproxy.serving.access.clients import Client, Clients


class Admission:
    """At most `max_inflight` requests at once; up to `max_queue` wait, each for up to `timeout` seconds."""

    def __init__(
        self,
        max_inflight: int,
        max_queue: int,
        timeout: float,
        observers: Observers,
        clock: Clock,
        clients: Clients,
    ) -> None:
        self._places = FairPlaces(max_inflight, max_queue, lambda: observers.notify(Evicted("queue")))
        self._timeout = timeout
        self._observers = observers
        self._clock = clock
        self._clients = clients
        self._closed = False
        self._drained = asyncio.Event()
        """Set once admission is closed and no place is taken any more."""

    def __repr__(self) -> str:
        return f"<Admission {self.inflight} in flight, {self.waiting} waiting{', closed' * self._closed}>"

    @property
    def inflight(self) -> int:
        """Requests being served."""
        return self._places.taken

    @property
    def waiting(self) -> int:
        """Requests waiting for a place."""
        return self._places.waiting

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
            raise OverloadedError("pdproxy is shutting down", Reason.DRAINING)
        if not self._places.take(client):
            await self._wait(client)

    def leave(self, client: Client) -> None:
        """Release the place: it is granted to a request that waits, if there is one."""
        self._places.leave(client)
        self._check_drained()

    async def close(self) -> None:
        """Refuse new requests and those that wait, and return when no request is left."""
        self._closed = True
        self._places.refuse(OverloadedError("pdproxy is shutting down", Reason.DRAINING))
        self._check_drained()
        await self._drained.wait()

    def over_share(self, client: Client) -> bool:
        """Return whether a client holds more places than its share while others wait for one."""
        return self._places.over_share(client)

    async def _wait(self, client: Client) -> None:
        try:
            place = self._places.queue_up(client)
            self._evict_slow(client)  # not before: a client is over its share only while others wait
            async with self._clock.within(self._timeout):
                await self._places.wait(client, place)
        except TimeoutError:
            self._observers.notify(DeadlinePassed(Wait.QUEUE.value))
            raise OverloadedError(f"no place came free in {self._timeout:g} s", Reason.QUEUE_TIMEOUT) from None
        except NoPlaceError as error:
            if error.displaced:
                raise LimitError(
                    "requests of other clients wait, and this client has the most of them", Reason.SHARE
                ) from None
            raise OverloadedError(
                f"{self.inflight} requests are being served and {self.waiting} are waiting", Reason.QUEUE_FULL
            ) from None
        finally:
            self._check_drained()  # a place that was granted to a request that no longer wants it was released

    def _check_drained(self) -> None:
        if self._closed and not self._places.taken:
            self._drained.set()

    def _evict_slow(self, client: Client) -> None:
        """Drop one slow reader of another client that holds more than its share."""
        for other in self._clients.with_slow:
            if other is not client and self.over_share(other):
                next(iter(other.slow)).evict(
                    OverloadedError("others wait, and the client reads too slowly", Reason.SLOW_READER)
                )
                return
