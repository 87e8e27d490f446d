"""An engine's load as all workers make it: the code of one process, on numbers that are shared. Pure.

Each number is one of two kinds. Sums (prefill that is not done, sequences and their tokens): each worker writes its own part in
its row, and adds the others' parts. State of the engine (the count of its steps, since when it works, corrections): whoever
changes it takes the newest one first, and writes it with the next version; the newest counts. Two workers that change it within
the same microseconds lose one change of an estimate, never of a sum. A worker that ends takes its sums along, and no state.
"""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.kit.shared_rows import OtherRows, OwnRows
from pdproxy.kit.shared_table import key_of
from pdproxy.scheduling.auto.loads import NOTHING_S, EngineLoad, Leg
from pdproxy.scheduling.auto.times import Times
from pdproxy.scheduling.nodes import Node

_SUMS = 10
_KEPT_NUMBER = 1 + _SUMS
_KEPT, _STATE = _KEPT_NUMBER + 1, _KEPT_NUMBER + 2
_OF_FACTOR = 5
FLOATS = _SUMS + 2 + 11 + 2 * _OF_FACTOR
"""Numbers of a row: sums, whether the engine is kept for prefill and the number of that decision, state, factors."""


class WorkerLoad(EngineLoad):
    """One engine, in one of several workers. All numbers of `EngineLoad` are those of all workers.

    `kept_changed` is called when another worker has decided whether the engine is kept for prefill.
    """

    __slots__ = (
        "_column",
        "_kept_changed",
        "_kept_number",
        "_key",
        "_others",
        "_row",
        "_rows",
        "_seen",
        "_theirs",
        "_told",
        "_version",
    )

    def __init__(
        self,
        node: Node,
        times: Times,
        column: OwnRows,
        others: OtherRows,
        kept_changed: Callable[[EngineLoad], None],
        *,
        assumed: bool = False,
        corrects: bool = True,
    ) -> None:
        super().__init__(node, times, assumed=assumed, corrects=corrects)
        self._key = key_of(node.url)
        self._column, self._others, self._kept_changed = column, others, kept_changed
        self._row = column.own(self._key)
        self._seen = [0] * others.count
        self._rows = [others.no_row] * others.count
        self._theirs = (0.0,) * _SUMS
        """The others' parts of the sums."""
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

    def read(self) -> float | None:
        """Take what others have changed. Return when the newest of it was, None if there was nothing."""
        found = self._others.newer(self._key, self._seen)
        return self._take(found) if found else None

    def read_in(self, at: int) -> float | None:
        """Take what the worker has changed whose column is at this place, as `read` does."""
        row = self._others.newer_in(at, self._key, self._seen)
        return None if row is None else self._take([(at, row)])

    def _take(self, found: list[tuple[int, tuple[float, ...]]]) -> float | None:
        begins_at = self.free_at - self.pending_s
        newest: tuple[float, ...] | None = None
        version, number, kept, gone = self._version, self._kept_number, self.kept, False
        for at, row in found:
            old = self._rows[at]
            self._rows[at] = row
            self._sum(row, old)
            if row[0] > version:
                version, newest = row[0], row
            elif not row[0] and old[0] == self._version:
                gone = True
            if row[_KEPT_NUMBER] >= number:  # of two decisions with one number, all workers choose the same
                number, kept = max((number, kept), (row[_KEPT_NUMBER], row[_KEPT] > 0))
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
            self._write()  # the state here was that of a worker that has ended: its successor is to know it
        return None if newest is None else newest[_STATE]

    def _sum(self, new: tuple[float, ...], old: tuple[float, ...]) -> None:
        """Have the sums hold another worker's new part in place of its old one."""
        theirs = self._theirs
        pending, pending_steps = theirs[0] + new[1] - old[1], theirs[1] + new[2] - old[2]
        if pending < NOTHING_S:  # no rests of sums of floats
            pending = pending_steps = 0.0
        expected, tokens, pulls = theirs[2] + new[3] - old[3], theirs[3] + new[4] - old[4], theirs[4] + new[5] - old[5]
        decoding, prompts = theirs[5] + new[6] - old[6], theirs[6] + new[7] - old[7]
        outputs = began_sum = began_steps = 0.0
        if decoding:
            outputs, began_sum = theirs[7] + new[8] - old[8], theirs[8] + new[9] - old[9]
            began_steps = theirs[9] + new[10] - old[10]
        self.pending_s += pending - theirs[0]
        self.pending_steps += pending_steps - theirs[1]
        if self.pending_s < NOTHING_S:
            self.pending_s = self.pending_steps = 0.0
        self.expected += int(expected - theirs[2])
        self.expected_tokens += int(tokens - theirs[3])
        self.pulls += int(pulls - theirs[4])
        self.decoding += int(decoding - theirs[5])
        self.prompts += int(prompts - theirs[6])
        self.outputs += outputs - theirs[7]
        self.began_sum += began_sum - theirs[8]
        self.began_steps += began_steps - theirs[9]
        self._theirs = (
            pending,
            pending_steps,
            expected,
            tokens,
            pulls,
            decoding,
            prompts,
            outputs,
            began_sum,
            began_steps,
        )

    def _use_state(self, row: tuple[float, ...]) -> float:
        """Go on from the state that another worker has written. Return from when the engine does what is to be done."""
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
        at = _STATE + 11
        self.prefill.use_state(row[at : at + _OF_FACTOR])
        self.step.use_state(row[at + _OF_FACTOR : at + 2 * _OF_FACTOR])
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
        if self._row is not None:
            self._row.write(
                self._version,
                (
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
                    *self.prefill.state,
                    *self.step.state,
                ),
            )

    def advance(self, now: float) -> None:
        """See `EngineLoad`."""
        unseen = self._unseen
        if unseen and unseen[0][0] <= now:
            self.read()
            super().advance(now)
            self._write()
        else:
            super().advance(now)

    def opened(self, leg: Leg, *, arrives_at: float, answers: bool, longer_s: float) -> None:
        """See `EngineLoad`."""
        self.read()
        super().opened(leg, arrives_at=arrives_at, answers=answers, longer_s=longer_s)
        self._write()

    def computed(self, leg: Leg, arrived_at: float, done_at: float, now: float) -> None:
        """See `EngineLoad`."""
        self.read()
        super().computed(leg, arrived_at, done_at, now)
        self._write()

    def began(self, leg: Leg, now: float) -> None:
        """See `EngineLoad`."""
        self.read()
        super().began(leg, now)
        self._write()

    def never_began(self, leg: Leg) -> None:
        """See `EngineLoad`."""
        self.read()
        super().never_began(leg)
        self._write()

    def ended(self, leg: Leg, now: float, tokens: int | None) -> None:
        """See `EngineLoad`."""
        self.read()
        self.advance(now)
        counts = self.steps, self.busy_steps, self.alone_steps
        super().ended(leg, now, tokens)
        # Another worker's sequence may have begun in these microseconds: it is counted from where the counts are.
        self.steps, self.busy_steps, self.alone_steps = counts
        self._write()
