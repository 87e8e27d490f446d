"""Numbers of several processes, followed by their differences: each writes its own, and hears how
those of the others change.

The columns are those of a `SharedTable` with one measure. A writer of few numbers stores the number
of a key, and nothing else. A reader compares a column as a whole with what it read last, and then
takes what differs. The counts of changes and of layouts lie before the numbers, and are compared
with them. Of many numbers the writer also notes which have changed, and readers look only at those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import compress
from operator import ne

from pdproxy.kit.shared_table import (
    CHANGES,
    HEADER,
    LAYOUT,
    MOST_BEHIND,
    RING,
    Cells,
    Column,
    Others,
)

MEASURES = 1
MANY = 24
"""Slots. Where a column has used more, its changes are noted: from about there on that is cheaper,
with two workers and eight.
"""
_NOTE = -1
"""In the place of a slot: something beside the table has changed."""

Move = Callable[[int], object]
"""Called with how much more a number is than before."""


def note(column: Column, slot: int = _NOTE) -> None:
    """Have the others find out that the number of a slot has changed. Without one: something beside
    the table.
    """
    header = column.cells.header
    count = header[CHANGES]
    column.cells.ring[count % RING] = slot
    header[CHANGES] = count + 1


def are_many(slot: int) -> bool:
    """Return whether a column that uses this slot has so many numbers that its writer must `note`
    their changes from now on.
    """
    return slot >= MANY


def _ignore(more: int) -> None:
    """Nothing follows this number."""


class _Seen:
    """A column of another process as it was read last.

    `view`: its counts, and the numbers up to the last slot with a key; `had`: what they were;
    `many`: whether changes are noted; `moves`: what follows each; `keys`: those of the slots, 0 for
    none.
    """

    __slots__ = ("cells", "had", "keys", "many", "moves", "view")

    def __init__(self, cells: Cells, moves: list[Move]) -> None:
        self.cells = cells
        self.view = cells.counted[:HEADER]
        self.had = [-1] * HEADER
        self.many = False
        self.moves = moves
        self.keys: list[int] = []


class OtherSums:
    """The sums of all other processes' numbers. `noted`: called when something beside the table may
    have changed.
    """

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

    def look(self, *, all_of_it: bool = False) -> None:
        """Take what has changed since the last look. `all_of_it`: also what was not noted."""
        for one in self._columns:
            if one.many:
                self._look_at_many(one, all_of_it)
                continue
            new, had = one.view.tolist(), one.had
            if new != had:
                for move, number, before in compress(
                    zip(one.moves, new, had, strict=True), map(ne, new, had)
                ):
                    if move(number - before):  # its keys have changed: all of it was taken
                        break
                else:
                    one.had = new

    def _look_at_many(self, one: _Seen, all_of_it: bool) -> None:
        cells, had, moves = one.cells, one.had, one.moves
        header, ring, rows = cells.header, cells.ring, cells.rows
        changes = header[CHANGES]
        behind = changes - had[CHANGES]
        if not behind and not all_of_it:
            return
        had[CHANGES] = changes
        if header[LAYOUT] != had[LAYOUT]:
            self._find(one, 0)
            return
        slots: Iterable[int]
        if all_of_it or not 0 < behind <= MOST_BEHIND:
            slots = range(_NOTE, len(one.keys))
        elif behind == 1:
            slots = (ring[(changes - 1) % RING],)
        else:
            slots = {ring[at % RING] for at in range(changes - behind, changes)}
        noted, used = False, len(one.keys)
        for slot in slots:
            if not 0 <= slot < used:
                # or a slot that is not known: a writer has overtaken this look in the ring, the
                # next one finds it
                noted = True
                continue
            at = slot + HEADER
            number, before = rows[slot], had[at]
            if number != before:
                had[at] = number
                moves[at](number - before)
        if noted:
            self._noted()

    def _changed(self, more: int) -> None:
        self._noted()

    def _find(self, one: _Seen, more: int) -> bool:
        """Look where a column has its keys, and take all of it. Return True: there is nothing else
        to take.
        """
        cells = one.cells
        layout = cells.header[LAYOUT]
        keys = cells.keys.tolist()
        while keys and not keys[-1]:
            keys.pop()
        moved = {key: -had for key, had in zip(one.keys, one.had[HEADER:], strict=True) if key}
        one.keys, one.view = keys, cells.counted[: HEADER + len(keys)]
        one.had = had = one.view.tolist()
        # that of the keys: where it is another one by now, the next look finds it
        had[LAYOUT] = layout
        one.many = bool(keys) and are_many(len(keys) - 1)
        one.moves[HEADER:] = [self._moves.get(key, _ignore) for key in keys]
        for key, number in zip(keys, had[HEADER:], strict=True):
            if key:
                moved[key] = moved.get(key, 0) + number
        for key, total in moved.items():
            if total and (move := self._moves.get(key)) is not None:
                move(total)
        self._noted()
        return True
