"""Admission: all waiting happens here, before any engine has worked for the request.

Owns the number of requests being served. A prefilled request is never held back: its KV lease is running.
"""

from __future__ import annotations

import asyncio
from collections import deque

from pdproxy.kit.errors import OverloadedError, Wait
from pdproxy.observe.events import DeadlinePassed, Observers


class Admission:
    """At most `max_inflight` requests at once; up to `max_queue` wait in order of arrival, each `timeout` seconds."""

    def __init__(self, max_inflight: int, max_queue: int, timeout: float, observers: Observers) -> None:
        self._max_inflight = max_inflight
        self._max_queue = max_queue
        self._timeout = timeout
        self._observers = observers
        self._inflight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    def __repr__(self) -> str:
        return f"<Admission {self._inflight} in flight, {len(self._waiting)} waiting{', closed' * self._closed}>"

    @property
    def inflight(self) -> int:
        """Requests being served."""
        return self._inflight

    @property
    def waiting(self) -> int:
        """Requests waiting for a place."""
        return len(self._waiting)

    @property
    def closed(self) -> bool:
        """Whether new requests are refused because of a shutdown."""
        return self._closed

    async def enter(self) -> None:
        """Take a place. Each success is matched by one `leave`.

        Raises:
            OverloadedError: shutting down, the queue is full, or no place came free in time.
        """
        if self._closed:
            raise OverloadedError("pdproxy is shutting down")
        if self._inflight < self._max_inflight and not self._waiting:
            self._take()
            return
        if len(self._waiting) >= self._max_queue:
            raise OverloadedError(f"{self._inflight} requests are being served and {len(self._waiting)} are waiting")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            async with asyncio.timeout(self._timeout):
                await place
        except TimeoutError:
            if place.done() and not place.cancelled() and place.exception() is None:
                return  # given in the very moment of giving up
            self._observers.notify(DeadlinePassed(Wait.QUEUE.value))
            raise OverloadedError(f"no place came free in {self._timeout:g} s") from None
        except BaseException:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.leave()
            raise
        finally:
            if place in self._waiting:
                self._waiting.remove(place)

    def leave(self) -> None:
        """Give the place back, or on to the one who has waited longest."""
        self._inflight -= 1
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                self._take()
                place.set_result(None)
                return
        if self._inflight == 0:
            self._empty.set()

    async def close(self) -> None:
        """Refuse new requests and those that wait, and return when no request is left."""
        self._closed = True
        for place in self._waiting:
            if not place.done():
                place.set_exception(OverloadedError("pdproxy is shutting down"))
        await self._empty.wait()

    def _take(self) -> None:
        self._inflight += 1
        self._empty.clear()
