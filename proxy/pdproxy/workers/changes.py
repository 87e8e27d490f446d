"""Changes that operators ask one of several workers for: the parent puts them in one order, and
tells all workers of each.

Owns the order, and the changes that have not been answered by all. Nothing here waits. A link keeps
the order of its messages, so all workers make the same changes in the same order. A worker that
starts has those until then by the fork, in the journal, and all later ones by its link: each of
them once.
"""

from __future__ import annotations

import msgspec

from pdproxy.web.admin.changes import (
    Change,
    ChangeOutcome,
    decode_change,
    decode_outcome,
    is_accepted,
)
from pdproxy.workers.journal import ChangeJournal
from pdproxy.workers.links import Message
from pdproxy.workers.supervisor import Supervisor, WorkerProcess

CHANGE, CHANGED, GONE = "change", "changed", "gone"
"""What a worker sends: a change (`number`: its own of it), what came of one (`number`: that of the
order), the URL of an engine that has left, or that another source has serve again (`number`: of the
last change that it has made).
"""
MAKE, UNDO, WAITED, OUTCOME, LOST = "make", "undo", "waited", "outcome", "lost"
"""What the parent sends: a change that is to be made, one that is not in force (`number`: that of
the order); and to who has asked (`number`: its own): the workers that are waited for, what came of
it in one of them, and that one has ended.
"""
_KINDS = (CHANGE, CHANGED, GONE)

encode_numbers = msgspec.msgpack.Encoder().encode
decode_numbers = msgspec.msgpack.Decoder(list[int]).decode


class _Open:
    """A change that has not been answered by all. `own`: the asker's number of it; `waited`: the
    workers that have to answer.
    """

    def __init__(self, change: Change, asker: WorkerProcess, own: int, waited: set[int]) -> None:
        self.change = change
        self.asker = asker
        self.pid = asker.pid
        self.own = own
        self.waited = waited
        self.outcomes: list[ChangeOutcome] = []


class ParentChanges:
    """The parent's part."""

    def __init__(self, supervisor: Supervisor, journal: ChangeJournal) -> None:
        self._supervisor = supervisor
        self._journal = journal
        self._open: dict[int, _Open] = {}
        self._last = 0

    def __repr__(self) -> str:
        return f"<Changes: {len(self._open)} open, {self._journal!r}>"

    def received(self, worker: WorkerProcess, message: Message) -> bool:
        """Process a message of a worker. Return whether it is about a change."""
        if message.kind == CHANGE:
            self._begin(worker, message)
        elif message.kind == CHANGED:
            self._changed(worker, message)
        elif message.kind == GONE:
            self._journal.gone(message.number, message.body.decode())
        return message.kind in _KINDS

    def died(self, number: int) -> None:
        """Wait no more for a worker that has ended: its successor has the changes by the
        journal.
        """
        for order, one in list(self._open.items()):
            if number in one.waited:
                self._tell(one, Message(LOST, one.own, number))
                self._answered(order, one, number)

    def _begin(self, asker: WorkerProcess, message: Message) -> None:
        self._last += 1
        # One that starts takes the change as well, but may have to probe its engines first.
        waited = {one.number for one in self._supervisor.workers if one.ready or one is asker}
        one = self._open[self._last] = _Open(
            decode_change(message.body), asker, message.number, waited
        )
        self._journal.begin(self._last, one.change)
        self._tell(one, Message(WAITED, one.own, body=encode_numbers(sorted(waited))))
        self._tell_all(Message(MAKE, self._last, body=message.body))

    def _changed(self, worker: WorkerProcess, message: Message) -> None:
        one = self._open.get(message.number)
        if one is not None and worker.number in one.waited:
            one.outcomes.append(decode_outcome(message.body))
            self._tell(one, Message(OUTCOME, one.own, worker.number, message.body))
            self._answered(message.number, one, worker.number)

    def _answered(self, order: int, one: _Open, worker: int) -> None:
        one.waited.discard(worker)
        if one.waited:
            return
        del self._open[order]
        if is_accepted(one.change.kind, one.outcomes):
            made = [outcome for outcome in one.outcomes if outcome.accepted]
            url = next((outcome.url for outcome in made), one.change.engine)
            self._journal.accept(order, url, {outcome.result for outcome in made})
        else:
            self._journal.refuse(order)
            self._tell_all(Message(UNDO, order))

    def _tell(self, one: _Open, message: Message) -> None:
        if one.asker.pid == one.pid:  # else another process has its number now
            self._supervisor.send(one.asker, message)

    def _tell_all(self, message: Message) -> None:
        for worker in self._supervisor.workers:
            self._supervisor.send(worker, message)
