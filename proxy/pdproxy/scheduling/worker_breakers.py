"""Breakers that count the failures of all workers: one that opens in a worker is open in all, and
one request of all tries it.

Owns this worker's column of the table of breakers. Failures in a row are the failed legs of all
workers since the last good one of any. The state of a breaker (open, half-open, slow start) is that
of the change with the highest stamp; open trials are sums. Before a change, and before each choice
while a breaker is opened, what others have written is read. Two workers that choose within the same
microseconds may both try an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pdproxy.kit.shared_table import Column, Others, bits_of, float_of, key_of
from pdproxy.scheduling.breakers import Breakers
from pdproxy.scheduling.leases import Lease
from pdproxy.scheduling.ledger_engine import LedgerEngine

MEASURES = 9
"""Numbers of the table for each engine: the stamp of the state; failed legs; how many all workers
had at the last good one; the number of its trials; when its cooldown ends; its places; when its
slow start ends; open trials; the stamp again. Times are the bits of floats: all workers see the
same moment.
"""
_STAMP, _FAILED, _FORGIVEN, _NUMBER, _OPEN, _PLACES, _SLOW, _TRIALS, _STAMP_AGAIN = range(MEASURES)
KEPT = frozenset(range(MEASURES)) - {_TRIALS}
"""What stays when a worker has ended: its successor must not take back what it had found."""
_NUMBERS = 10
"""Bits of a stamp that are the worker's number: stamps of two workers are never equal."""

_T = TypeVar("_T")


class _Own:
    """What this worker has written of an engine. `stamp`: of the state that its engine has; `all`:
    failed legs of all workers.
    """

    __slots__ = ("all", "failed", "forgiven", "key", "stamp", "trials")

    def __init__(self, key: int) -> None:
        self.key = key
        self.stamp = self.failed = self.forgiven = self.trials = self.all = 0


class WorkerBreakers(Breakers):
    """The `Breakers` of one of several workers. `column`: its own part of the table of breakers,
    `others`: those of others.
    """

    def __init__(
        self,
        failures: int,
        cooldown: float,
        slow_start: float,
        column: Column,
        others: Others,
        number: int,
    ) -> None:
        super().__init__(failures, cooldown, slow_start)
        self._column = column
        self._others = others
        self._worker = number
        self._own: dict[LedgerEngine, _Own] = {}
        self._of_key: dict[int, LedgerEngine] = {}
        self._changing = False
        self.tell: Callable[[], None] = lambda: None
        """Called when something was written: the others need not look before."""
        self.follows = False
        """Whether what happens now was found by another worker, which has written it already."""

    def add(self, engine: LedgerEngine) -> None:
        """Share the breaker of an engine, which begins as the other workers have it."""
        own = self._own[engine] = _Own(key_of(engine.url))
        self._of_key[own.key] = engine
        row = self._column.read(own.key)  # of the worker that had this number before
        own.failed, own.forgiven = row[_FAILED], row[_FORGIVEN]
        if row[_STAMP]:
            self._adopt(engine, own, row)
        self._read(engine, own)

    def drop(self, engine: LedgerEngine) -> None:
        """Share the breaker of an engine no more: it was removed."""
        if (own := self._own.pop(engine, None)) is not None:
            self._of_key.pop(own.key, None)
            self._column.drop(own.key)

    def look(self, *, all_of_it: bool = False) -> None:
        """Take over what other workers have changed. `all_of_it`: whether or not it seems to have
        changed.
        """
        changed = None if all_of_it else self._others.changed(len(self._of_key))
        for key in [*self._of_key] if changed is None else changed:
            if (engine := self._of_key.get(key)) is not None:
                self.read(engine)

    def read(self, engine: LedgerEngine) -> None:
        """Take over what other workers have changed of an engine."""
        if (own := self._own.get(engine)) is not None:
            self._read(engine, own)

    def explain(self, engine: LedgerEngine, why: str | None) -> None:
        """Say why a breaker was opened that another worker has opened."""
        if engine.open_until:
            engine.excluded_because = why

    # -- see `Breakers`

    def leased(self, lease: Lease) -> None:
        """See `Breakers`."""
        super().leased(lease)
        if lease.trial and (own := self._own.get(lease.engine)) is not None:
            own.trials += 1
            self._write(lease.engine, own)

    def over(self, lease: Lease) -> None:
        """See `Breakers`."""
        engine = lease.engine
        if (own := self._own.get(engine)) is not None:
            self._read(engine, own)
            if lease.trial == engine.trial_number:
                own.trials -= 1
        super().over(lease)
        if own is not None:
            self._write(engine, own)

    def proved(self, lease: Lease, now: float) -> None:
        """See `Breakers`."""
        self._change(lease.engine, lambda: super(WorkerBreakers, self).proved(lease, now))

    def good(self, lease: Lease, now: float) -> None:
        """See `Breakers`."""
        self._change(lease.engine, lambda: super(WorkerBreakers, self).good(lease, now))

    def failed(self, lease: Lease, now: float) -> bool:
        """See `Breakers`."""
        return self._change(lease.engine, lambda: super(WorkerBreakers, self).failed(lease, now))

    def exclude(self, engine: LedgerEngine, why: str, until: float) -> None:
        """See `Breakers`."""
        self._change(engine, lambda: super(WorkerBreakers, self).exclude(engine, why, until))

    def let_in(self, engine: LedgerEngine, now: float) -> None:
        """See `Breakers`."""
        if not self.follows:
            self._change(engine, lambda: super(WorkerBreakers, self).let_in(engine, now))

    def warm_up(self, engine: LedgerEngine, now: float) -> None:
        """See `Breakers`."""
        if not self.follows:
            self._change(engine, lambda: super(WorkerBreakers, self).warm_up(engine, now))

    def take_over(self, engine: LedgerEngine, before: LedgerEngine) -> None:
        """See `Breakers`."""
        self._change(engine, lambda: super(WorkerBreakers, self).take_over(engine, before))

    def reset(self, engine: LedgerEngine) -> None:
        """See `Breakers`."""
        if not self.follows:
            self._change(engine, lambda: super(WorkerBreakers, self).reset(engine))

    def any_left(self, now: float) -> bool:
        """See `Breakers`."""
        for engine in [*self.opened]:
            if (own := self._own.get(engine)) is not None:
                self._read(engine, own)
                if engine.slow_until and now >= engine.slow_until:
                    self._change(engine, lambda engine=engine: self._close(engine))  # type: ignore[misc]
        return bool(self.opened)

    # -- what is shared

    def _change(self, engine: LedgerEngine, change: Callable[[], _T]) -> _T:
        """Change an engine's breaker behind what others have done, and write what has changed."""
        own = self._own.get(engine)
        if own is None or self._changing:  # it was removed; or a change is a part of another one
            return change()
        self._read(engine, own)
        before, failures = self._state(engine), engine.failures
        self._changing = True
        try:
            result = change()
        finally:
            self._changing = False
        more = max(0, engine.failures - failures)
        own.failed += more
        own.all += more
        if failures and not engine.failures:
            own.forgiven = own.all
        if (state := self._state(engine)) != before:
            own.stamp = ((own.stamp >> _NUMBERS) + 1) << _NUMBERS | self._worker
            if state[0] != before[0] or not engine.trial_places:
                own.trials = 0
        self._write(engine, own)
        return result

    @staticmethod
    def _state(engine: LedgerEngine) -> tuple[int, float, int, float]:
        return engine.trial_number, engine.open_until, engine.trial_places, engine.slow_until

    def _write(self, engine: LedgerEngine, own: _Own) -> None:
        row = (
            own.stamp,
            own.failed,
            own.forgiven,
            engine.trial_number,
            bits_of(engine.open_until),
            engine.trial_places,
            bits_of(engine.slow_until),
            own.trials,
            own.stamp,
        )
        self._column.write(own.key, row)
        self.tell()

    def _read(self, engine: LedgerEngine, own: _Own) -> None:
        """Take over what the others have written of an engine."""
        rows = self._others.each(own.key)
        # A row that is being written has two stamps: it is read at the next look.
        newest = max(
            (row for row in rows if row[_STAMP] == row[_STAMP_AGAIN]),
            key=lambda row: row[_STAMP],
            default=None,
        )
        if newest is not None and newest[_STAMP] > own.stamp:
            self._adopt(engine, own, newest)
        own.all, forgiven, trials = own.failed, own.forgiven, own.trials
        for row in rows:
            own.all += row[_FAILED]
            forgiven = max(forgiven, row[_FORGIVEN])
            if row[_NUMBER] == engine.trial_number:
                trials += row[_TRIALS]
        engine.failures = max(0, own.all - forgiven)
        engine.trials = trials

    def _adopt(self, engine: LedgerEngine, own: _Own, row: tuple[int, ...]) -> None:
        """Have a breaker be as another worker has made it."""
        own.stamp = row[_STAMP]
        if row[_NUMBER] != engine.trial_number:
            own.trials = 0
            engine.excluded_because = None
        engine.trial_number, engine.trial_places = row[_NUMBER], row[_PLACES]
        engine.open_until, engine.slow_until = float_of(row[_OPEN]), float_of(row[_SLOW])
        if engine.trial_places:
            self.opened.add(engine)
        else:
            self.opened.discard(engine)
            engine.excluded_because = None
