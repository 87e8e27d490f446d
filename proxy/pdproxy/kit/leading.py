"""Which of several processes does what is to be done once: the one that has served longest and is
alive.

Owns this process's row of a shared table: its last beat, and since when it serves. Nothing is
claimed and nothing is locked: each reads the rows of all and comes to the same result. Two may lead
for a moment: when views are a store apart, or when the leader was stopped and goes on. What a
leader does must bear that. A process that was stopped for longer than `STALE` begins anew, as the
last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from pdproxy.kit.shared_table import Column, Others

MEASURES = 3
"""Numbers of the table for each process: its last beat and since when it serves, in nanoseconds of
the machine's clock; its number.
"""
KEY = 1
STALE = 2.0
"""Seconds without a beat after which a process does not count: it stands still, or has ended and
its parent does not know it yet.
"""
_BEAT, _SINCE, _NUMBER = range(MEASURES)


class Lead(Protocol):
    """What those ask who do something only in one process."""

    @property
    def leads(self) -> bool:
        """Whether this process does it."""

    async def turn(self) -> None:
        """Wait until this process does it."""


class Always:
    """The lead of a process that is alone."""

    leads = True

    async def turn(self) -> None:
        """See `Lead`."""


ALWAYS = Always()


class Leading:
    """The lead of one of several processes. `column`, `others`: of a table with one slot; `now`:
    nanoseconds, the same in all.
    """

    def __init__(
        self,
        number: int,
        column: Column,
        others: Others,
        now: Callable[[], int] = time.monotonic_ns,
        stale: float = STALE,
    ) -> None:
        row = column.row(KEY)
        assert row is not None  # the table has a slot, and no other key
        self._row = row
        self._others = others.rows(0)
        self._number = number
        self._now = now
        self._stale = int(stale * 1e9)
        self._turn = asyncio.Event()
        self._beat = self._since = 0
        self._left = False
        self.begins: list[Callable[[], None]] = []
        """Called when this process begins to lead."""

    def __repr__(self) -> str:
        return f"<Leading: {'leads' if self.leads else 'follows'}>"

    @property
    def leads(self) -> bool:
        """See `Lead`."""
        return self._turn.is_set()

    async def turn(self) -> None:
        """See `Lead`."""
        await self._turn.wait()

    def beat(self) -> None:
        """Show that this process is alive, and look who leads. Call it several times within
        `STALE`.
        """
        if self._left:
            return
        now = self._now()
        # it begins, or was stopped: the others may have another leader
        if now - self._beat > self._stale:
            self._since = now
        self._beat = now
        row = self._row
        row[_NUMBER], row[_SINCE], row[_BEAT] = self._number, self._since, now
        own = self._since, self._number
        older = any(
            now - other[_BEAT] <= self._stale and (other[_SINCE], other[_NUMBER]) < own
            for other in self._others
        )
        if older:
            self._turn.clear()
        elif not self.leads:
            self._turn.set()
            for then in self.begins:
                then()

    def leave(self) -> None:
        """Lead no more: this process ends."""
        self._left = True
        self._row[_BEAT] = 0
        self._turn.clear()
