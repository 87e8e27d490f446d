"""Questions of one worker to all others, and what it tells them, passed on by the parent. It knows nothing of what they mean.

Owns the questions that are not answered yet, and each worker's last report: what has to be known of it after it has ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from pdproxy.kit.links import Message
from pdproxy.kit.supervisor import Supervisor, WorkerProcess

ASK, REPLY, REPORT, TELL = "ask", "reply", "report", "tell"
"""What a worker sends: a question (`number`: its own of it), an answer to one (`number`: that of the question), its report, and
what all others are to know."""
QUESTION, ASKED, ANSWER, PAST, TOLD = "question", "asked", "answer", "past", "told"
"""What the parent sends: a question, to whom a question went (`body`: `Asked`), an answer (`worker`: whose), what is left of the
workers that have ended, and what a worker tells all (`worker`: which)."""
MAX_BEHIND = 8 << 20
"""Bytes that a worker may not have read: it misses what else it would be told, and is not killed for it."""
MAX_OPEN = 256
"""Questions that are not answered by all yet. The oldest is forgotten for one more."""


class Asked(msgspec.Struct, array_like=True, frozen=True):
    """Whom a question went to, and how often workers were started again."""

    workers: tuple[int, ...]
    restarts: int


encode_asked = msgspec.msgpack.Encoder().encode
decode_asked = msgspec.msgpack.Decoder(Asked).decode


class Switchboard:
    """Passes questions and answers on. `add_up` makes one report of what is left of dead workers and of one more."""

    def __init__(self, supervisor: Supervisor, add_up: Callable[[bytes, bytes], bytes]) -> None:
        self._supervisor = supervisor
        self._add_up = add_up
        self._questions: OrderedDict[int, tuple[WorkerProcess, int | None, int]] = OrderedDict()
        """By their numbers: who asks, its process, and its own number of the question."""
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
            asked = self._questions.get(message.number)
            if asked is not None and asked[0].pid == asked[1]:  # else another process has its number now
                self._supervisor.send(asked[0], Message(ANSWER, asked[2], worker.number, message.body))
        elif message.kind == REPORT:
            self._reports[worker.number] = message.body
        elif message.kind == TELL:
            for one in self._supervisor.workers:  # also those that do not serve yet: they begin with what they are told
                if one is not worker and one.pid is not None and (one.link is None or one.link.behind < MAX_BEHIND):
                    self._supervisor.send(one, Message(TOLD, worker=worker.number, body=message.body))

    def died(self, number: int) -> None:
        """Keep the last report of a worker that has ended."""
        if (report := self._reports.pop(number, b"")) and report:
            self._past = self._add_up(self._past, report)

    def _ask(self, worker: WorkerProcess, message: Message) -> None:
        self._last += 1
        self._questions[self._last] = worker, worker.pid, message.number
        if len(self._questions) > MAX_OPEN:
            self._questions.popitem(last=False)
        others = [one for one in self._supervisor.workers if one is not worker and one.ready]
        asked = Asked(tuple(one.number for one in others), self._supervisor.restarts)
        self._supervisor.send(worker, Message(ASKED, message.number, body=encode_asked(asked)))
        if self._past:
            self._supervisor.send(worker, Message(PAST, message.number, body=self._past))
        for one in others:
            self._supervisor.send(one, Message(QUESTION, self._last, body=message.body))
