"""Records of bytes that outlive the process that wrote them: what a worker has to give back is read
by the parent if it dies.

Owns the layout of that memory, which is anonymous and inherited by forked processes. Each process
has an area of its own, in units of `UNIT` bytes. A record takes as many units in a row as it needs.
Its size is written last and cleared first, as a number that a store changes as a whole: a process
that is killed at any point leaves no half record.
"""

from __future__ import annotations

import mmap

UNIT = 512
_CELL = 8


class SharedRecords:
    """Areas for so many processes, of so many `units` each. Make it before they are forked; only
    what is used takes memory.
    """

    def __init__(self, areas: int, units: int) -> None:
        self._units = units
        size = units * (_CELL + UNIT)
        self._memory = mmap.mmap(-1, areas * size)
        whole = memoryview(self._memory)
        self._areas = [
            (
                whole[at * size : at * size + units * _CELL].cast("q"),
                whole[at * size + units * _CELL : (at + 1) * size],
            )
            for at in range(areas)
        ]

    def __repr__(self) -> str:
        return f"<SharedRecords: {len(self._areas)} areas of {self._units} units>"

    def area(self, number: int) -> Area:
        """Return an area for its writer, which begins with an empty one."""
        return Area(*self._areas[number])

    def taken(self, number: int) -> list[bytes]:
        """Return the records of a process that has ended, and clear its area."""
        sizes, data = self._areas[number]
        found = []
        for unit in range(self._units):
            if size := sizes[unit]:
                found.append(bytes(data[unit * UNIT : unit * UNIT + size]))
                sizes[unit] = 0
        return found


class Area:
    """An area as its writer sees it."""

    def __init__(self, sizes: memoryview, data: memoryview) -> None:
        self._sizes = sizes
        self._data = data
        self._used = bytearray(len(sizes))
        self.without_space = 0
        """How many records found no space."""

    def __repr__(self) -> str:
        return f"<Area: {sum(self._used)} of {len(self._used)} units used>"

    def put(self, record: bytes) -> int | None:
        """Write a record, of one byte at least. Return where it is, None if there is no space."""
        size, used = len(record), self._used
        if size <= UNIT:
            at = used.find(0)
            if at < 0:
                self.without_space += 1
                return None
            used[at] = 1
        else:
            count = -(-size // UNIT)
            at = used.find(bytes(count))
            if at < 0:
                self.without_space += 1
                return None
            used[at : at + count] = b"\1" * count
        begin = at * UNIT
        self._data[begin : begin + size] = record
        self._sizes[at] = size
        return at

    def drop(self, at: int) -> None:
        """Forget a record."""
        size = self._sizes[at]
        self._sizes[at] = 0
        if size <= UNIT:
            self._used[at] = 0
        else:
            count = -(-size // UNIT)
            self._used[at : at + count] = bytes(count)
