"""A worker's link to the scheduler process.

Owns the questions that are open. What is sent within one turn of the event loop is one message.
While there is no scheduler process, or one that does not choose yet, questions wait for a short
time. A new one is first told what this worker has of the one before.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from pdproxy.kit.errors import BadRequestError, OverloadedError, RefusalReason
from pdproxy.kit.frames import frames
from pdproxy.workers import links
from pdproxy.workers.calls import (
    CALLS,
    Answer,
    Call,
    Refused,
    Reply,
    decoder,
    encode_item,
    error_of,
    methods_of,
)
from pdproxy.workers.item_link import ItemLink
from pdproxy.workers.links import LinkError
from pdproxy.workers.publisher import Publisher, Subscribed
from pdproxy.workers.scheduler_clients import AtWorker, SchedulerClient
from pdproxy.workers.subscriber import Subscriber

logger = logging.getLogger("pdproxy.workers")

PATIENCE = 2.0
"""Seconds for which questions wait for a scheduler process that is started again, from the end of
the one before.
"""
MAX_UNSENT = 1 << 20
"""Bytes that the scheduler process has not read: behind more, no question is added."""
MAX_QUESTION = 1 << 20
"""Bytes of one question, without a prompt's ids. Only a model's name can make one so long."""
ALONE = 0.5
"""Seconds without a link behind which another one is asked for: one to the next scheduler process
comes sooner. One that lives may have ended the link, because this worker did not read.
"""
TRIES = 2
"""How many scheduler processes are sent one question: one that ends them must not end more."""

P = ParamSpec("P")
R = TypeVar("R")


class Question(Generic[R]):
    """A question with this number. `ids`: the bytes of a prompt's ids in it. `arrived`: called with
    its answer as that comes; `vain`: behind that, if the asker has gone.
    """

    __slots__ = ("answer", "arrived", "ids", "item", "number", "tries", "vain")

    def __init__(self, number: int) -> None:
        self.number = number
        self.ids = 0
        self.arrived: Callable[[R], None] | None = None
        self.vain: Callable[[], None] | None = None
        self.item = b""
        self.tries = 0
        """How many scheduler processes were sent it."""
        self.answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()

    def came(self, value: R) -> None:
        """Take the answer."""
        if self.arrived is not None:
            self.arrived(value)
        if not self.answer.done():
            self.answer.set_result(value)
        else:
            self.missed()

    def missed(self) -> None:
        """Nobody gets the answer that has come."""
        if self.vain is not None:
            self.vain()

    def fail(self, error: OverloadedError) -> None:
        """End it in an error."""
        if not self.answer.done():
            self.answer.set_exception(error)


class SchedulerLink:
    """One per worker. `connect` gives it each scheduler process. Lives in one event loop."""

    def __init__(self) -> None:
        self._link: ItemLink[Call | Reply | Refused] | None = None
        self._is_welcome = False
        """Whether the process at the other end chooses, and was sent all open questions."""
        self._next = 0
        self._open: dict[int, Question[Any]] = {}
        """Until they are answered, also those whose askers have gone."""
        self._do: dict[tuple[type, int], Callable[[Call], Any]] = {}
        self.begins: list[Callable[[], None]] = []
        """What tells each new scheduler process what this worker has, before that chooses."""
        self.subscriber = Subscriber()
        """The topics that this worker follows."""
        self._patience: asyncio.TimerHandle | None = None
        self._since = 0.0
        """When this began, in the event loop's seconds."""
        self.alone: Callable[[], None] = lambda: None
        """Asks for another link."""
        self._alone: asyncio.TimerHandle | None = None
        self._is_hopeless = False
        """Whether the next scheduler process did not come in time."""
        self.serve(AtWorker, self)
        self.serve(Subscribed, self.subscriber)

    def __repr__(self) -> str:
        state = "no scheduler" if self._link is None else "connected"
        return f"<SchedulerLink {state}, {len(self._open)} questions>"

    def serve(self, owner: type, target: object, on: int = 0) -> None:
        """Have the scheduler process call the methods of `owner` on `target`. `on`: as in
        `Call`.
        """
        for method in methods_of(owner):
            self._do[method.types[0], on] = method.runs(target)

    # -- the process at the other end

    def connect(self, end: socket.socket) -> None:
        """Use a scheduler process from now on. `end`: of a pair of sockets."""
        if self._link is not None:
            self._link.read()  # what the one before has sent last
        self._drop_link()
        if self._alone is not None:
            self._alone.cancel()
        self._link = ItemLink(end, decoder(), self._received, self._gone, links.MAX_UNSENT)
        if self._open:
            self._be_patient()
        for name, values in self.subscriber.connected():
            self.tell(Publisher.restore, 0, name, values)
        for begin in self.begins:
            begin()
        self.tell(SchedulerClient.ready, 0)
        self._link.flush()

    def welcome(self) -> None:
        """See `AtWorker`. Ask the scheduler process what waits."""
        self._is_welcome, self._is_hopeless = True, False
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
            seconds = asyncio.get_running_loop().time() - self._since
            logger.info("engines are chosen again, %.3f s behind the end of a scheduler", seconds)
        assert self._link is not None
        for question in list(self._open.values()):
            if question.tries < TRIES:
                question.tries += 1
                self._link.say(question.item)
            else:
                self._fail(question, _no_scheduler("its engines could not be chosen"))

    def close(self) -> None:
        """Close the link behind what was told, and refuse what waits."""
        if self._link is not None:
            self._link.flush()
        self._drop_link()
        for timer in (self._patience, self._alone):
            if timer is not None:
                timer.cancel()
        self._give_up()

    def look(self) -> None:
        """Notice whether the scheduler process has ended."""
        if self._link is not None:
            self._link.look()

    def _drop_link(self) -> None:
        link, self._link, self._is_welcome = self._link, None, False
        if link is not None:
            link.close()
        self._open = {n: one for n, one in self._open.items() if not one.answer.done()}

    def _gone(self, error: LinkError) -> None:
        if self._link is None:
            return
        logger.warning("the scheduler process is gone: %s", error)
        # What was to be said was about leases, and the next process is told which are left.
        self._drop_link()
        self._be_patient()
        self._alone = asyncio.get_running_loop().call_later(ALONE, self.alone)

    def _be_patient(self) -> None:
        if self._patience is None and not self._is_hopeless:
            loop = asyncio.get_running_loop()
            self._since = loop.time()
            self._patience = loop.call_later(PATIENCE, self._give_up)

    def _give_up(self) -> None:
        self._is_hopeless, self._patience = True, None
        for question in list(self._open.values()):
            self._fail(question, _no_scheduler("there is no scheduler process"))

    def _fail(self, question: Question[Any], error: OverloadedError) -> None:
        del self._open[question.number]
        question.fail(error)

    # -- asking and telling

    def numbers(self, most: int) -> int:
        """Return the number of a new question, which may get so many leases."""
        number = self._next
        self._next += most
        return number

    def question(self) -> Question[Any]:
        """Return a new question without anything special."""
        return Question(self.numbers(1))

    async def ask(
        self,
        question: Question[R],
        method: Callable[Concatenate[Any, int, P], Answer[R]],
        on: int,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call a method in the scheduler process, and return its answer. Whoever is cancelled here
        gets nothing. `on`: as in `Call`.

        Raises:
            OverloadedError: it is refused, or there is no scheduler process.
            BadRequestError: what the client has sent can't be passed on.
        """
        if self._is_hopeless or (self._link is not None and self._link.unsent > MAX_UNSENT):
            raise _no_scheduler("the scheduler process does not answer")
        try:
            item = encode_item(CALLS[method](on, question.number, *args, **kwargs))
        except (OverflowError, UnicodeEncodeError) as error:
            raise BadRequestError(f"a field of the request can't be passed on: {error}") from None
        if len(item) - question.ids > MAX_QUESTION:
            raise BadRequestError("the name of the model is too long", param="model")
        question.item = item
        self._open[question.number] = question
        if self._is_welcome and self._link is not None:
            question.tries = 1
            self._link.say(item)
        else:
            self._be_patient()
        answer = question.answer
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                question.missed()  # the answer has come in this turn
            self._left(question)
            raise

    def refuse(self, number: int, error: OverloadedError) -> None:
        """Refuse a question that waits for its answer."""
        if (question := self._open.get(number)) is not None:
            question.fail(error)
            self._left(question)

    def _left(self, question: Question[Any]) -> None:
        """Nobody waits for an answer any more, which may be on its way."""
        if not self._is_welcome:
            self._open.pop(question.number, None)
        self.tell(SchedulerClient.unwanted, 0, question.number)

    def tell(
        self,
        method: Callable[Concatenate[Any, P], object],
        on: int,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Call a method in the scheduler process, in the order of these calls. `on`: as in
        `Call`.
        """
        if self._link is not None:  # the next one is told what is left
            self._link.say(encode_item(CALLS[method](on, *args, **kwargs)))

    # -- what comes

    def _received(self, items: list[Call | Reply | Refused]) -> None:
        for item in items:
            if isinstance(item, Call):
                self._called(item)
            elif (question := self._open.pop(item.number, None)) is None:
                continue
            elif isinstance(item, Refused):
                question.fail(error_of(item))
            else:
                question.came(item.value)

    def _called(self, item: Call) -> None:
        try:
            self._do[type(item), item.on](item)
        except Exception as error:  # what comes behind it counts all the same
            name = type(item).__name__
            logger.error("%s of the scheduler process failed: %s", name, frames(error))  # noqa: TRY400


def _no_scheduler(why: str) -> OverloadedError:
    return OverloadedError(
        f"no engine can be chosen now: {why}", RefusalReason.NO_ENGINE, retry_after=PATIENCE
    )
