"""Places that clients share fairly, with limits on the places and on the requests that wait for
one.

Owns the places of each client and its requests that wait. A place that comes free goes to the
client with the fewest places among those that wait, and there to its oldest request. If no more
requests may wait, a client with fewer waiting requests displaces the newest waiting request of the
client with the most.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable

Place = asyncio.Future[None]
"""What a request waits for. Done once the place is granted."""


class NoPlaceError(Exception):
    """Too many requests wait. `displaced`: this one waited, and a client with fewer waiting
    requests displaced it.
    """

    def __init__(self, *, displaced: bool) -> None:
        super().__init__()
        self.displaced = displaced


class _Held:
    """What one client has: places, and requests that wait, the oldest first."""

    __slots__ = ("places", "waiting")

    def __init__(self) -> None:
        self.places = 0
        self.waiting: deque[Place] = deque()


class FairPlaces:
    """At most `max_places` are taken at once, and `max_waiting` requests wait. `displaced` is
    called when one is displaced.
    """

    def __init__(
        self, max_places: int, max_waiting: int, displaced: Callable[[], None] = lambda: None
    ) -> None:
        self._max_places = max_places
        self._max_waiting = max_waiting
        self._displaced = displaced
        self._clients: dict[Hashable, _Held] = {}
        """Those with a place, or with a request that waits."""
        self._queue: dict[Hashable, _Held] = {}
        """Those with a request that waits. Among clients with equally many places, the first one is
        next.
        """
        self.taken = 0
        """Places that are taken."""
        self.waiting = 0
        """Requests that wait."""

    def __repr__(self) -> str:
        return f"<FairPlaces {self.taken} of {self._max_places} taken, {self.waiting} waiting>"

    def take(self, client: Hashable) -> bool:
        """Take a place if one is free; return whether it was taken. Each success is matched by one
        `leave`.

        Nobody is overtaken: while somebody waits, no place is free.
        """
        if self.taken >= self._max_places:
            return False
        self._grant(self._held_by(client))
        return True

    def queue_up(self, client: Hashable) -> Place:
        """Begin to wait, behind the client's other requests. Call it where `take` has failed;
        `wait` has to follow.

        Raises:
            NoPlaceError: too many requests wait, and no other client has more of them.
        """
        held = self._held_by(client)
        if self.waiting >= self._max_waiting and not self._displace(held):
            self._forget(client, held)
            raise NoPlaceError(displaced=False)
        place: Place = asyncio.get_running_loop().create_future()
        held.waiting.append(place)
        self._queue[client] = held
        self.waiting += 1
        return place

    async def wait(self, client: Hashable, place: Place) -> None:
        """Wait until the place is granted. Each success is matched by one `leave`; a caller that
        stops waiting has no place.

        Raises:
            NoPlaceError: it was displaced.
        """
        try:
            await place
        except BaseException:
            if place.done() and not place.cancelled() and place.exception() is None:
                # granted in the same turn of the loop in which the caller was cancelled
                self.leave(client)
            raise
        finally:
            held = self._clients.get(client)
            if held is not None and place in held.waiting:
                held.waiting.remove(place)
                self._stopped_waiting(client, held)

    async def enter(self, client: Hashable) -> None:
        """Take a place, now or later. Raises as `queue_up` and `wait`."""
        if not self.take(client):
            await self.wait(client, self.queue_up(client))

    def leave(self, client: Hashable) -> None:
        """Release a place: it is granted to a request that waits, if there is one."""
        self.taken -= 1
        held = self._clients[client]
        held.places -= 1
        self._forget(client, held)
        self._fill()

    def resize(self, max_places: int) -> None:
        """Change the number of places. Fewer take nothing from requests that have one."""
        self._max_places = max_places
        self._fill()

    def _fill(self) -> None:
        while self._queue and self.taken < self._max_places:
            following = min(self._queue, key=self._places_of)
            held = self._queue.pop(following)
            place = held.waiting.popleft()
            self.waiting -= 1
            if held.waiting:
                # at the end: of clients with equally many places, another one is next
                self._queue[following] = held
            if not place.done():
                self._grant(held)
                place.set_result(None)
            else:  # cancelled or refused, and its caller has not run since
                self._forget(following, held)

    def refuse(self, error: Exception) -> None:
        """Raise an error in all requests that wait."""
        for held in self._queue.values():
            for place in held.waiting:
                if not place.done():
                    place.set_exception(error)

    def over_share(self, client: Hashable) -> bool:
        """Return whether a client has more than an equal part of all places while others wait for
        one.
        """
        held = self._clients.get(client)
        others = len(self._queue) - (client in self._queue)
        return (
            held is not None
            and bool(others)
            and held.places * len(self._clients) > self._max_places
        )

    def _held_by(self, client: Hashable) -> _Held:
        held = self._clients.get(client)
        if held is None:
            held = self._clients[client] = _Held()
        return held

    def _forget(self, client: Hashable, held: _Held) -> None:
        if not held.places and not held.waiting:
            self._clients.pop(client, None)

    def _grant(self, held: _Held) -> None:
        self.taken += 1
        held.places += 1

    def _places_of(self, client: Hashable) -> int:
        return self._queue[client].places

    def _stopped_waiting(self, client: Hashable, held: _Held) -> None:
        self.waiting -= 1
        if not held.waiting:
            self._queue.pop(client, None)
            self._forget(client, held)

    def _displace(self, newcomer: _Held) -> bool:
        """Displace a waiting request of the client that has the most of them. Return whether one
        was displaced.
        """
        client = max(self._queue, key=lambda one: len(self._queue[one].waiting), default=None)
        if client is None:
            return False
        largest = self._queue[client]
        if len(largest.waiting) <= len(newcomer.waiting) + 1:
            return False
        place = largest.waiting.pop()
        self._stopped_waiting(client, largest)
        if not place.done():
            self._displaced()
            place.set_exception(NoPlaceError(displaced=True))
        return True
