"""Sums of two numbers over several processes: each adds to its own, and follows those of all others by what has changed.

The columns are those of a `SharedTable` with two measures. A change costs its writer five stores. A reader takes what is new of
each row since its last look, so that its costs grow with the changes, not with the processes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from pdproxy.kit.shared_table import CHANGES, LAYOUT, MOST_BEHIND, RING, Cells, Column, Others

MEASURES = 2
NOTE = -1
"""In the place of a slot: something beside the table has changed."""
_NONE = 0, 0
_SIZE = 8 * MEASURES
_row_at = struct.Struct(f"{MEASURES}q").unpack_from

T = TypeVar("T")
Add = Callable[[int, int], int]
"""Adds to both numbers of a key. Returns what the first one is then."""


def adder(column: Column, key: int) -> Add:
    """Return what adds to this process's numbers of a key, which are 0 now. Call it no more once the key was dropped."""
    row = column.row(key)
    if row is None:
        return _without_slot(column, key)
    first = second = 0
    slot = column.slot(key)
    ring, header = column.cells.ring, column.cells.header

    def add(more: int, more_of_second: int) -> int:
        nonlocal first, second
        first += more
        second += more_of_second
        row[0] = first
        row[1] = second
        count = header[CHANGES]
        ring[count % RING] = slot
        header[CHANGES] = count + 1
        return first

    add(0, 0)
    return add


def _without_slot(column: Column, key: int) -> Add:
    """Return what the others do not see before a slot is free."""
    first = second = 0

    def add(more: int, more_of_second: int) -> int:
        nonlocal first, second
        first, second = first + more, second + more_of_second
        column.write(key, (first, second))
        return first

    return add


def note(column: Column) -> None:
    """Have the others find out that something beside the table has changed."""
    ring, header = column.cells.ring, column.cells.header
    count = header[CHANGES]
    ring[count % RING] = NOTE
    header[CHANGES] = count + 1


class _Seen(Generic[T]):
    """A column of another process as it was read last. By slots: `keys` (0: none), what each `had`, and what follows it.

    `used`: slots with keys.
    """

    __slots__ = ("cells", "changes", "followers", "had", "header", "keys", "layout", "ring", "rows", "used")

    def __init__(self, cells: Cells) -> None:
        self.cells, self.header, self.ring, self.rows = cells, cells.header, cells.ring, cells.rows
        self.changes = self.layout = -1
        self.keys: list[int] = []
        self.had: list[tuple[int, ...]] = []
        self.followers: list[T | None] = []
        self.used: list[int] = []


class OtherSums(Generic[T]):
    """The sums of all other processes. `moved`: called with what follows a key, and by how much its two sums have changed."""

    def __init__(self, others: Others, moved: Callable[[T, int, int], None]) -> None:
        self._columns: list[_Seen[T]] = [_Seen(cells) for cells in others.cells]
        self._moved = moved
        self._followers: dict[int, T] = {}
        self.noted = False
        """Whether something beside the table may have changed. Who reads it sets it to False."""

    def __repr__(self) -> str:
        return f"<OtherSums of {len(self._columns)} columns>"

    def follow(self, key: int, follower: T | None) -> None:
        """Have `moved` called for this key from now on, and at once with its sums. None: no more."""
        if follower is None:
            self._followers.pop(key, None)
        else:
            self._followers[key] = follower
        first = second = 0
        for one in self._columns:
            if key in one.keys:
                slot = one.keys.index(key)
                one.followers[slot] = follower
                first, second = first + one.had[slot][0], second + one.had[slot][1]
        if follower is not None and (first or second):
            self._moved(follower, first, second)

    def look(self, *, all_of_it: bool = False) -> None:
        """Take what has changed since the last look. `all_of_it`: also where nothing seems new."""
        for one in self._columns:
            changes = one.header[CHANGES]
            if changes != one.changes or all_of_it:
                self._take(one, changes, all_of_it)

    def _take(self, one: _Seen[T], changes: int, all_of_it: bool) -> None:
        """Take what is new in a column."""
        behind = changes - one.changes
        one.changes = changes
        if one.header[LAYOUT] != one.layout:
            self._find(one)
            return
        slots: Iterable[int]
        ring = one.ring
        if behind == 1:
            slots = (ring[(changes - 1) % RING],)
        elif 0 < behind <= MOST_BEHIND and not all_of_it:
            slots = {ring[at % RING] for at in range(changes - behind, changes)}
        else:
            slots = (NOTE, *one.used)
        rows, had, followers = one.rows, one.had, one.followers
        for slot in slots:
            if slot < 0:
                self.noted = True
                continue
            new, old = _row_at(rows, slot * _SIZE), had[slot]
            if new != old:
                had[slot] = new
                follower = followers[slot]
                if follower is not None:
                    self._moved(follower, new[0] - old[0], new[1] - old[1])

    def _find(self, one: _Seen[T]) -> None:
        """Look where a column has its keys, and take all of it."""
        self.noted = True
        one.layout = one.header[LAYOUT]
        moved = {one.keys[slot]: (-one.had[slot][0], -one.had[slot][1]) for slot in one.used}
        one.keys = keys = one.cells.keys.tolist()
        one.had = [_NONE] * len(keys)
        one.followers = [self._followers.get(key) for key in keys]
        one.used = [slot for slot, key in enumerate(keys) if key]
        for slot in one.used:
            one.had[slot] = had = _row_at(one.rows, slot * _SIZE)
            first, second = moved.get(keys[slot], _NONE)
            moved[keys[slot]] = first + had[0], second + had[1]
        for key, (first, second) in moved.items():
            if (first or second) and (follower := self._followers.get(key)) is not None:
                self._moved(follower, first, second)
