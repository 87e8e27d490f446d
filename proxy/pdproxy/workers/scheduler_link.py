"""A worker's link to the scheduler process: choices that wait for their answers, and what the
scheduler is told.

Owns the questions that are open, and the leases of this worker. What is sent within one turn of the
event loop is one message. While there is no scheduler process, or one that does not choose yet,
questions wait for a short time. The first thing that it is told is which leases this worker has.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from pdproxy.deciding.kept_turns import Reuse
from pdproxy.kit.errors import BadRequestError, OverloadedError, RefusalReason
from pdproxy.kit.frames import frames
from pdproxy.scheduling.leases import Lease
from pdproxy.scheduling.transfer_faults import KnownTransfers
from pdproxy.scheduling.turn_before import FoundTurn
from pdproxy.workers import links
from pdproxy.workers.admission_messages import (
    Enter,
    Evict,
    Granted,
    HeldPlace,
    HeldUse,
    Overdrawn,
    Reserve,
    UseKey,
)
from pdproxy.workers.item_link import ItemLink
from pdproxy.workers.links import LinkError
from pdproxy.workers.scheduler_messages import (
    Asked,
    Choice,
    Chosen,
    ChosenTurn,
    Closed,
    FromScheduler,
    FromWorker,
    Held,
    Holds,
    Refused,
    Replied,
    Said,
    TransfersKnown,
    Unwanted,
    Welcome,
    decode_of_scheduler,
    encode_item,
    error_of,
)

logger = logging.getLogger("pdproxy.workers")

PATIENCE = 2.0
"""Seconds for which questions wait for a scheduler process that is started again, from the end of
the one before.
"""
MAX_UNSENT = 1 << 20
"""Bytes that the scheduler process has not read: behind more, no question is added."""
MAX_QUESTION = 1 << 20
"""Bytes of one question, without a prompt's ids. Only a model's name can make one so long."""
TRIES = 2
"""How many scheduler processes are sent one question: one that ends them must not end more."""


Question = Choice | Enter | UseKey | Reserve | Asked
Answer = Chosen | Granted | Replied


class GivenTurn(FoundTurn, Protocol):
    """The turn before a prompt, which has come with a lease."""

    def over(self) -> None:
        """The lease ends."""


class GotTurns(Protocol):
    """The turns that this worker got with its leases, in one pool."""

    def got(self, lease: int, reuse: Reuse) -> None:
        """Note a turn that has come. `lease`: the number of its lease."""

    def ended(self, lease: int, how: str | None) -> None:
        """Tell what came of it: the value of a `TurnEnd`, None: it was not taken."""


class HeldLease(Lease):
    """A lease of this worker, with its number and its pool's. `reported`, `prompt`: what its engine
    says of its cache. `space`: tokens whose KV has space at its engine, 0: none was taken, or it is
    free again. `turn`: what has come with it, None: nothing.
    """

    number: int = 0
    pool: int = 0
    reported: int | None = None
    prompt: int = 0
    space: int = 0
    turn: GivenTurn | None = None


class _Question(msgspec.Struct, eq=False):
    """`most`: how many leases it may get; `tries`: how many scheduler processes were sent it."""

    item: bytes
    most: int
    answer: asyncio.Future[Answer]
    tries: int = 0


class SchedulerLink:
    """One per worker. `connect` gives it each scheduler process. Lives in one event loop."""

    def __init__(self) -> None:
        self._link: ItemLink[FromScheduler] | None = None
        self._is_welcome = False
        """Whether the process at the other end chooses."""
        self._next = 0
        self._open: dict[int, _Question] = {}
        self.leases: dict[int, HeldLease] = {}
        """The leases of this worker, by their numbers."""
        self.know_transfers: dict[int, Callable[[KnownTransfers], None]] = {}
        """What takes what is known of transfers, by the numbers of the pools."""
        self.turns: dict[int, GotTurns] = {}
        """Where the turns are noted that come with choices, by the numbers of the pools."""
        self.hears: dict[str, Callable[[bytes], None]] = {}
        """What takes what the scheduler process says, by its topics."""
        self.holds: dict[str, Callable[[], bytes | None]] = {}
        """By topics: what is said to each new scheduler process first, before it chooses; None is
        nothing.
        """
        self.places: Callable[[], list[HeldPlace]] = list
        """Returns the places that requests of this worker have. Set by what has them, as all these
        are.
        """
        self.uses: Callable[[], list[HeldUse]] = list
        self.evict: Callable[[Evict], None] = lambda _: None
        self.overdrawn: Callable[[Overdrawn], None] = lambda _: None
        self._do: dict[type, Callable[[Any], None]] = {
            Chosen: self._answered,
            ChosenTurn: self._answered_with_turn,
            Granted: self._answered,
            Replied: self._answered,
            Refused: self._answered,
            Welcome: self._welcome,
            TransfersKnown: self._know_transfers,
            Said: self._hear,
            Evict: lambda item: self.evict(item),
            Overdrawn: lambda item: self.overdrawn(item),
        }
        self._patience: asyncio.TimerHandle | None = None
        self._since = 0.0
        """When this began, in the event loop's seconds."""
        self._is_hopeless = False
        """Whether the next scheduler process did not come in time."""

    def __repr__(self) -> str:
        state = "no scheduler" if self._link is None else "connected"
        return f"<SchedulerLink {state}, {len(self._open)} questions, {len(self.leases)} leases>"

    # -- the process at the other end

    def connect(self, end: socket.socket) -> None:
        """Use a scheduler process from now on. `end`: of a pair of sockets."""
        if self._link is not None:
            self._link.read()  # what the one before has sent last
        self._drop_link()
        self._link = ItemLink(
            end, decode_of_scheduler, self._received, self._gone, links.MAX_UNSENT
        )
        if self._open:
            self._be_patient()
        held = [
            Held(
                one.number,
                one.pool,
                one.engine.url,
                one.role,
                one.prompt_bytes,
                one.since,
                one.space,
            )
            for one in self.leases.values()
        ]
        for topic, body_of in self.holds.items():
            if (body := body_of()) is not None:
                self.say(topic, body)
        self.tell(Holds(held, self.places(), self.uses()))
        self._link.flush()

    def _welcome(self, _: Welcome) -> None:
        """The scheduler process chooses: ask it what waits."""
        self._is_welcome, self._is_hopeless = True, False
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
            seconds = asyncio.get_running_loop().time() - self._since
            logger.info("engines are chosen again, %.3f s behind the end of a scheduler", seconds)
        assert self._link is not None
        for number, question in list(self._open.items()):
            if question.tries < TRIES:
                question.tries += 1
                self._link.say(question.item)
            else:
                self._refuse(number, "its engines could not be chosen")

    def close(self) -> None:
        """Close the link behind what was told, and refuse what waits."""
        if self._link is not None:
            self._link.flush()
        self._drop_link()
        if self._patience is not None:
            self._patience.cancel()
        self._give_up()

    def _drop_link(self) -> None:
        link, self._link, self._is_welcome = self._link, None, False
        if link is not None:
            link.close()

    def _gone(self, error: LinkError) -> None:
        logger.warning("the scheduler process is gone: %s", error)
        # What was to be said was about leases, and the next process is told which are left.
        self._drop_link()
        self._be_patient()

    def _be_patient(self) -> None:
        if self._patience is None and not self._is_hopeless:
            loop = asyncio.get_running_loop()
            self._since = loop.time()
            self._patience = loop.call_later(PATIENCE, self._give_up)

    def _give_up(self) -> None:
        self._is_hopeless, self._patience = True, None
        for number in list(self._open):
            self._refuse(number, "there is no scheduler process")

    def _refuse(self, number: int, why: str) -> None:
        question = self._open.pop(number)
        if not question.answer.done():
            question.answer.set_exception(_no_scheduler(why))

    def refuse(self, number: int, error: OverloadedError) -> None:
        """Refuse a question that waits for its answer."""
        question = self._open.pop(number, None)
        if question is not None and not question.answer.done():
            self.tell(Unwanted(number, question.most))
            question.answer.set_exception(error)

    # -- asking and telling

    def numbers(self, most: int) -> int:
        """Return the number of a new choice, which may get so many leases."""
        number = self._next
        self._next += most
        return number

    async def ask(self, item: Question, most: int, ids: int = 0) -> Answer:
        """Return what is chosen, or granted. Whoever is cancelled here gets nothing. `most`: how
        many numbers the item has; `ids`: the bytes of the prompt's ids in it.

        Raises:
            OverloadedError: it is refused, or there is no scheduler process.
            BadRequestError: what the client has sent can't be passed on.
        """
        if self._is_hopeless or (self._link is not None and self._link.unsent > MAX_UNSENT):
            raise _no_scheduler("the scheduler process does not answer")
        try:
            encoded = encode_item(item)
        except (OverflowError, UnicodeEncodeError) as error:
            raise BadRequestError(f"a field of the request can't be passed on: {error}") from None
        if len(encoded) - ids > MAX_QUESTION:
            raise BadRequestError("the name of the model is too long", param="model")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        question = _Question(encoded, most, answer)
        self._open[item.number] = question
        if self._is_welcome and self._link is not None:
            question.tries = 1
            self._link.say(encoded)
        else:
            self._be_patient()
        try:
            return await answer
        except asyncio.CancelledError:
            # the answer may have come in this turn, or be on its way
            self._open.pop(item.number, None)
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._came_in_vain(answer.result())
            self.tell(Unwanted(item.number, most))
            raise

    def tell(self, item: FromWorker) -> None:
        """Tell the scheduler process something, in the order of these calls."""
        if self._link is not None:  # the next one is told what is left
            self._link.say(encode_item(item))

    def say(self, topic: str, body: bytes) -> None:
        """Say something about a topic, in the order of these calls and those of `tell`."""
        self.tell(Said(topic, body))

    def began(self, lease: HeldLease) -> None:
        """Keep a lease of this worker, which its engine's load shows."""
        self.leases[lease.number] = lease
        lease.engine.requests += 1
        lease.engine.prompt_bytes += lease.prompt_bytes

    def end(self, lease: HeldLease, closed: Closed) -> None:
        """End a lease of this worker."""
        self.forget(lease)
        self.tell(closed)

    def forget(self, lease: HeldLease) -> None:
        """Drop a lease of this worker."""
        del self.leases[lease.number]
        lease.engine.requests -= 1
        lease.engine.prompt_bytes -= lease.prompt_bytes

    def urls(self, pool: int) -> set[str]:
        """Return the URLs of a pool's engines that this worker has leases of."""
        return {one.engine.url for one in self.leases.values() if one.pool == pool}

    # -- what comes

    def _received(self, items: list[FromScheduler]) -> None:
        for item in items:
            self._do[type(item)](item)

    def _answered(self, item: Answer | Refused) -> None:
        question = self._open.pop(item.number, None)
        if question is None or question.answer.done():
            self._came_in_vain(item)
            return
        if isinstance(item, Refused):
            question.answer.set_exception(error_of(item))
        else:
            question.answer.set_result(item)

    def _answered_with_turn(self, item: ChosenTurn) -> None:
        self.turns[item.pool].got(item.number, item.turn)
        self._answered(item)

    def _came_in_vain(self, item: Answer | Refused) -> None:
        """Process an answer whose asker has gone, and has said so."""
        if isinstance(item, ChosenTurn):
            self.turns[item.pool].ended(item.number, None)

    def _know_transfers(self, item: TransfersKnown) -> None:
        self.know_transfers[item.pool](item.known)

    def _hear(self, item: Said) -> None:
        try:
            self.hears[item.topic](item.body)
        except Exception as error:  # what comes behind it counts all the same
            logger.error("%r of the scheduler process failed: %s", item.topic, frames(error))  # noqa: TRY400


def _no_scheduler(why: str) -> OverloadedError:
    return OverloadedError(
        f"no engine can be chosen now: {why}", RefusalReason.NO_ENGINE, retry_after=PATIENCE
    )
