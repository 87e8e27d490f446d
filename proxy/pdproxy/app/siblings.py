"""The other workers, as one worker asks them: a question to all of them at once, and their answers.

Owns the worker's questions. Many clients may cause the same question: it is asked once at a time, and all get its answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from pdproxy.kit.links import Message
from pdproxy.kit.switchboard import ANSWER, ASK, ASKED, PAST, QUESTION, REPLY, decode_asked

PATIENCE = 1.0
"""Seconds for the answers of all others."""


@dataclass(slots=True)
class Answers:
    """What the others have answered, by their numbers. `silent`: those that did not in time."""

    of: dict[int, bytes] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)
    past: bytes = b""
    """What is left of workers that have ended."""
    restarts: int = 0


class _Open:
    """A question that is not answered by all."""

    def __init__(self) -> None:
        self.found = Answers()
        self.asked: set[int] | None = None
        self.done = asyncio.Event()

    def look(self) -> None:
        if self.asked is not None and self.asked <= self.found.of.keys():
            self.done.set()


class Siblings:
    """`send` sends the parent a message. `answers`: how this worker answers the others' questions, by their names.

    `answers_about`: the same for questions that say what they are about, behind their name and a space.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self.answers: dict[str, Callable[[], bytes]] = {}
        self.answers_about: dict[str, Callable[[str], bytes]] = {}
        self._last = 0
        self._open: dict[int, _Open] = {}
        self._asking: dict[str, asyncio.Task[Answers]] = {}

    def __repr__(self) -> str:
        return f"<Siblings: {len(self._open)} questions>"

    def send(self, message: Message) -> None:
        """Send the parent a message."""
        self._send(message)

    async def ask(self, question: str) -> Answers:
        """Return what the others answer, within a second."""
        task = self._asking.get(question)
        if task is None:
            task = self._asking[question] = asyncio.create_task(self._ask(question), name=f"ask for {question}")
            task.add_done_callback(lambda _: self._asking.pop(question, None))
        return await asyncio.shield(task)

    async def _ask(self, question: str) -> Answers:
        self._last += 1
        number = self._last
        one = self._open[number] = _Open()
        self._send(Message(ASK, number, body=question.encode()))
        try:
            async with asyncio.timeout(PATIENCE):
                await one.done.wait()
        except TimeoutError:
            one.found.silent = sorted((one.asked or set()) - one.found.of.keys())
        finally:
            del self._open[number]
        return one.found

    def received(self, message: Message) -> None:
        """Process a message that the parent passes on."""
        if message.kind == QUESTION:
            self._answer(message)
            return
        one = self._open.get(message.number)
        if one is None:
            return  # it came too late
        if message.kind == ASKED:
            asked = decode_asked(message.body)
            one.asked, one.found.restarts = set(asked.workers), asked.restarts
        elif message.kind == PAST:
            one.found.past = message.body
        elif message.kind == ANSWER:
            one.found.of[message.worker] = message.body
        one.look()

    def _answer(self, question: Message) -> None:
        text = question.body.decode(errors="replace")
        name, _, about = text.partition(" ")
        if (answer := self.answers.get(text)) is not None:
            self._send(Message(REPLY, question.number, body=answer()))
        elif (answer_about := self.answers_about.get(name)) is not None:
            self._send(Message(REPLY, question.number, body=answer_about(about)))
