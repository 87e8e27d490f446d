"""What all workers learn from their requests together: the demand for engines, and how long answers
are. Pure.

Each worker writes how much it has counted since it began, several times per second, and takes the
difference of what the others have written. Counts that have fallen are those of a worker that has
ended: its next one begins anew.
"""

from __future__ import annotations

from operator import add, lt, sub

from pdproxy.kit.shared_rows import OtherRows, OwnRows
from pdproxy.kit.shared_table import key_of
from pdproxy.scheduling.auto.demand import DemandMeter
from pdproxy.scheduling.outputs import CLASSES, Outputs

_COUNTS = 6
DEMAND_FLOATS = _COUNTS + 2
"""Numbers of a row: what `DemandMeter` counts; the part of the time that kept engines work, and the
number of that decision.
"""
OUTPUT_FLOATS = 2 * CLASSES
"""Numbers of the row: answers and their tokens, of each class of prompts."""
OUTPUTS = key_of("outputs")


class _Counts:
    """A row of this worker, and those of the others as far as they were taken. The first `size`
    numbers are counts.
    """

    __slots__ = ("_column", "_others", "_row", "_rows", "_seen", "_size", "_version", "key")

    def __init__(self, key: int, column: OwnRows, others: OtherRows, size: int) -> None:
        self.key = key
        self._column, self._others, self._size = column, others, size
        self._row = column.own(key)
        self._seen = [0] * others.count
        self._rows = [others.no_row] * others.count
        self._version = 0.0

    def write(self, numbers: list[float]) -> None:
        self._version += 1.0
        if self._row is not None:
            self._row.write(self._version, numbers)

    def taken(self) -> tuple[list[float], list[tuple[float, ...]]]:
        """Return how much the others have counted since the last call, and their rows that are
        new.
        """
        more, new = [0.0] * self._size, []
        for at, row in self._others.newer(self.key, self._seen):
            counts, had = row[1 : 1 + self._size], self._rows[at][1 : 1 + self._size]
            self._rows[at] = row
            if any(map(lt, counts, had)):
                had = (0.0,) * self._size  # another worker, in place of one that has ended
            more = [*map(add, more, map(sub, counts, had))]
            new.append(row[1:-1])
        return more, new

    def leave(self) -> None:
        if self._row is not None:
            self._row = None
            self._column.drop(self.key)


class WorkerMeter(DemandMeter):
    """The `DemandMeter` of one of several workers, for the models of this `name`. It also tells
    what the leading process has decided.
    """

    __slots__ = ("_all", "_number", "_shared", "share")

    def __init__(self, name: str, column: OwnRows, others: OtherRows) -> None:
        super().__init__()
        self._shared = _Counts(key_of(name), column, others, _COUNTS)
        self._all = [0.0] * _COUNTS
        """What this worker has counted since it began."""
        self._number = 0.0
        self.share = 0.0
        """The part of the time that kept engines work. Read only."""
        # what others have counted before this one began is no demand of now
        _, rows = self._shared.taken()
        self._follow(rows)

    def exchange(self, now: float) -> None:
        """Tell the others what was counted here, and count what they have. Call it right before
        each `demand`.
        """
        own = (self._count, self._tokens, self._new, self._pairs, self._squares, self._outputs)
        changed = self._count > 0
        self._all = [all_ + more for all_, more in zip(self._all, own, strict=True)]
        more, rows = self._shared.taken()
        if self._follow(rows) or changed:
            self._write()
        if more[0]:
            if not self._begun:
                self._begun, self._at = True, now
            self._count += int(more[0])
            self._tokens += int(more[1])
            self._new += int(more[2])
            self._pairs += more[3]
            self._squares += more[4]
            self._outputs += more[5]

    def _follow(self, rows: list[tuple[float, ...]]) -> bool:
        """Take over the newest decision of who leads. Return whether it is another one."""
        before = self._number, self.share
        self._number, self.share = max(
            [before, *((row[_COUNTS], row[_COUNTS + 1]) for row in rows)]
        )
        return (self._number, self.share) != before

    def tell_share(self, share: float) -> None:
        """Decide for all workers which part of the time kept engines work."""
        if share != self.share:
            self._number, self.share = self._number + 1.0, share
            self._write()

    def _write(self) -> None:
        self._shared.write([*self._all, self._number, self.share])

    def leave(self) -> None:
        """Count no more: these models are gone."""
        self._shared.leave()


class WorkerOutputs(Outputs):
    """The `Outputs` of one of several workers."""

    __slots__ = ("_changed", "_shared", "_sums")

    def __init__(self, column: OwnRows, others: OtherRows) -> None:
        super().__init__()
        self._shared = _Counts(OUTPUTS, column, others, OUTPUT_FLOATS)
        self._sums = [0.0] * OUTPUT_FLOATS
        self._changed = False

    def add(self, prompt: int, tokens: int) -> None:
        """See `Outputs`."""
        super().add(prompt, tokens)
        at = 2 * min(prompt.bit_length(), CLASSES - 1)
        self._sums[at] += 1
        self._sums[at + 1] += tokens
        self._changed = True

    def exchange(self) -> None:
        """Tell the others of the answers that have ended here, and take theirs."""
        if self._changed:
            self._changed = False
            self._shared.write(self._sums)
        more, _ = self._shared.taken()
        self.add_many(more)
