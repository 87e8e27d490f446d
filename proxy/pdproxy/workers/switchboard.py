"""Questions of one worker to all others, passed on by the parent. It knows nothing of what they
mean.

Owns the questions that are not answered yet, and each worker's last report: what has to be known of
it after it has ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from pdproxy.workers.links import Message
from pdproxy.workers.supervisor import Supervisor, WorkerProcess

ASK, REPLY, REPORT = "ask", "reply", "report"
"""What a worker sends: a question (`number`: its own of it), an answer to one (`number`: that of
the question), and its report.
"""
QUESTION, ASKED, ANSWER, PAST = "question", "asked", "answer", "past"
"""What the parent sends: a question, to whom a question went (`body`: `AskedWorkers`), an answer
(`worker`: whose), and what is left of the workers that have ended.
"""
LATE, LAST = "late", "last"
"""What a worker sends when it waits no longer for answers (`number`: its own of the question), and
what the parent sends for each worker that has not answered, or that has ended meanwhile (`worker`:
which; `body`: its last report, if there is one).
"""
MAX_OPEN = 256
"""Questions that are not answered by all yet. The oldest is forgotten for one more."""


class AskedWorkers(msgspec.Struct, array_like=True, frozen=True):
    """Whom a question went to, how often workers and the scheduler were started again, and which of
    them do not serve: they have ended, or begin.
    """

    workers: tuple[int, ...]
    restarts: int
    absent: tuple[int, ...] = ()
    scheduler_restarts: int = 0


@dataclass(slots=True)
class _Question:
    """Who asks, its process, its own number of the question, and who has not answered."""

    asker: WorkerProcess
    pid: int | None
    number: int
    waiting: set[int]


encode_asked = msgspec.msgpack.Encoder().encode
decode_asked = msgspec.msgpack.Decoder(AskedWorkers).decode


class Switchboard:
    """Passes questions and answers on. `add_up` makes one report of what is left of dead workers
    and of one more; it is also given the reports of the workers that live.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        add_up: Callable[[bytes, bytes, Collection[bytes]], bytes],
    ) -> None:
        self._supervisor = supervisor
        self._add_up = add_up
        self._questions: OrderedDict[int, _Question] = OrderedDict()
        """By their numbers."""
        self._last = 0
        self._reports: dict[int, bytes] = {}
        self._past = b""

    def __repr__(self) -> str:
        return f"<Switchboard: {len(self._questions)} questions>"

    def received(self, worker: WorkerProcess, message: Message) -> None:
        """Process a message of a worker."""
        if message.kind == ASK:
            self._ask(worker, message)
        elif message.kind == REPLY:
            self._pass_on(ANSWER, message.number, worker.number, message.body)
        elif message.kind == LATE:
            for number, one in list(self._questions.items()):
                if one.asker is worker and one.pid == worker.pid and one.number == message.number:
                    for silent in sorted(one.waiting):
                        self._pass_on(LAST, number, silent, self._reports.get(silent, b""))
        elif message.kind == REPORT:
            self._reports[worker.number] = message.body

    def died(self, number: int) -> None:
        """Keep the last report of a worker that has ended."""
        report = self._reports.pop(number, b"")
        # who has asked it got what was left of others before
        for question in list(self._questions):
            self._pass_on(LAST, question, number, report)
        if report:
            self._past = self._add_up(self._past, report, self._reports.values())

    def _ask(self, worker: WorkerProcess, message: Message) -> None:
        self._last += 1
        others = [one for one in self._supervisor.workers if one is not worker and one.ready]
        self._questions[self._last] = _Question(
            worker, worker.pid, message.number, {one.number for one in others}
        )
        if len(self._questions) > MAX_OPEN:
            self._questions.popitem(last=False)
        absent = tuple(
            one.number for one in self._supervisor.workers if not one.ready and one is not worker
        )
        asked = AskedWorkers(
            tuple(one.number for one in others),
            self._supervisor.restarts,
            absent,
            self._supervisor.restarts_for_all,
        )
        if self._past:  # first: with `ASKED` a worker without others has all that it waits for
            self._supervisor.send(worker, Message(PAST, message.number, body=self._past))
        self._supervisor.send(worker, Message(ASKED, message.number, body=encode_asked(asked)))
        for one in others:
            self._supervisor.send(one, Message(QUESTION, self._last, body=message.body))

    def _pass_on(self, kind: str, question: int, number: int, body: bytes) -> None:
        """Send who has asked a question what a worker answers, or its last report in place of that.
        Once for each.
        """
        asked = self._questions.get(question)
        if asked is None or number not in asked.waiting:
            return
        asked.waiting.discard(number)
        if not asked.waiting:
            del self._questions[question]
        if asked.asker.pid == asked.pid:  # else another process has its number now
            self._supervisor.send(asked.asker, Message(kind, asked.number, number, body))
