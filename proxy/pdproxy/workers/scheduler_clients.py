"""The scheduler process's side of the links to workers.

Owns the questions of each worker that wait. When a worker has ended, all that it has is ended. A
worker that sends what is no item, or has more than any worker can have, is not listened to any
more.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from types import CoroutineType
from typing import Any, Concatenate, ParamSpec, Protocol

from pdproxy.kit.errors import OverloadedError, RefusalReason
from pdproxy.kit.frames import frames
from pdproxy.workers.calls import (
    CALLS,
    Call,
    Refused,
    Reply,
    decoder,
    encode_item,
    methods_of,
    refused,
    told,
)
from pdproxy.workers.item_link import ItemLink
from pdproxy.workers.links import LinkError

logger = logging.getLogger("pdproxy.workers")

MAX_OPEN = 1 << 17
"""Leases, choices, places and uses of keys that one worker may have open."""
MAX_UNREAD = 32 << 20
"""Bytes that a worker has not read. One that reads still less is not listened to any more."""
AT_ONCE = 64
"""Items of one worker that are done before others have their turn."""
COUNTED = 1000
"""Items behind which it is looked how much a worker has open."""

P = ParamSpec("P")


class AtWorker(Protocol):
    """What a worker is told of its link."""

    @told
    def welcome(self) -> None:
        """The scheduler process knows the engines, and what workers have: from now on it
        chooses.
        """


class Holder:
    """What holds something of one worker, by the numbers of the worker's questions."""

    def __len__(self) -> int:
        """How much it holds, of what a worker may have only so many."""
        return 0

    def unwanted(self, number: int, *, is_sent: bool) -> None:
        """End what this question has got: nobody waits for it any more. `is_sent`: its answer may
        be on its way.
        """

    def close(self) -> None:
        """End all of it: the worker has ended."""


_Served = tuple[Callable[[Call], Any], Callable[[int, Any], Reply] | None]
"""What does a call, and what makes its answer, None where it has none."""


class SchedulerClient:
    """One worker. `end`: of a pair of sockets. `greet`: each is called once this is made.

    `lost`: called when nothing more comes from it; `said`: when it has said what it has, which is
    before it asks: it does so behind `welcome`.
    """

    def __init__(
        self,
        end: socket.socket,
        lost: Callable[[SchedulerClient], None],
        said: Callable[[SchedulerClient], None],
        greet: Iterable[Callable[[SchedulerClient], object]] = (),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._lost, self._said = lost, said
        self._do: dict[type, dict[int, _Served]] = {}
        self._holders: list[Holder] = []
        self._waiting: dict[int, asyncio.Task[None]] = {}
        """By numbers: questions that are not answered yet."""
        self._held_back: list[Call | Reply | Refused] = []
        """Items that came behind `AT_ONCE` others."""
        self._uncounted = 0
        """Items that came since it was looked how much the worker has open."""
        self._is_over = False
        self.has_said = False
        """Whether it has said what it has."""
        self._link = ItemLink(end, decoder(), self._received, self._end, MAX_UNREAD)
        self.serve(SchedulerClient, self)
        for one in greet:
            one(self)

    def __repr__(self) -> str:
        return f"<SchedulerClient {self._holders!r}, {len(self._waiting)} questions wait>"

    def serve(self, owner: type, target: object, on: int = 0) -> None:
        """Have the worker call the methods of `owner` on `target`. `on`: as in `Call`."""
        for method in methods_of(owner):
            self._do.setdefault(method.types[0], {})[on] = method.runs(target), method.reply

    def hold(self, holder: Holder) -> None:
        """Count what a holder has, and end it with the worker."""
        self._holders.append(holder)

    # -- telling

    @property
    def unsent(self) -> int:
        """How many bytes wait until the worker reads."""
        return self._link.unsent

    def tell(
        self,
        method: Callable[Concatenate[Any, P], object],
        on: int,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Call a method in the worker, in the order of these calls. `on`: as in `Call`."""
        self._link.say(encode_item(CALLS[method](on, *args, **kwargs)))

    def send(self, item: bytes) -> None:
        """Send a call that is encoded already: several workers are sent the same one."""
        self._link.say(item)

    def welcome(self) -> None:
        """Have the worker ask from now on."""
        self.tell(AtWorker.welcome, 0)

    # -- the link

    def look(self) -> None:
        """Notice whether the worker has ended."""
        self._link.look()

    def _received(self, items: list[Call | Reply | Refused]) -> None:
        if len(items) <= AT_ONCE:
            self._work(items)
            return
        # nothing more is read before these are done
        self._link.pause()
        self._held_back = items
        self._go_on()

    def _go_on(self) -> None:
        """Do more of what was held back."""
        if self._is_over:
            return
        items, self._held_back = self._held_back[:AT_ONCE], self._held_back[AT_ONCE:]
        self._work(items)
        if self._held_back:
            self._loop.call_soon(self._go_on)
        elif not self._is_over:
            self._link.resume()

    def _work(self, items: list[Call | Reply | Refused]) -> None:
        for item in items:
            try:
                self._called(item)
            except LinkError as error:
                self._end(error)
                return
            except Exception as error:  # a policy's, for example: other requests go on
                name = type(item).__name__
                logger.error("%s of a worker failed in pdproxy itself: %s", name, frames(error))  # noqa: TRY400
        self._uncounted += len(items)
        if self._uncounted > COUNTED:
            self._uncounted = 0
            if len(self._waiting) + sum(map(len, self._holders)) > MAX_OPEN:
                self._end(LinkError(f"a worker has more than {MAX_OPEN} leases and places"))

    def _called(self, item: Any) -> None:  # noqa: ANN401 - a class of its own for each method
        try:
            run, reply = self._do[type(item)][item.on]
        except KeyError:
            raise LinkError(f"no {type(item).__name__} is served") from None
        if reply is None:
            run(item)
            return
        number: int = item.number
        try:
            found = run(item)
            if type(found) is not CoroutineType:
                self._answer(reply, number, found)
                return
        except OverloadedError as error:
            self._refuse(number, error)
            return
        except Exception:
            self._refuse(number, _failed())
            raise
        task = self._loop.create_task(self._wait(reply, number, found), name="answer a worker")
        self._waiting[number] = task
        task.add_done_callback(partial(self._over, number, found))

    async def _wait(
        self,
        reply: Callable[[int, Any], Reply],
        number: int,
        found: Coroutine[Any, Any, object],
    ) -> None:
        try:
            self._answer(reply, number, await found)
        except OverloadedError as error:
            self._refuse(number, error)
        except Exception:
            self._refuse(number, _failed())
            raise

    def _over(self, number: int, found: Coroutine[Any, Any, object], _: asyncio.Task[None]) -> None:
        found.close()  # a task that was cancelled before its first step has not awaited it
        self._waiting.pop(number, None)

    def _answer(self, reply: Callable[[int, Any], Reply], number: int, value: object) -> None:
        try:
            self._link.say(encode_item(reply(number, value)))
        except Exception:  # what somebody's own placement gives may be none that can be sent
            self._give_up(number, is_sent=False)
            raise

    def _refuse(self, number: int, error: OverloadedError) -> None:
        self._link.say(encode_item(refused(number, error)))

    def _end(self, error: LinkError) -> None:
        """The worker has ended, or is not listened to any more."""
        if not self._is_over:
            logger.info("a worker asks for no more engines: %s", error)
            self.close()
            self._lost(self)

    def close(self) -> None:
        """End all that the worker has."""
        if self._is_over:
            return
        self._is_over = True
        self._link.close()
        for task in self._waiting.values():
            task.cancel()
        for holder in self._holders:
            holder.close()

    def _give_up(self, number: int, *, is_sent: bool) -> None:
        for holder in self._holders:
            holder.unwanted(number, is_sent=is_sent)

    # -- what the worker calls

    @told
    def unwanted(self, number: int) -> None:
        """Nobody waits for the answer to a question any more."""
        task = self._waiting.pop(number, None)
        if task is not None and not task.done():
            task.cancel()
            self._refuse(number, _unwanted())  # every question is answered once
        self._give_up(number, is_sent=True)

    @told
    def ready(self) -> None:
        """It has said what it has."""
        self.has_said = True
        self._said(self)


def _unwanted() -> OverloadedError:
    return OverloadedError("nobody waits for this answer", RefusalReason.NO_ENGINE)


def _failed() -> OverloadedError:
    return OverloadedError("choosing engines failed in pdproxy itself", RefusalReason.NO_ENGINE)
