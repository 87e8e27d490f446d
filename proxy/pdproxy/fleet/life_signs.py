"""The signs of life that engines have shown to any worker, and how long they were silent while they
worked.

Owns this worker's column of the table of signs, which is written and read at each look of the stall
watch.
"""

from __future__ import annotations

from pdproxy.fleet.engine import Engine
from pdproxy.kit.shared_table import Column, Others, key_of

MEASURES = 3
"""Numbers of the table for each engine: its last sign, in nanoseconds; the longest silence, in
nanoseconds, and in which window.
"""
_SIGN, _LONGEST, _WINDOW = range(MEASURES)


class LifeSigns:
    """One worker's part. `column`: its own part of the table of signs, `others`: the other workers'
    parts.
    """

    def __init__(self, column: Column, others: Others) -> None:
        self._column = column
        self._others = others

    def __repr__(self) -> str:
        return f"<Signs in {self._column!r}>"

    def exchange(self, engine: Engine, sign: float, now: float) -> float:
        """Show the last sign that an engine has shown here, and what is known of its pace. Return
        its last sign elsewhere.
        """
        key, pace = key_of(engine.url), engine.open_legs.pace
        if (row := self._column.row(key)) is not None:
            window, longest = pace.shown(now)
            row[_SIGN], row[_LONGEST], row[_WINDOW] = int(sign * 1e9), int(longest * 1e9), window
        last = 0
        for other in self._others.each(key):
            last = max(last, other[_SIGN])
            pace.heard(other[_WINDOW], other[_LONGEST] / 1e9, now)
        return last / 1e9

    def forget(self, url: str) -> None:
        """Forget an engine that was removed."""
        self._column.drop(key_of(url))
