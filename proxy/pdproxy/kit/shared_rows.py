"""Rows of floats that several processes share: each writes rows of its own, and takes those of the
others that are new.

A `SharedTable` whose rows are read as they were written, not one write apart: a row has its version
behind it and before it. The one behind is written first and read last, so that a reader finds two
versions in a row that is being written, and leaves it for its next look. The version only says that
a row is another one: readers compare it with the one that they have. That needs a processor that
keeps the order of stores, and of loads (x86-64): with another one a row may rarely be read mixed,
until it is written again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from pdproxy.kit.shared_table import (
    CHANGES,
    LAYOUT,
    MOST_BEHIND,
    RING,
    Cells,
    Column,
    Others,
    SharedTable,
)

_VERSIONS = 2
HEAD = 6
"""Numbers at the begin of a row, its version among them, that `OtherRows.written` returns."""


class SharedRows(SharedTable):
    """So many `columns`, one per process, with `slots` rows of so many floats. What a process wrote
    goes with it.
    """

    def __init__(self, columns: int, slots: int, floats: int) -> None:
        super().__init__(columns, slots, floats + _VERSIONS)

    def column(self, number: int) -> OwnRows:
        """See `SharedTable`."""
        return OwnRows(self._columns[number], self.measures)

    def others(self, number: int) -> OtherRows:
        """See `SharedTable`."""
        return OtherRows(
            [one for at, one in enumerate(self._columns) if at != number], self.measures
        )


class OwnRow:
    """A row of this process. Write nothing to one that was dropped."""

    __slots__ = ("_column", "_floats", "_key", "_pack")

    def __init__(self, column: OwnRows, key: int, cells: memoryview) -> None:
        self._column, self._key = column, key
        self._floats = cells.cast("B").cast("d")
        self._pack = struct.Struct(f"{len(self._floats) - _VERSIONS}d").pack_into

    def write(self, version: float, numbers: Sequence[float]) -> None:
        """Write all of it. `version`: above 0, another one than before."""
        floats = self._floats
        floats[-1] = version
        self._pack(floats, 8, *numbers)
        floats[0] = version
        self._column.written(self._key)


class OwnRows(Column):
    """A column as its writer sees it."""

    def own(self, key: int) -> OwnRow | None:
        """Return the row of a key, None if there is no slot."""
        cells = self.row(key)
        return None if cells is None else OwnRow(self, key, cells)


class OtherRows(Others):
    """The columns of all other processes, as one process reads them."""

    def __init__(self, columns: Iterable[Cells], measures: int) -> None:
        super().__init__(columns, measures)
        self._floats_at = struct.Struct(f"{measures}d").unpack_from
        self._head_at = struct.Struct(f"{min(HEAD, measures)}d").unpack_from
        self.no_row = (0.0,) * measures
        """What `newer` returns for a row that is gone."""

    @property
    def count(self) -> int:
        """How many columns there are."""
        return len(self._columns)

    def newer(self, key: int, seen: list[int]) -> list[tuple[int, tuple[float, ...]]]:
        """Return the rows of a key that are not those in `seen`, with the places of their columns,
        and note them there.

        `seen`: a number for each column, 0 at first. A row begins with its version; that of a row
        that is gone is 0.
        """
        found: list[tuple[int, tuple[float, ...]]] = []
        for at, one in enumerate(self._columns):
            if one.header[LAYOUT] != one.layout:
                one.find()
            begin = one.begins.get(key)
            # The bits of its version: all that is asked is whether it is another one.
            version = 0 if begin is None else one.rows[begin >> 3]
            if version != seen[at]:
                row = self.no_row if begin is None else self._floats_at(one.rows, begin)
                if row[0] == row[-1]:
                    seen[at] = version
                    found.append((at, row))
        return found

    def newer_in(self, at: int, key: int, seen: list[int]) -> tuple[float, ...] | None:
        """Return the row of a key in the column at this place as `newer` does, None if it is the
        one in `seen`.
        """
        one = self._columns[at]
        if one.header[LAYOUT] != one.layout:
            one.find()
        begin = one.begins.get(key)
        version = 0 if begin is None else one.rows[begin >> 3]
        if version == seen[at]:
            return None
        row = self.no_row if begin is None else self._floats_at(one.rows, begin)
        if row[0] != row[-1]:
            return None
        seen[at] = version
        return row

    def written(self) -> list[tuple[int, int, tuple[float, ...]]] | None:
        """Return what was written since the last call, once each; None: it may be anything.

        The places of columns, keys, and the first `HEAD` numbers of the rows. What stands behind
        the version in them may be of the next one.
        """
        found: list[tuple[int, int, tuple[float, ...]]] = []
        anything = False
        head_at = self._head_at
        for at, one in enumerate(self._columns):
            header = one.header
            changes = header[CHANGES]
            behind = changes - one.changes
            if not behind:
                continue
            one.changes = changes
            if header[LAYOUT] != one.noticed or not 0 < behind <= MOST_BEHIND:
                one.noticed = header[LAYOUT]
                anything = True
            elif not anything:
                ring, keys, rows, size = one.ring, one.keys, one.rows, one.size
                slots: Iterable[int] = (ring[(changes - 1) % RING],)
                if behind > 1:
                    slots = {ring[count % RING] for count in range(changes - behind, changes)}
                found += [(at, keys[slot], head_at(rows, slot * size)) for slot in slots]
        return None if anything else found
