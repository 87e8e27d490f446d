"""Places that several askers share: a bounded number at once, a bounded number that wait, and nobody at the expense of others.

Owns who has how many places and who waits. A place that comes free goes to the asker with the fewest among those that
wait, and there to its oldest request. Where no more may wait, an asker with fewer requests that wait takes the place of
the newest one of the asker with the most.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable

Place = asyncio.Future[None]


class NoPlaceError(Exception):
    """Too many wait. `displaced`: this one did, and gave way to an asker with fewer."""

    def __init__(self, *, displaced: bool) -> None:
        super().__init__()
        self.displaced = displaced


class _Asker:
    __slots__ = ("places", "waiting")

    def __init__(self) -> None:
        self.places = 0
        self.waiting: deque[Place] = deque()


class FairPlaces:
    """`places` at once, and up to `waiting` that wait. `displaced` is called when one of them has to give way."""

    def __init__(self, places: int, waiting: int, displaced: Callable[[], None] = lambda: None) -> None:
        self._places = places
        self._most_waiting = waiting
        self._displaced = displaced
        self._askers: dict[Hashable, _Asker] = {}
        """Those with a place, or that wait for one."""
        self._lines: dict[Hashable, _Asker] = {}
        """Those that wait, in the order in which it is their turn, if they have as many places."""
        self.taken = 0
        """Places that are in use."""
        self.waiting = 0
        """How many wait for a place."""

    def __repr__(self) -> str:
        return f"<FairPlaces {self.taken} of {self._places} taken, {self.waiting} waiting>"

    def take(self, asker: Hashable) -> bool:
        """Take a place if one is free and nobody waits; tell whether it was so. Each success is matched by one `leave`."""
        if self.taken >= self._places or self.waiting:
            return False
        self._give(self._known(asker))
        return True

    def line_up(self, asker: Hashable) -> Place:
        """Begin to wait, behind the asker's other requests. To be followed by `wait`.

        Raises:
            NoPlaceError: too many wait, and no other asker has more of them.
        """
        known = self._known(asker)
        if self.waiting >= self._most_waiting and not self._displace(known):
            self._forget(asker, known)
            raise NoPlaceError(displaced=False)
        place: Place = asyncio.get_running_loop().create_future()
        known.waiting.append(place)
        self._lines[asker] = known
        self.waiting += 1
        return place

    async def wait(self, asker: Hashable, place: Place) -> None:
        """Wait until the place is given. Each success is matched by one `leave`; a caller that stops waiting has none.

        Raises:
            NoPlaceError: it was displaced.
        """
        try:
            await place
        except BaseException:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.leave(asker)  # given in the very moment of giving up
            raise
        finally:
            known = self._askers.get(asker)
            if known is not None and place in known.waiting:
                known.waiting.remove(place)
                self._waits_no_longer(asker, known)

    async def enter(self, asker: Hashable) -> None:
        """Take a place, now or later. Raises as `line_up` and `wait`."""
        if not self.take(asker):
            await self.wait(asker, self.line_up(asker))

    def leave(self, asker: Hashable) -> None:
        """Give a place back, or on to one that waits."""
        self.taken -= 1
        known = self._askers[asker]
        known.places -= 1
        self._forget(asker, known)
        while self._lines and self.taken < self._places:
            following = min(self._lines, key=self._places_of)
            line = self._lines.pop(following)  # of two askers with as many places, the other one is next
            place = line.waiting.popleft()
            self.waiting -= 1
            if line.waiting:
                self._lines[following] = line
            if not place.done():
                self._give(line)
                place.set_result(None)
            else:  # given up, and its caller has not come to say so
                self._forget(following, line)

    def refuse(self, error: Exception) -> None:
        """Have all that wait raise an error."""
        for line in self._lines.values():
            for place in line.waiting:
                if not place.done():
                    place.set_exception(error)

    def over_share(self, asker: Hashable) -> bool:
        """Tell whether an asker has more than an equal part of all places, while others wait for one."""
        known = self._askers.get(asker)
        others = len(self._lines) - (asker in self._lines)
        return known is not None and bool(others) and known.places * len(self._askers) > self._places

    def _known(self, asker: Hashable) -> _Asker:
        known = self._askers.get(asker)
        if known is None:
            known = self._askers[asker] = _Asker()
        return known

    def _forget(self, asker: Hashable, known: _Asker) -> None:
        if not known.places and not known.waiting:
            self._askers.pop(asker, None)

    def _give(self, known: _Asker) -> None:
        self.taken += 1
        known.places += 1

    def _places_of(self, asker: Hashable) -> int:
        return self._lines[asker].places

    def _waits_no_longer(self, asker: Hashable, known: _Asker) -> None:
        self.waiting -= 1
        if not known.waiting:
            self._lines.pop(asker, None)
            self._forget(asker, known)

    def _displace(self, newcomer: _Asker) -> bool:
        """Make room for one more that waits at the expense of the asker with the most; tell whether it was done."""
        asker = max(self._lines, key=lambda one: len(self._lines[one].waiting), default=None)
        if asker is None:
            return False
        most = self._lines[asker]
        if len(most.waiting) <= len(newcomer.waiting) + 1:
            return False
        place = most.waiting.pop()
        self._waits_no_longer(asker, most)
        if not place.done():
            self._displaced()
            place.set_exception(NoPlaceError(displaced=True))
        return True
