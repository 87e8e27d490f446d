"""Breakers that count the failures of all workers: one that opens in a worker is open in all, and one request of all tries it.

Owns this worker's column of the table of breakers. Failures in a row are the failed legs of all workers since the last good one
of any. The state of a breaker (open, half-open, slow start) is that of the change with the highest stamp; open trials are sums.
Before a change, and before each choice while a breaker is opened, what others have written is read. Two workers that choose
within the same microseconds may both try an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pdproxy.kit.shared_table import Column, Others, bits_of, float_of, key_of
from pdproxy.scheduling.breakers import Breakers
from pdproxy.scheduling.leases import Lease
from pdproxy.scheduling.nodes import Node

MEASURES = 9
"""Numbers of the table for each engine: the stamp of the state; failed legs; how many all workers had at the last good one; the
number of its trials; when its cooldown ends; its places; when its slow start ends; open trials; the stamp again. Times are the
bits of floats: all workers see the same moment."""
_STAMP, _FAILED, _FORGIVEN, _NUMBER, _OPEN, _PLACES, _SLOW, _TRIALS, _STAMP_AGAIN = range(MEASURES)
KEPT = frozenset(range(MEASURES)) - {_TRIALS}
"""What stays when a worker has ended: its successor must not take back what it had found."""
_NUMBERS = 10
"""Bits of a stamp that are the worker's number: stamps of two workers are never equal."""

_T = TypeVar("_T")


class _Own:
    """What this worker has written of an engine. `stamp`: of the state that its node has; `all`: failed legs of all workers."""

    __slots__ = ("all", "failed", "forgiven", "key", "stamp", "trials")

    def __init__(self, key: int) -> None:
        self.key = key
        self.stamp = self.failed = self.forgiven = self.trials = self.all = 0


class SharedBreakers(Breakers):
    """The `Breakers` of one of several workers. `column`: its own part of the table of breakers, `others`: those of others."""

    def __init__(
        self, failures: int, cooldown: float, slow_start: float, column: Column, others: Others, number: int
    ) -> None:
        super().__init__(failures, cooldown, slow_start)
        self._column = column
        self._others = others
        self._worker = number
        self._own: dict[Node, _Own] = {}
        self._of_key: dict[int, Node] = {}
        self._changing = False
        self.tell: Callable[[], None] = lambda: None
        """Called when something was written: the others need not look before."""
        self.follows = False
        """Whether what happens now was found by another worker, which has written it already."""

    def add(self, node: Node) -> None:
        """Share the breaker of an engine, which begins as the other workers have it."""
        own = self._own[node] = _Own(key_of(node.url))
        self._of_key[own.key] = node
        row = self._column.read(own.key)  # of the worker that had this number before
        own.failed, own.forgiven = row[_FAILED], row[_FORGIVEN]
        if row[_STAMP]:
            self._adopt(node, own, row)
        self._read(node, own)

    def drop(self, node: Node) -> None:
        """Share the breaker of an engine no more: it was removed."""
        if (own := self._own.pop(node, None)) is not None:
            self._of_key.pop(own.key, None)
            self._column.drop(own.key)

    def look(self, *, all_of_it: bool = False) -> None:
        """Take over what other workers have changed. `all_of_it`: whether or not it seems to have changed."""
        changed = None if all_of_it else self._others.changed(len(self._of_key))
        for key in [*self._of_key] if changed is None else changed:
            if (node := self._of_key.get(key)) is not None:
                self.read(node)

    def read(self, node: Node) -> None:
        """Take over what other workers have changed of an engine."""
        if (own := self._own.get(node)) is not None:
            self._read(node, own)

    def explain(self, node: Node, why: str | None) -> None:
        """Say why a breaker was opened that another worker has opened."""
        if node.open_until:
            node.excluded_because = why

    # -- see `Breakers`

    def leased(self, lease: Lease) -> None:
        """See `Breakers`."""
        super().leased(lease)
        if lease.trial and (own := self._own.get(lease.node)) is not None:
            own.trials += 1
            self._write(lease.node, own)

    def over(self, lease: Lease) -> None:
        """See `Breakers`."""
        node = lease.node
        if (own := self._own.get(node)) is not None:
            self._read(node, own)
            if lease.trial == node.trial_number:
                own.trials -= 1
        super().over(lease)
        if own is not None:
            self._write(node, own)

    def proved(self, lease: Lease, now: float) -> None:
        """See `Breakers`."""
        self._change(lease.node, lambda: super(SharedBreakers, self).proved(lease, now))

    def good(self, lease: Lease, now: float) -> None:
        """See `Breakers`."""
        self._change(lease.node, lambda: super(SharedBreakers, self).good(lease, now))

    def failed(self, lease: Lease, now: float) -> bool:
        """See `Breakers`."""
        return self._change(lease.node, lambda: super(SharedBreakers, self).failed(lease, now))

    def exclude(self, node: Node, why: str, until: float) -> None:
        """See `Breakers`."""
        self._change(node, lambda: super(SharedBreakers, self).exclude(node, why, until))

    def let_in(self, node: Node, now: float) -> None:
        """See `Breakers`."""
        if not self.follows:
            self._change(node, lambda: super(SharedBreakers, self).let_in(node, now))

    def warm_up(self, node: Node, now: float) -> None:
        """See `Breakers`."""
        if not self.follows:
            self._change(node, lambda: super(SharedBreakers, self).warm_up(node, now))

    def take_over(self, node: Node, before: Node) -> None:
        """See `Breakers`."""
        self._change(node, lambda: super(SharedBreakers, self).take_over(node, before))

    def reset(self, node: Node) -> None:
        """See `Breakers`."""
        if not self.follows:
            self._change(node, lambda: super(SharedBreakers, self).reset(node))

    def any_left(self, now: float) -> bool:
        """See `Breakers`."""
        for node in [*self.opened]:
            if (own := self._own.get(node)) is not None:
                self._read(node, own)
                if node.slow_until and now >= node.slow_until:
                    self._change(node, lambda node=node: self._close(node))  # type: ignore[misc]
        return bool(self.opened)

    # -- what is shared

    def _change(self, node: Node, change: Callable[[], _T]) -> _T:
        """Change an engine's breaker behind what others have done, and write what has changed."""
        own = self._own.get(node)
        if own is None or self._changing:  # it was removed; or a change is a part of another one
            return change()
        self._read(node, own)
        before, failures = self._state(node), node.failures
        self._changing = True
        try:
            result = change()
        finally:
            self._changing = False
        more = max(0, node.failures - failures)
        own.failed += more
        own.all += more
        if failures and not node.failures:
            own.forgiven = own.all
        if (state := self._state(node)) != before:
            own.stamp = ((own.stamp >> _NUMBERS) + 1) << _NUMBERS | self._worker
            if state[0] != before[0] or not node.trial_places:
                own.trials = 0
        self._write(node, own)
        return result

    @staticmethod
    def _state(node: Node) -> tuple[int, float, int, float]:
        return node.trial_number, node.open_until, node.trial_places, node.slow_until

    def _write(self, node: Node, own: _Own) -> None:
        row = (
            own.stamp,
            own.failed,
            own.forgiven,
            node.trial_number,
            bits_of(node.open_until),
            node.trial_places,
            bits_of(node.slow_until),
            own.trials,
            own.stamp,
        )
        self._column.write(own.key, row)
        self.tell()

    def _read(self, node: Node, own: _Own) -> None:
        """Take over what the others have written of an engine."""
        rows = self._others.each(own.key)
        # A row that is being written has two stamps: it is read at the next look.
        newest = max(
            (row for row in rows if row[_STAMP] == row[_STAMP_AGAIN]), key=lambda row: row[_STAMP], default=None
        )
        if newest is not None and newest[_STAMP] > own.stamp:
            self._adopt(node, own, newest)
        own.all, forgiven, trials = own.failed, own.forgiven, own.trials
        for row in rows:
            own.all += row[_FAILED]
            forgiven = max(forgiven, row[_FORGIVEN])
            if row[_NUMBER] == node.trial_number:
                trials += row[_TRIALS]
        node.failures = max(0, own.all - forgiven)
        node.trials = trials if node.trial_places else 0

    def _adopt(self, node: Node, own: _Own, row: tuple[int, ...]) -> None:
        """Have a breaker be as another worker has made it."""
        own.stamp = row[_STAMP]
        if row[_NUMBER] != node.trial_number:
            own.trials = 0
            node.excluded_because = None
        node.trial_number, node.trial_places = row[_NUMBER], row[_PLACES]
        node.open_until, node.slow_until = float_of(row[_OPEN]), float_of(row[_SLOW])
        if node.trial_places:
            self.opened.add(node)
        else:
            self.opened.discard(node)
            node.excluded_because = None
