"""Numbers of several processes, followed by their differences: each writes its own, and hears how those of the others change.

The columns are those of a `SharedTable` with one measure. A writer stores the number of a key, and nothing else. A reader
compares a column as a whole with what it read last, and then takes what differs, so that its costs grow with the changes. The
counts of changes and of layouts lie before the numbers, and are compared with them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from itertools import compress
from operator import ne

from pdproxy.kit.shared_table import CHANGES, HEADER, LAYOUT, Cells, Column, Others

MEASURES = 1
MANY = 32
"""Where a column has more numbers, with its counts, they are not compared one by one: the bytes that differ are found as bits of
one large integer. That is faster for 60 of them, and slower for 4."""
_CELL_BITS = 6
"""A cell has 2**6 bits."""

Move = Callable[[int], object]
"""Called with how much more a number is than before."""


def note(column: Column) -> None:
    """Have the others find out that something beside the table has changed."""
    column.cells.header[CHANGES] += 1


def _ignore(more: int) -> None:
    """Nothing follows this number."""


class _Seen:
    """A column of another process as it was read last.

    `view`: its counts, and the numbers up to the last slot with a key; `had`: what they were, `raw` as bytes if they are `many`;
    `moves`: what follows each; `keys`: those of the slots, 0 for none.
    """

    __slots__ = ("cells", "had", "keys", "many", "moves", "raw", "view")

    def __init__(self, cells: Cells, moves: list[Move]) -> None:
        self.cells = cells
        self.view = cells.counted[:HEADER]
        self.had = [-1] * HEADER
        self.raw = b""
        self.many = False
        self.moves = moves
        self.keys: list[int] = []


class OtherSums:
    """The sums of all other processes' numbers. `noted`: called when something beside the table may have changed."""

    def __init__(self, others: Others, noted: Callable[[], None]) -> None:
        self._noted = noted
        self._moves: dict[int, Move] = {}
        self._columns: list[_Seen] = []
        for cells in others.cells:
            one = _Seen(cells, [self._changed])
            one.moves.append(partial(self._find, one))
            self._columns.append(one)

    def __repr__(self) -> str:
        return f"<OtherSums of {len(self._columns)} columns>"

    def follow(self, key: int, move: Move | None) -> None:
        """Have `move` called for this key from now on, and at once with its sum. None: no more."""
        if move is None:
            self._moves.pop(key, None)
        else:
            self._moves[key] = move
        total = 0
        for one in self._columns:
            if key in one.keys:
                at = HEADER + one.keys.index(key)
                one.moves[at] = move or _ignore
                total += one.had[at]
        if move is not None and total:
            move(total)

    def look(self) -> None:
        """Take what has changed since the last look."""
        for one in self._columns:
            if one.many:
                self._look_at_many(one)
                continue
            new, had = one.view.tolist(), one.had
            if new != had:
                for move, number, before in compress(zip(one.moves, new, had, strict=True), map(ne, new, had)):
                    if move(number - before):  # its keys have changed: all of it was taken
                        break
                else:
                    one.had = new

    def _look_at_many(self, one: _Seen) -> None:
        raw = one.view.tobytes()
        if raw == one.raw:
            return
        differs = int.from_bytes(raw, "little") ^ int.from_bytes(one.raw, "little")
        one.raw = raw
        new, had, moves = memoryview(raw).cast("q"), one.had, one.moves
        while differs:
            at = (differs & -differs).bit_length() - 1 >> _CELL_BITS
            behind = at + 1 << _CELL_BITS
            differs = differs >> behind << behind
            number = new[at]
            more = number - had[at]
            had[at] = number
            if moves[at](more):
                return

    def _changed(self, more: int) -> None:
        self._noted()

    def _find(self, one: _Seen, more: int) -> bool:
        """Look where a column has its keys, and take all of it. Return True: there is nothing else to take."""
        cells = one.cells
        layout = cells.header[LAYOUT]
        keys = cells.keys.tolist()
        while keys and not keys[-1]:
            keys.pop()
        moved = {key: -had for key, had in zip(one.keys, one.had[HEADER:], strict=True) if key}
        one.keys, one.view = keys, cells.counted[: HEADER + len(keys)]
        one.had = had = one.view.tolist()
        had[LAYOUT] = layout  # that of the keys: where it is another one by now, the next look finds it
        one.many = len(had) > MANY
        one.raw = array("q", had).tobytes() if one.many else b""
        one.moves[HEADER:] = [self._moves.get(key, _ignore) for key in keys]
        for key, number in zip(keys, had[HEADER:], strict=True):
            if key:
                moved[key] = moved.get(key, 0) + number
        for key, total in moved.items():
            if total and (move := self._moves.get(key)) is not None:
                move(total)
        self._noted()
        return True
