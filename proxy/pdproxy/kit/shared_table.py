"""Numbers that several processes share: each writes a column of its own, and reads the sums of the
others'.

Owns the layout of that memory. It is anonymous and inherited by forked processes: nothing of it has
a name, and nothing is left when the last of them has ended. There is no lock: a process that is
killed, or stopped, at any point holds up nobody. All cells are aligned numbers of eight bytes,
which a store changes as a whole. A reader may see the numbers of a row one write apart, and a write
a few microseconds late.

A column has slots. Each has a key and some numbers. A column's header counts the changes of its
keys, so that readers look for them only then.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from operator import add

_CELL = 8


def key_of(text: str) -> int:
    """Return the key of a text: a number that is the same in all processes, and not 0."""
    return (
        int.from_bytes(
            blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big", signed=True
        )
        or 1
    )


class Cells:
    """One column as numbers. `layout`: one number, how often its keys have changed; `rows`: those
    of all slots, one slot after the other.
    """

    __slots__ = ("keys", "layout", "rows")

    def __init__(self, cells: memoryview, slots: int) -> None:
        self.layout, self.keys, self.rows = cells[:1], cells[1 : 1 + slots], cells[1 + slots :]


class SharedTable:
    """So many `columns`, one per process, with `slots` rows of so many `measures`. Make it before
    the processes are forked.

    `kept`: the measures that stay when a process is gone, because they are sums of what has
    happened. The others are levels.
    """

    def __init__(self, columns: int, slots: int, measures: int, kept: Collection[int] = ()) -> None:
        size = 1 + slots + slots * measures
        self.slots = slots
        self.measures = measures
        self._kept = frozenset(kept)
        self._memory = mmap.mmap(-1, columns * size * _CELL)
        cells = memoryview(self._memory).cast("q")
        self._columns = [Cells(cells[at * size : (at + 1) * size], slots) for at in range(columns)]

    def __repr__(self) -> str:
        return f"<SharedTable of {len(self._columns)} columns, {self.slots} slots>"

    def column(self, number: int) -> Column:
        """Return a column for its writer: one process at a time."""
        return Column(self._columns[number], self.measures)

    def others(self, number: int) -> Others:
        """Return what a process reads: all columns but its own."""
        return Others([one for at, one in enumerate(self._columns) if at != number], self.measures)

    def of(self, number: int) -> tuple[Column, Others]:
        """Return both for one process."""
        return self.column(number), self.others(number)

    def clear(self, number: int) -> None:
        """Set the levels of a process that has ended to 0. Its next one goes on with its keys and
        sums, if there are any.
        """
        column = self._columns[number]
        rows, measures = column.rows, self.measures
        for slot, key in enumerate(column.keys.tolist()):
            if not key:
                continue  # all of its numbers are 0
            for measure in range(measures):
                if measure not in self._kept:
                    rows[slot * measures + measure] = 0
            if not self._kept:  # its next one need not know this key, and would never drop it
                column.keys[slot] = 0
        # It may have been killed between a change of its keys and the count.
        column.layout[0] += 1


class Column:
    """A column as its writer sees it. Numbers of a process before it that were kept are there."""

    def __init__(self, cells: Cells, measures: int) -> None:
        self.cells = cells
        """Read only."""
        self._measures = measures
        self._slots = {key: slot for slot, key in enumerate(cells.keys) if key}
        self._free = [slot for slot in reversed(range(len(cells.keys))) if not cells.keys[slot]]
        self.without_slot = 0
        """How many writes found no free slot: the others don't know of them."""

    def __repr__(self) -> str:
        return f"<Column of {len(self._slots)} keys>"

    def read(self, key: int) -> tuple[int, ...]:
        """Return this column's numbers for a key, 0 where there are none."""
        slot = self._slots.get(key)
        return (0,) * self._measures if slot is None else tuple(self._row(slot))

    def row(self, key: int) -> memoryview | None:
        """Return the numbers of a key, to be written in place, None if there is no slot."""
        slot = self._slots.get(key)
        if slot is None:
            slot = self._new(key)
        return None if slot is None else self._row(slot)

    def write(self, key: int, numbers: Sequence[int]) -> bool:
        """Set the numbers of a key, the first one last. Return whether there was a slot for it."""
        slot = self._slots.get(key)
        if slot is None:
            slot = self._new(key)
            if slot is None:
                return False
        # One by one: a store of one number changes it as a whole, and takes a tenth of a slice's
        # time.
        rows, at = self.cells.rows, slot * self._measures + len(numbers)
        for number in reversed(numbers):
            at -= 1
            rows[at] = number
        return True

    def keys(self) -> list[int]:
        """Return the keys that have a slot."""
        return list(self._slots)

    def drop(self, key: int) -> None:
        """Give the slot of a key back. Its numbers count no more."""
        if (slot := self._slots.pop(key, None)) is None:
            return
        row = self._row(slot)
        for at in range(self._measures):
            row[at] = 0
        self.cells.keys[slot] = 0
        self._free.append(slot)
        self.cells.layout[0] += 1

    def _row(self, slot: int) -> memoryview:
        return self.cells.rows[slot * self._measures : (slot + 1) * self._measures]

    def _new(self, key: int) -> int | None:
        if not self._free:
            self.without_slot += 1
            return None
        slot = self._slots[key] = self._free.pop()
        self.cells.keys[slot] = key
        self.cells.layout[0] += 1
        return slot


class _Seen:
    """A column of another process. `begins`: for each key, the first byte of its row; `seen`: the
    layout that `begins` is of.
    """

    __slots__ = ("begins", "keys", "layout", "rows", "seen", "size")

    def __init__(self, cells: Cells, size: int) -> None:
        self.layout, self.keys, self.rows = cells.layout, cells.keys, cells.rows
        self.size = size
        self.seen = -1
        self.begins: dict[int, int] = {}

    def find(self) -> None:
        """Look where the keys are."""
        self.seen = self.layout[0]
        self.begins = {key: slot * self.size for slot, key in enumerate(self.keys.tolist()) if key}


class Others:
    """The columns of all other processes, as one process reads them."""

    def __init__(self, columns: Iterable[Cells], measures: int) -> None:
        row = struct.Struct(f"{measures}q")
        self._columns = [_Seen(one, row.size) for one in columns]
        self._row_at = row.unpack_from
        self._none = (0,) * measures

    def __repr__(self) -> str:
        return f"<Others: {len(self._columns)} columns>"

    def sums(self, key: int) -> tuple[int, ...]:
        """Return the sums of all columns' numbers for a key."""
        found = self._none
        for numbers in self.each(key):
            found = numbers if found is self._none else tuple(map(add, found, numbers))
        return found

    def rows(self, slot: int) -> list[memoryview]:
        """Return the numbers of a slot in each column, as they are now and will be: where all keys
        have one slot, it is known.
        """
        measures = len(self._none)
        return [one.rows[slot * measures : (slot + 1) * measures] for one in self._columns]

    def each(self, key: int) -> list[tuple[int, ...]]:
        """Return the numbers for a key of each column that has it."""
        found = []
        for one in self._columns:
            if one.layout[0] != one.seen:
                one.find()
            begin = one.begins.get(key)
            if begin is not None:
                found.append(self._row_at(one.rows, begin))
        return found
