"""An engine's load as all workers make it: the code of one process, on numbers that are shared.
Pure.

Each number is one of two kinds. Sums (prefill that is not done, sequences and their tokens): each
worker writes its own part in its row, and adds the others' parts. State of the engine (the count of
its steps, since when it works, corrections): whoever changes it takes the newest one first, and
writes it with the next version; the newest counts. Two workers that change it within the same
microseconds lose one change of an estimate, never of a sum. A worker that ends takes its sums
along, and no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdproxy.kit.shared_rows import OtherRows, OwnRows
from pdproxy.kit.shared_table import key_of
from pdproxy.scheduling.auto.loads import NOTHING_S, PredictedLeg, PredictedLoad
from pdproxy.scheduling.auto.times import WorkTimes
from pdproxy.scheduling.ledger_engine import LedgerEngine

_HEAD = 1 + 2
_KEPT_NUMBER, _KEPT, _STATE = _HEAD, _HEAD + 1, _HEAD + 2
_SUM = _STATE + 11
_SUMS = 10
_FACTORS = _SUM + _SUMS
_OF_FACTOR = 5
FLOATS = _FACTORS - 1 + 2 * _OF_FACTOR
"""Numbers of a row: orders, the number of the decision whether the engine is kept for prefill, and
that; state, sums, factors.
"""


class WorkerLoad(PredictedLoad):
    """One engine, in one of several workers. All numbers of `PredictedLoad` are those of all
    workers.

    `kept_changed` is called when another worker has decided whether the engine is kept for prefill.
    `look` has all changes marked, those of other engines, too; without it this one looks for its
    own.
    """

    __slots__ = (
        "_changed_in",
        "_column",
        "_factors",
        "_kept_changed",
        "_kept_number",
        "_key",
        "_look",
        "_marked",
        "_others",
        "_parts",
        "_row",
        "_rows",
        "_seen",
        "_theirs",
        "_told",
        "_version",
    )

    def __init__(
        self,
        engine: LedgerEngine,
        times: WorkTimes,
        column: OwnRows,
        others: OtherRows,
        kept_changed: Callable[[PredictedLoad], None],
        *,
        assumed: bool = False,
        corrects: bool = True,
        look: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(engine, times, assumed=assumed, corrects=corrects)
        self._look = look
        self._changed_in: set[int] = set()
        """Places of the columns in which the engine has changed."""
        self._marked = 0.0
        """The newest version of the changes."""
        self._factors: tuple[float, ...] = ()
        """Those that the newest row had."""
        self._key = key_of(engine.url)
        self._column, self._others, self._kept_changed = column, others, kept_changed
        self._row = column.own(self._key)
        self._seen = [0] * others.count
        self._rows = [others.no_row] * others.count
        self._theirs: tuple[float, ...] = (0.0,) * _SUMS
        self._parts = [self._theirs] * max(1, others.count)
        """The others' parts of the sums: all together, and by the places of their columns."""
        self._version = 0.0
        """Of the state here."""
        self._kept_number, self._told = 0.0, False
        self.read()

    @property
    def key(self) -> int:
        """Of its row."""
        return self._key

    def leave(self) -> None:
        """Write nothing more: the engine is gone. Legs to it may still run."""
        if self._row is not None:
            self._row = None
            self._column.drop(self._key)

    # -- what others have changed

    def read(self) -> None:
        """Take what others have changed."""
        self._changed_in.clear()
        found = self._others.newer(self._key, self._seen)
        if found:
            self._take(found)

    def mark(self, at: int, head: Sequence[float]) -> None:
        """Note a change by the worker whose column is at this place. `head`: the first numbers of
        its row.
        """
        version, prefill_order, decode_order, number, kept, _ = head
        self._changed_in.add(at)
        if version > self._version and version > self._marked:
            self._marked, self.prefill_order, self.decode_order = (
                version,
                prefill_order,
                decode_order,
            )
        if number > self._kept_number or (number == self._kept_number and (kept > 0) != self.kept):
            self.take()

    @property
    def is_marked(self) -> bool:
        """Whether there are changes that are not taken."""
        return bool(self._changed_in)

    def take(self) -> None:
        """Take the changes that are marked."""
        if not self._changed_in:
            return
        changed, self._changed_in = self._changed_in, set()
        newer_in, key, seen = self._others.newer_in, self._key, self._seen
        found = [(at, row) for at in changed if (row := newer_in(at, key, seen)) is not None]
        if found:
            self._take(found)

    def _refresh(self) -> None:
        """Take what others have changed until now."""
        if self._look is None:
            self.read()
            return
        self._look()
        self.take()

    def _take(self, found: list[tuple[int, tuple[float, ...]]]) -> None:
        begins_at = self.free_at - self.pending_s
        newest: tuple[float, ...] | None = None
        version, number, kept, gone = self._version, self._kept_number, self.kept, False
        for at, row in found:
            old = self._rows[at]
            self._rows[at], self._parts[at] = row, row[_SUM:_FACTORS]
            if row[0] > version:
                version, newest = row[0], row
            elif not row[0] and old[0] == self._version:
                gone = True
            # of two decisions with one number, all workers choose the same
            if row[_KEPT_NUMBER] >= number:
                number, kept = max((number, kept), (row[_KEPT_NUMBER], row[_KEPT] > 0))
        self._add_up()
        if newest is not None:
            self._version = version
            begins_at = self._use_state(newest)
        self.free_at = begins_at + self.pending_s
        self._order()
        if number > self._kept_number or kept != self.kept:
            self._kept_number = number
            self.kept = self._told = kept
            self._kept_changed(self)
            self._write()  # it is known as long as any worker is there
        elif gone and newest is None:
            # the state here was that of a worker that has ended: its successor is to know it
            self._write()

    def _add_up(self) -> None:
        """Have the sums hold the other workers' parts as they are now. A part that is over is
        exactly 0.
        """
        new = tuple(map(sum, zip(*self._parts, strict=True)))
        old, self._theirs = self._theirs, new
        self.pending_s += new[0] - old[0]
        self.pending_steps += new[1] - old[1]
        if self.pending_s < NOTHING_S:
            self.pending_s = self.pending_steps = 0.0
        self.expected += int(new[2] - old[2])
        self.expected_tokens += int(new[3] - old[3])
        self.pulls += int(new[4] - old[4])
        self.decoding += int(new[5] - old[5])
        self.prompts += int(new[6] - old[6])
        self.outputs += new[7] - old[7]
        self.began_sum += new[8] - old[8]
        self.began_steps += new[9] - old[9]

    def _use_state(self, row: tuple[float, ...]) -> float:
        """Go on from the state that another worker has written. Return from when the engine does
        what is to be done.
        """
        (
            self._then,
            self.steps,
            self.busy_steps,
            self.alone_steps,
            self.busy_from,
            begins_at,
            self.wait_s,
            self._last_done,
            self._soonest,
            self.delay,
            self.delay_at,
        ) = row[_STATE : _STATE + 11]
        factors = row[_FACTORS:-1]
        if factors == self._factors:
            return begins_at
        self._factors = factors
        self.prefill.use_state(factors[:_OF_FACTOR])
        self.step.use_state(factors[_OF_FACTOR:])
        if self.corrects:
            self.times.prefill_factor, self.times.step_factor = self.prefill.value, self.step.value
        return begins_at

    # -- what this worker changes

    def tell_kept(self, *, kept: bool) -> None:
        """Decide for all workers whether the engine is kept for prefill."""
        self.kept = kept
        if kept != self._told:
            self._told = kept
            self._kept_number += 1
            self._write()

    def _write(self) -> None:
        """Have the others see this worker's part of the sums, and the state."""
        theirs = self._theirs
        pending, pending_steps = self.pending_s - theirs[0], self.pending_steps - theirs[1]
        if pending < NOTHING_S:
            pending = pending_steps = 0.0
        decoding = self.decoding - theirs[5]
        outputs = began_sum = began_steps = 0.0
        if decoding:
            outputs, began_sum = self.outputs - theirs[7], self.began_sum - theirs[8]
            began_steps = self.began_steps - theirs[9]
        else:
            self.outputs, self.began_sum, self.began_steps = theirs[7], theirs[8], theirs[9]
        self._version += 1.0
        self._factors = *self.prefill.state, *self.step.state
        if self._row is not None:
            self._row.write(
                self._version,
                (
                    self.prefill_order,
                    self.decode_order,
                    self._kept_number,
                    self.kept,
                    self._then,
                    self.steps,
                    self.busy_steps,
                    self.alone_steps,
                    self.busy_from,
                    self.free_at - self.pending_s,
                    self.wait_s,
                    self._last_done,
                    self._soonest,
                    self.delay,
                    self.delay_at,
                    pending,
                    pending_steps,
                    self.expected - theirs[2],
                    self.expected_tokens - theirs[3],
                    self.pulls - theirs[4],
                    decoding,
                    self.prompts - theirs[6],
                    outputs,
                    began_sum,
                    began_steps,
                    *self._factors,
                ),
            )

    def advance(self, now: float) -> None:
        """See `PredictedLoad`."""
        if self._changed_in:
            self.take()
        unseen = self._unseen
        if unseen and unseen[0][0] <= now:
            self._refresh()
            super().advance(now)
            self._write()
        else:
            super().advance(now)

    def opened(
        self, leg: PredictedLeg, *, arrives_at: float, answers: bool, longer_s: float
    ) -> None:
        """See `PredictedLoad`."""
        self._refresh()
        super().opened(leg, arrives_at=arrives_at, answers=answers, longer_s=longer_s)
        self._write()

    def computed(self, leg: PredictedLeg, arrived_at: float, done_at: float, now: float) -> None:
        """See `PredictedLoad`."""
        self._refresh()
        super().computed(leg, arrived_at, done_at, now)
        self._write()

    def began(self, leg: PredictedLeg, now: float) -> None:
        """See `PredictedLoad`."""
        self._refresh()
        super().began(leg, now)
        self._write()

    def never_began(self, leg: PredictedLeg) -> None:
        """See `PredictedLoad`."""
        self._refresh()
        super().never_began(leg)
        self._write()

    def ended(self, leg: PredictedLeg, now: float, tokens: int | None) -> None:
        """See `PredictedLoad`."""
        self._refresh()
        self.advance(now)
        counts = self.steps, self.busy_steps, self.alone_steps
        super().ended(leg, now, tokens)
        # Another worker's sequence may have begun in these microseconds: it is counted from where
        # the counts are.
        self.steps, self.busy_steps, self.alone_steps = counts
        self._write()
