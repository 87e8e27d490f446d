"""The other workers, as one worker asks them: a question to all of them at once, and their answers;
and what it tells them.

Owns the worker's questions. Many clients may cause the same question: it is asked once at a time,
and all get its answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import replace

import msgspec

from pdproxy.kit.siblings import SiblingAnswers
from pdproxy.workers.links import Message
from pdproxy.workers.switchboard import (
    ANSWER,
    ASK,
    ASKED,
    LAST,
    LATE,
    PASS,
    PASSED,
    PAST,
    QUESTION,
    REPLY,
    TELL,
    TOLD,
    decode_asked,
)

PATIENCE = 1.0
"""Seconds for the answers of all others."""
SCHEDULER = "the scheduler"
"""What operators are told of the scheduler process as."""


class _Told(msgspec.Struct, array_like=True, frozen=True):
    """What a worker tells all others: `topic`: what it is about."""

    topic: str
    body: bytes


_encode_told = msgspec.msgpack.Encoder().encode
_decode_told = msgspec.msgpack.Decoder(_Told).decode


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
    """The `Siblings` of a worker. `send` sends the parent a message; `scheduler`: the number of the
    scheduler process.
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
        self.hears: dict[str, Callable[[bytes], None]] = {}
        self.is_behind: Callable[[], bool] = lambda: False
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

    def tell(self, topic: str, body: bytes) -> None:
        """See `Siblings`."""
        self._send(Message(TELL, body=_encode_told(_Told(topic, body))))

    def pass_on(self, worker: int, topic: str, body: bytes) -> bool:
        """See `Siblings`."""
        if self.is_behind():
            return False
        self._send(Message(PASS, worker=worker, body=_encode_told(_Told(topic, body))))
        return True

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
        if message.kind in (TOLD, PASSED):
            told = _decode_told(message.body)
            if (hears := self.hears.get(told.topic)) is not None:
                hears(told.body)
            return
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
