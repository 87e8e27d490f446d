"""The scheduler process's side of the links to workers: it chooses for them, and is told what their
legs show.

Owns the leases of each worker, by their numbers, and the choices that wait. When a worker has
ended, all of them are ended: they show nothing of their engines. A worker that sends what is no
item, or more than any worker can have open, is not listened to any more.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec

from pdproxy.app.capacity import PoolCapacity
from pdproxy.deciding.buffers import ReceiveBuffers
from pdproxy.deciding.local_scheduler import LocalScheduler
from pdproxy.kit.errors import OverloadedError, RefusalReason
from pdproxy.kit.frames import frames
from pdproxy.scheduling.leases import NEUTRAL, Assignment, Lease, Space
from pdproxy.scheduling.ledger import Ledger
from pdproxy.workers.admitted_worker import AdmissionOfAll, AdmittedWorker
from pdproxy.workers.item_link import ItemLink
from pdproxy.workers.links import LinkError
from pdproxy.workers.scheduler_messages import (
    Asked,
    Began,
    Choice,
    Choose,
    ChooseEncoders,
    ChooseOne,
    ChooseTurn,
    Chosen,
    ChosenTurn,
    Closed,
    Failed,
    FoundGone,
    FromScheduler,
    FromWorker,
    Held,
    Holds,
    KvFailed,
    KvLoaded,
    KvNotMade,
    KvTook,
    Leased,
    LostModel,
    OfTurn,
    Prefilled,
    RefusesMore,
    RefusesReports,
    Replied,
    Said,
    SpaceFree,
    TransfersKnown,
    Unwanted,
    Welcome,
    decode_of_worker,
    encode_item,
    refused,
)
from pdproxy.workers.turns_of_workers import TurnsOfWorker, WorkersTurns

logger = logging.getLogger("pdproxy.workers")

MAX_OPEN = 1 << 17
"""Leases, choices, places and uses of keys that one worker may have open."""
MAX_UNREAD = 32 << 20
"""Bytes that a worker has not read. One that reads still less is not listened to any more."""
AT_ONCE = 64
"""Items of one worker that are done before others have their turn."""
COUNTED = 1000
"""Items behind which it is looked how much a worker has open."""


class PoolChoices(msgspec.Struct, frozen=True, eq=False):
    """What chooses the engines of one pool, and what else is told of them. `capacity`: returns what
    bounds its requests, None if nothing does; `now`: monotonic seconds. `turns`: those that are
    kept, None where none are.
    """

    scheduler: LocalScheduler
    ledger: Ledger
    buffers: ReceiveBuffers
    capacity: Callable[[], PoolCapacity | None]
    now: Callable[[], float]
    turns: WorkersTurns | None = None


Hears = Callable[["SchedulerClient", bytes], None]
"""Takes what a worker has said."""
Answers = Callable[["SchedulerClient", int, bytes], Awaitable[bytes]]
"""Returns the answer to a question of a worker, which has this number. Raises OverloadedError.
Cancelled when the worker has ended, or does not wait for the answer any more.
"""


class SchedulerClient:
    """One worker. `end`: of a pair of sockets; `pools`: those of the proxy, in their order.

    `lost`: called when nothing more comes from it; `said`: when it has said what it has, which is
    before it asks: it does so behind `welcome`. `hears`, `answers`: what takes what it says, and
    what answers what it asks, by topics. `of_all`: what gives its requests places, if this does.
    """

    def __init__(
        self,
        end: socket.socket,
        pools: Sequence[PoolChoices],
        lost: Callable[[SchedulerClient], None],
        said: Callable[[SchedulerClient], None],
        hears: Mapping[str, Hears] = MappingProxyType({}),
        answers: Mapping[str, Answers] = MappingProxyType({}),
        of_all: AdmissionOfAll | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._pools = pools
        self._lost, self._said, self._hears, self._asked = lost, said, hears, answers
        self._leases: dict[int, tuple[PoolChoices, Lease]] = {}
        self._spaces: dict[int, Space] = {}
        self._choosing: dict[int, asyncio.Task[None]] = {}
        self.turns = TurnsOfWorker(lambda pool: self._pool(pool).turns)
        self._held_back: list[FromWorker] = []
        """Items that came behind `AT_ONCE` others."""
        self._uncounted = 0
        """Items that came since it was looked how much the worker has open."""
        self._transfers: set[int] = set()
        """Pools of whose transfers the worker is told in the next turn."""
        self._is_over = False
        self.has_said = False
        """Whether it has said what it has."""
        self._do: dict[type, Callable[[Any], None]] = {
            Choose: self._choose,
            ChooseTurn: self._choose,
            ChooseOne: self._choose,
            ChooseEncoders: self._choose,
            Unwanted: self._unwanted,
            Began: self._began,
            Closed: self._closed,
            Failed: self._failed,
            KvTook: self._kv_took,
            KvFailed: self._kv_failed,
            KvNotMade: self._kv_not_made,
            KvLoaded: self._kv_loaded,
            Prefilled: self._prefilled,
            OfTurn: self._of_turn,
            RefusesReports: self._refuses_reports,
            LostModel: self._lost_model,
            FoundGone: self._found_gone,
            RefusesMore: self._refuses_more,
            SpaceFree: self._space_free,
            Said: self._heard,
            Asked: self._question,
            Holds: self._holds,
        }
        self._admitted: AdmittedWorker | None = None
        if of_all is not None:
            self._admitted = AdmittedWorker(of_all, self._answer, self._refuse)
            self._do |= self._admitted.do
        self._link = ItemLink(end, decode_of_worker, self._received, self._end, MAX_UNREAD)
        for pool in range(len(pools)):
            self.know_transfers(pool)

    def __repr__(self) -> str:
        return f"<SchedulerClient {len(self._leases)} leases, {len(self._choosing)} choices wait>"

    @property
    def leases(self) -> int:
        """How many leases the worker has."""
        return len(self._leases)

    @property
    def is_behind(self) -> bool:
        """Whether the worker has not read what it was sent."""
        return self._link.unsent > 0

    def welcome(self) -> None:
        """Have the worker ask from now on."""
        self._answer(Welcome())

    @property
    def unread(self) -> int:
        """How many bytes the worker has not read, about: those that wait here."""
        return self._link.unsent

    def say(self, topic: str, body: bytes) -> None:
        """Say something about a topic."""
        self._answer(Said(topic, body))

    @property
    def unsent(self) -> int:
        """How many bytes wait until the worker reads."""
        return self._link.unsent

    # -- the link

    def _received(self, items: list[FromWorker]) -> None:
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

    def _work(self, items: list[FromWorker]) -> None:
        for item in items:
            try:
                self._do[type(item)](item)
            except LinkError as error:
                self._end(error)
                return
            except Exception as error:  # a policy's, for example: other requests go on
                name = type(item).__name__
                logger.error("%s of a worker failed in pdproxy itself: %s", name, frames(error))  # noqa: TRY400
        self._uncounted += len(items)
        if self._uncounted > COUNTED:
            self._uncounted = 0
            held = 0 if self._admitted is None else len(self._admitted)
            if len(self._leases) + len(self._choosing) + held > MAX_OPEN:
                self._end(LinkError(f"a worker has more than {MAX_OPEN} leases and places"))

    def _answer(self, answer: FromScheduler) -> None:
        self._link.say(encode_item(answer))

    def _refuse(self, number: int, error: OverloadedError) -> None:
        self._answer(refused(number, error))

    def know_transfers(self, pool: int) -> None:
        """Tell the worker what is known of a pool's transfers, which has changed: once per turn."""
        if not self._transfers:
            self._loop.call_soon(self._tell_transfers)
        self._transfers.add(pool)

    def _tell_transfers(self) -> None:
        for pool in self._transfers:
            self._answer(TransfersKnown(pool, self._pools[pool].ledger.transfers.known()))
        self._transfers.clear()

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
        for task in self._choosing.values():
            task.cancel()
        self.turns.close()
        for number in list(self._leases):
            self._give_up(number)
        for space in self._spaces.values():
            space.release()
        self._spaces.clear()
        if self._admitted is not None:
            self._admitted.close()

    # -- choices

    def _choose(self, item: Choice) -> None:
        pool = self._pool(item.pool)
        if not pool.scheduler.waits:
            try:
                self._choice(item, pool).send(
                    None
                )  # without a task, which would cost more than the choice
            except StopIteration:
                return
            except OverloadedError as error:
                self._answer(refused(item.number, error))
                return
            except Exception:
                self._answer(refused(item.number, _failed()))
                raise
        task = self._loop.create_task(self._wait(item, pool), name="choose")
        self._choosing[item.number] = task
        task.add_done_callback(partial(self._over, item.number))

    def _over(self, number: int, _: asyncio.Task[None]) -> None:
        self._choosing.pop(number, None)

    async def _wait(self, item: Choice, pool: PoolChoices) -> None:
        try:
            await self._choice(item, pool)
        except OverloadedError as error:
            self._answer(refused(item.number, error))
        except Exception:
            self._answer(refused(item.number, _failed()))
            raise

    async def _choice(self, item: Choice, pool: PoolChoices) -> None:
        """Choose, and answer. Raises OverloadedError."""
        scheduler = pool.scheduler
        if isinstance(item, Choose):
            if (beginning := item.ask.beginning) is not None:
                scheduler.measure(beginning)
            turn = item.turn if isinstance(item, ChooseTurn) else None
            found = await scheduler.choose(item.request_id, item.ask, item.constraints, turn)
            if found is None:
                self._answer(Chosen(item.number, []))
                return
            if found.space is not None:
                self._spaces[item.number + len(found.leases) - 1] = found.space
            self._leased(item.number, pool, found.leases, found)
        elif isinstance(item, ChooseOne):
            one = await scheduler.choose_one(item.ask, item.without, item.avoid)
            self._leased(item.number, pool, [] if one is None else [one])
        else:
            leases = await scheduler.choose_encoders(item.asks, item.without, proven=item.proven)
            self._leased(item.number, pool, leases)

    def _leased(
        self,
        number: int,
        pool: PoolChoices,
        leases: Sequence[Lease],
        found: Assignment | None = None,
    ) -> None:
        told: list[Leased] = []
        for at, lease in enumerate(leases, number):
            self._leases[at] = pool, lease
            engine = lease.engine
            engine.lend(1, lease.prompt_bytes)
            one = Leased(
                engine.url,
                lease.role,
                lease.prompt_bytes,
                lease.since,
                lease.trial,
                lease.expected,
                lease.reports,
                lease.beside_idle,
            )
            told.append(one)
        chosen = Chosen(number, told)
        if found is not None:
            has_space, turn = found.space is not None, None
            if found.turn is not None:
                turn = self.turns.give(number, pool.turns, found)
            chosen = Chosen(number, told, found.reason, found.values, has_space)
            if turn is not None:
                chosen = ChosenTurn(
                    number,
                    told,
                    found.reason,
                    found.values,
                    has_space,
                    pool=self._pools.index(pool),
                    turn=turn,
                )
        try:
            self._answer(chosen)
        except Exception:  # what somebody's own placement gives may be none that can be sent
            for at in range(number, number + len(told)):
                self._give_up(at)
            self.turns.back(number)
            raise

    def _unwanted(self, item: Unwanted) -> None:
        task = self._choosing.pop(item.number, None)
        if task is not None:
            task.cancel()
        for number in range(item.number, item.number + min(item.most, MAX_OPEN)):
            self._give_up(number)
        if self._admitted is not None:
            self._admitted.unwanted(item.number)

    def _give_up(self, number: int) -> None:
        if (found := self._take(number)) is not None:
            pool, lease = found
            pool.scheduler.close(lease, NEUTRAL, pool.now())
        if (space := self._spaces.pop(number, None)) is not None:
            space.release()

    def _take(self, number: int) -> tuple[PoolChoices, Lease] | None:
        """Take a lease from the worker, None if it has none of this number."""
        found = self._leases.pop(number, None)
        if found is not None:
            lease = found[1]
            lease.engine.lend(-1, -lease.prompt_bytes)
        return found

    # -- what legs show

    def _began(self, item: Began) -> None:
        if (found := self._leases.get(item.lease)) is not None:
            found[0].scheduler.began(found[1], item.at)

    def _closed(self, item: Closed) -> None:
        found = self._take(item.lease)
        if found is None:
            return  # of a scheduler process that was before
        pool, lease = found
        if item.reported is not None:
            pool.scheduler.cached(lease, item.reported, item.prompt)
        pool.scheduler.close(
            lease,
            item.verdict,
            item.at,
            pace=item.pace,
            tokens=item.tokens,
            beside=item.beside,
        )

    def _space_free(self, item: SpaceFree) -> None:
        if (space := self._spaces.pop(item.lease, None)) is not None:
            space.release()

    def _failed(self, item: Failed) -> None:
        pool = self._pool(item.pool)
        engine = pool.ledger.get(item.url)
        if engine is not None:
            lease = Lease(engine, item.role, 0, closed=True, trial=item.trial)
            pool.scheduler.failed(lease, item.at)

    def _kv_took(self, item: KvTook) -> None:
        scheduler = self._pool(item.pool).scheduler
        scheduler.kv_took(item.prefill, item.decode, item.at, item.seconds)

    def _kv_failed(self, item: KvFailed) -> None:
        scheduler = self._pool(item.pool).scheduler
        scheduler.kv_failed(item.prefill, item.decode, item.at, first=item.first)

    def _kv_not_made(self, item: KvNotMade) -> None:
        self._pool(item.pool).scheduler.kv_not_made(item.prefill, item.at)

    def _kv_loaded(self, item: KvLoaded) -> None:
        self._pool(item.pool).scheduler.kv_loaded(item.prefill, item.decode, item.since)

    def _prefilled(self, item: Prefilled) -> None:
        if (found := self._leases.get(item.lease)) is not None:
            found[0].scheduler.prefilled(found[1], item.tokens, item.seconds)

    def _of_turn(self, item: OfTurn) -> None:
        self.turns.told(item.pool, item.worker, item.number, item.news)

    def _refuses_reports(self, item: RefusesReports) -> None:
        self._pool(item.pool).scheduler.refuses_reports(item.url)

    def _lost_model(self, item: LostModel) -> None:
        self._pool(item.pool).scheduler.lost_model(item.url, item.model)

    def _found_gone(self, item: FoundGone) -> None:
        self._pool(item.pool).scheduler.found_gone(item.url, item.why, item.at)

    def _refuses_more(self, item: RefusesMore) -> None:
        if (capacity := self._pool(item.pool).capacity()) is not None:
            capacity.refused(item.url)

    def _heard(self, item: Said) -> None:
        self._hears[item.topic](self, item.body)

    def _question(self, item: Asked) -> None:
        task = self._loop.create_task(self._reply(item), name="answer a worker")
        self._choosing[item.number] = task
        task.add_done_callback(partial(self._over, item.number))

    async def _reply(self, item: Asked) -> None:
        try:
            body = await self._asked[item.topic](self, item.number, item.body)
        except OverloadedError as error:
            self._answer(refused(item.number, error))
        except Exception:
            self._answer(refused(item.number, _failed()))
            raise
        else:
            self._answer(Replied(item.number, body))

    def _pool(self, number: int) -> PoolChoices:
        if not 0 <= number < len(self._pools):
            raise LinkError(f"there is no pool {number}")
        return self._pools[number]

    # -- what it has of a scheduler process that was before

    def _holds(self, item: Holds) -> None:
        for held in item.leases:
            self._restore(held)
        if self._admitted is not None:
            self._admitted.restore(item.places, item.uses)
        self.has_said = True
        self._said(self)

    def _restore(self, held: Held) -> None:
        pool = self._pool(held.pool)
        lease = pool.ledger.restore(held.url, held.role, held.prompt_bytes, held.since)
        if lease is None:
            return  # its engine was removed
        self._leases[held.number] = pool, lease
        lease.engine.lend(1, lease.prompt_bytes)
        if held.space:
            buffers = pool.buffers
            self._spaces[held.number] = buffers.take(held.url, buffers.chunks(held.space))


def _failed() -> OverloadedError:
    return OverloadedError("choosing engines failed in pdproxy itself", RefusalReason.NO_ENGINE)
