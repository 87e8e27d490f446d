"""The other workers, as one worker asks them: a question to all of them at once, and their answers.

Owns the worker's questions. Many clients may cause the same question: it is asked once at a time,
and all get its answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace

from pdproxy.workers.links import Message
from pdproxy.workers.switchboard import (
    ANSWER,
    ASK,
    ASKED,
    LAST,
    LATE,
    PAST,
    QUESTION,
    REPLY,
    decode_asked,
)

PATIENCE = 1.0
"""Seconds for the answers of all others."""
SCHEDULER = "the scheduler"
"""What operators are told of the scheduler process as."""


@dataclass(slots=True)
class SiblingAnswers:
    """What the others have answered, by their numbers. `silent`: those that did not in time, or
    have ended meanwhile.
    """

    of: dict[int, bytes] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)
    last: dict[int, bytes] = field(default_factory=dict)
    """The last reports of the silent ones, empty where there was none."""
    complete: bool = True
    """Whether the parent has answered: without that nothing is known of the others."""
    past: bytes = b""
    """What is left of workers that have ended."""
    restarts: int = 0
    scheduler_restarts: int = 0
    absent: tuple[int, ...] = ()
    """Processes that were not asked: they have ended, or begin."""


class _Open:
    """A question that is not answered by all."""

    def __init__(self) -> None:
        self.found = SiblingAnswers()
        self.asked: set[int] | None = None
        self.done = asyncio.Event()

    def look(self) -> None:
        if self.asked is not None and self.asked <= self.found.of.keys() | self.found.last.keys():
            self.done.set()


class LinkedSiblings:
    """The others of a worker. `send` sends the parent a message; `scheduler`: the number of the
    scheduler process. `answers`: how this process answers their questions, by their names.

    `answers_about`: the same for questions that say what they are about, behind their name and a
    space.
    """

    def __init__(self, send: Callable[[Message], None], scheduler: int | None = None) -> None:
        self._send = send
        self.scheduler = scheduler
        self.answers: dict[str, Callable[[], bytes]] = {}
        self.answers_in_turns: dict[str, Callable[[], Coroutine[None, None, bytes]]] = {}
        """How this process answers what takes long to put together: in many turns of the event
        loop.
        """
        self.answers_about: dict[str, Callable[[str], bytes]] = {}
        self._last = 0
        self._open: dict[int, _Open] = {}
        self._asking: dict[str, asyncio.Task[SiblingAnswers]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Siblings: {len(self._open)} questions>"

    def named(self, number: int) -> str:
        """Return how operators are told of a process."""
        return SCHEDULER if number == self.scheduler else f"worker {number}"

    async def ask_workers(self, question: str) -> SiblingAnswers:
        """Do as `ask`, without the scheduler process: it serves no requests."""
        found = await self.ask(question)
        number = self.scheduler
        return replace(
            found,
            of={key: one for key, one in found.of.items() if key != number},
            silent=[one for one in found.silent if one != number],
        )

    def send(self, message: Message) -> None:
        """Send the parent a message."""
        self._send(message)

    async def ask(self, question: str) -> SiblingAnswers:
        """Return what the others answer, within a second, and one more for the last reports of
        those that do not.
        """
        task = self._asking.get(question)
        if task is None:
            task = self._asking[question] = asyncio.create_task(
                self._ask(question), name=f"ask for {question}"
            )
            task.add_done_callback(lambda _: self._asking.pop(question, None))
        return await asyncio.shield(task)

    async def _ask(self, question: str) -> SiblingAnswers:
        self._last += 1
        number = self._last
        one = self._open[number] = _Open()
        self._send(Message(ASK, number, body=question.encode()))
        try:
            if not await _waited(one.done):
                self._send(Message(LATE, number))
                await _waited(one.done)
        finally:
            del self._open[number]
        one.found.silent = sorted((one.asked or set()) - one.found.of.keys())
        one.found.complete = one.done.is_set()
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
            one.asked = set(asked.workers)
            one.found.restarts, one.found.absent = asked.restarts, asked.absent
            one.found.scheduler_restarts = asked.scheduler_restarts
        elif message.kind == PAST:
            one.found.past = message.body
        elif message.kind == ANSWER:
            one.found.of[message.worker] = message.body
        elif message.kind == LAST:
            one.found.last[message.worker] = message.body
        one.look()

    def _answer(self, question: Message) -> None:
        text = question.body.decode(errors="replace")
        name, _, about = text.partition(" ")
        if (answer := self.answers.get(text)) is not None:
            self._send(Message(REPLY, question.number, body=answer()))
        elif (in_turns := self.answers_in_turns.get(text)) is not None:
            # one for each process that asks: none of them asks the same twice at a time
            task = asyncio.create_task(
                self._reply(question.number, in_turns()), name=f"answer {text}"
            )
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif (answer_about := self.answers_about.get(name)) is not None:
            self._send(Message(REPLY, question.number, body=answer_about(about)))

    async def _reply(self, number: int, answer: Coroutine[None, None, bytes]) -> None:
        self._send(Message(REPLY, number, body=await answer))


async def _waited(done: asyncio.Event) -> bool:
    """Return whether it is set in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            await done.wait()
    return done.is_set()
