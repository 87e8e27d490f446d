"""The places of several workers that share them: what the others have taken, and whose request
waits the longest.

Owns this worker's column of the table of places, and the wake-ups between workers. Nothing is
locked: two workers that take the last place within the same microseconds both have it. A place that
comes free goes to the worker whose next request has waited for the longest; the one that gives it
back wakes that worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence

from pdproxy.kit.shared_table import Column, Others

TAKEN, SIZE, WAITING, SINCE, LOOKED, PLACES, LEARNED, NUMBER, MORE = range(9)
MEASURES = 9
"""Numbers of the table for each worker: places taken, the size of their requests, requests that
wait; since when the next one waits, and when the worker last looked, in microseconds; how many
places it has found right, and when; its number; whether there is more to read than the first two.
"""
KEY = 1
STALE = 500_000
"""Microseconds after which a worker that has not looked is not waited for: it stands still, and
would hold up all others.
"""
RECENT = 60_000_000
"""Microseconds for which the number of places counts that another worker has found right."""
MOST_SIZE = 1 << 56
"""A size that is more is shown as this: it is an estimate, of a request that asks for thousands of
answers perhaps.
"""
LOOK_EVERY = 0.05
"""Seconds between two looks while requests wait here: a worker that was killed wakes nobody."""


class SharedPlaces:
    """One worker's part. `wakes`: for each worker the descriptor of its counter (`os.eventfd`), in
    the order of their numbers.
    """

    def __init__(
        self,
        number: int,
        column: Column,
        others: Others,
        wakes: Sequence[int],
        now: Callable[[], float],
    ) -> None:
        self._number = number
        self.others = others.rows(0)
        """The rows of the others, for each request to read. Read only."""
        self._wakes = wakes
        self._now = now
        self.taken = self.size = self.waiting = 0
        """What the others have: places, the size of their requests, requests that wait."""
        self.places: int | None = None
        """The fewest places that another worker has found right lately; None: no one has."""
        self.first: tuple[int, int] | None = None
        """Since when the next request of another worker waits, and that worker's number, for the
        one that has waited longest.
        """
        self._timer: asyncio.TimerHandle | None = None
        row = column.row(KEY)
        assert row is not None  # the table has a slot, and no other key
        row[NUMBER] = number
        self.row = row
        """This worker's own. Where `is_quiet`, `TAKEN` and `SIZE` are all that a request has to
        write.
        """
        self._quiet: tuple[int, float | None, bool] | None = None
        """The places and the time that this worker has shown last, None if it has shown requests
        that wait.
        """

    def __repr__(self) -> str:
        return f"<SharedPlaces: {self.taken} taken, {self.waiting} waiting elsewhere>"

    def start(self, look: Callable[[], None]) -> None:
        """Call `look` in the running loop whenever another worker leaves a place to this one."""
        if self._number < len(self._wakes):
            asyncio.get_running_loop().add_reader(self._wakes[self._number], self._woken, look)

    def stop(self) -> None:
        """Call it no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._number < len(self._wakes):
            asyncio.get_running_loop().remove_reader(self._wakes[self._number])

    def look_again(self, look: Callable[[], None]) -> None:
        """Call `look` once in a while from now on, until it calls this no more."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY, self._again, look)

    def _again(self, look: Callable[[], None]) -> None:
        self._timer = None
        look()

    def _woken(self, look: Callable[[], None]) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakes[self._number])
        look()

    def read(self) -> None:
        """Take over what the others have."""
        taken = size = waiting = 0
        first: tuple[int, int] | None = None
        places: int | None = None
        for other in self.others:
            taken += other[TAKEN]
            size += other[SIZE]
            waiting += other[WAITING]
            since, found = other[SINCE], other[PLACES]
            if (
                since
                and self._micros() - other[LOOKED] < STALE
                and (first is None or since < first[0])
            ):
                first = since, other[NUMBER]
            if found and self._micros() - other[LEARNED] < RECENT:
                places = found if places is None else min(places, found)
        self.taken, self.size, self.waiting, self.places, self.first = (
            taken,
            size,
            waiting,
            places,
            first,
        )

    def yields(self, since: float | None) -> bool:
        """Return whether a request of another worker comes first. `since`: when the next one here
        began to wait.
        """
        return self.first is not None and (since is None or self.first[0] < int(since * 1e6))

    def wake(self) -> None:
        """Wake the worker whose request comes first."""
        if self.first is not None and self.first[1] < len(self._wakes):
            with contextlib.suppress(BlockingIOError, OSError):
                os.eventfd_write(self._wakes[self.first[1]], 1)

    def write(
        self,
        taken: int,
        size: int,
        waiting: int,
        since: float | None,
        places: int,
        learned: float | None,
    ) -> None:
        """Show the others what this worker has. `since`: as for `yields`; None also where it would
        take no place now.

        `learned`: when it found the number of places right, None: it is the operator's.
        """
        row = self.row
        row[TAKEN], row[SIZE] = taken, min(size, MOST_SIZE)
        counts = learned is not None and self._micros() - int(learned * 1e6) < RECENT
        if not waiting and since is None and self._quiet == (places, learned, counts):
            return
        row[LOOKED] = self._micros()
        row[WAITING], row[SINCE] = waiting, 0 if since is None else max(1, int(since * 1e6))
        row[LEARNED], row[PLACES] = (0, 0) if learned is None else (int(learned * 1e6), places)
        row[MORE] = bool(waiting or since is not None or counts)
        self._quiet = None if waiting or since is not None else (places, learned, counts)

    @property
    def is_quiet(self) -> bool:
        """Whether the others have been shown that nobody waits here, and none of their requests
        comes first.
        """
        return self._quiet is not None and self.first is None

    def _micros(self) -> int:
        return int(self._now() * 1e6)
