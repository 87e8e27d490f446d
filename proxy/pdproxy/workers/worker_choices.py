"""The engines that one worker has, in the scheduler process: it chooses them for the worker, and is
told what their legs show.

Owns the worker's leases, by their numbers. A choice has the number of its question, which the
worker never uses twice; its leases have that number and the ones behind it. When the worker has
ended they are ended: they show nothing of their engines.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from pdproxy.app.capacity import PoolCapacity
from pdproxy.deciding.buffers import ReceiveBuffers
from pdproxy.deciding.kept_turns import Reuse
from pdproxy.deciding.local_scheduler import LocalScheduler
from pdproxy.observe.weighed import Weighed
from pdproxy.scheduling.leases import NEUTRAL, Assignment, Lease, Space, Verdict
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.placement import NotYetError
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.prefix.keys import PromptKeys
from pdproxy.scheduling.prefix.prompts import PromptBeginning
from pdproxy.scheduling.scheduler import Constraints, Scheduler
from pdproxy.workers.calls import Answer, asked, plain, told
from pdproxy.workers.scheduler_clients import Holder, SchedulerClient
from pdproxy.workers.turns_of_workers import TurnsOfWorker, WorkersTurns

for _method in (
    Scheduler.kv_took,
    Scheduler.kv_failed,
    Scheduler.kv_not_made,
    Scheduler.kv_loaded,
    Scheduler.refuses_reports,
    Scheduler.lost_model,
    Scheduler.found_gone,
):
    told(_method)


def _plain_beginning(beginning: PromptBeginning) -> object:
    keys = beginning.keys
    return beginning.tokens, beginning.unit, beginning.of_text, keys.unit, keys.all()


_beginning = tuple[int, int, bool, int, list[int]]


def _beginning_of(value: object) -> PromptBeginning:
    tokens, unit, of_text, size, keys = msgspec.convert(value, _beginning)
    return PromptBeginning(PromptKeys(size, iter([keys])), tokens, unit, of_text=of_text)


plain(PromptBeginning, _plain_beginning, _beginning_of)
T = TypeVar("T")


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


class Leased(msgspec.Struct, array_like=True):
    """A lease, as the worker gets it. `expected`: whether anything is known of its engine's cache;
    `reports`: whether the engine is asked to report what it finds there. `beside_idle`: see
    `scheduling.leases.Lease`.
    """

    url: str
    role: Role
    prompt_bytes: int
    since: float
    trial: int
    expected: bool
    reports: bool
    beside_idle: bool


class Chosen(msgspec.Struct, array_like=True):
    """The leases of a choice, none where there are no engines. `space`: whether space for KV was
    taken with them. `turn`: the turn before the prompt, None if none was found.
    """

    leases: Sequence[Leased]
    reason: str = ""
    weighed: Weighed | None = None
    space: bool = False
    turn: Reuse | None = None


class Held(msgspec.Struct, array_like=True):
    """A lease that the worker has of a scheduler process that was before. `number`: its own;
    `space`: the tokens whose KV has space, 0 where none was taken.
    """

    number: int
    url: str
    role: Role
    prompt_bytes: int
    since: float
    space: int


class LeasesOfWorker(Holder):
    """Those of all pools."""

    def __init__(self) -> None:
        self._leases: dict[int, tuple[PoolChoices, Lease, int]] = {}
        """Each with the number of its question."""
        self._spaces: dict[int, Space] = {}

    def __repr__(self) -> str:
        return f"<LeasesOfWorker {len(self._leases)}>"

    def __len__(self) -> int:
        return len(self._leases)

    def take(self, pool: PoolChoices, lease: Lease, number: int, question: int) -> None:
        """Have one more lease."""
        self._leases[number] = pool, lease, question
        lease.engine.lend(1, lease.prompt_bytes)

    def take_space(self, number: int, space: Space) -> None:
        """Have the space that was taken with a lease."""
        self._spaces[number] = space

    def unwanted(self, number: int, *, is_sent: bool) -> None:
        """See `Holder`."""
        at = number
        while (found := self._leases.get(at)) is not None and found[2] == number:
            self._give_up(at)
            at += 1

    def close(self) -> None:
        """See `Holder`."""
        for number in list(self._leases):
            self._give_up(number)
        for space in self._spaces.values():
            space.release()
        self._spaces.clear()

    def _give_up(self, number: int) -> None:
        if (found := self._drop(number)) is not None:
            pool, lease, _ = found
            pool.scheduler.close(lease, NEUTRAL, pool.now())
        self.space_free(number)

    def _drop(self, number: int) -> tuple[PoolChoices, Lease, int] | None:
        found = self._leases.pop(number, None)
        if found is not None:
            lease = found[1]
            lease.engine.lend(-1, -lease.prompt_bytes)
        return found

    # -- what the worker calls

    @told
    def began(self, lease: int, at: float) -> None:
        """See `Scheduler`."""
        if (found := self._leases.get(lease)) is not None:
            found[0].scheduler.began(found[1], at)

    @told
    def prefilled(self, lease: int, tokens: int, seconds: float) -> None:
        """See `Scheduler`."""
        if (found := self._leases.get(lease)) is not None:
            found[0].scheduler.prefilled(found[1], tokens, seconds)

    @told
    def closed(
        self,
        lease: int,
        verdict: Verdict,
        at: float,
        pace: float | None,
        tokens: int | None,
        beside: int,
        prompt: int | None,
        cached: int | None,
    ) -> None:
        """See `Scheduler.close`, and `Scheduler.counted` for the last two."""
        found = self._drop(lease)
        if found is None:
            return  # of a scheduler process that was before
        pool, own, _ = found
        scheduler = pool.scheduler
        if prompt is not None:
            scheduler.counted(own, prompt, cached)
        scheduler.close(own, verdict, at, pace=pace, tokens=tokens, beside=beside)

    @told
    def space_free(self, lease: int) -> None:
        """The space that was taken with a lease is free."""
        if (space := self._spaces.pop(lease, None)) is not None:
            space.release()


class ChoicesOfWorker:
    """What the worker asks for in a pool. `turns`: those that it gets with leases, None where none
    are kept.
    """

    def __init__(
        self, pool: PoolChoices, leases: LeasesOfWorker, turns: TurnsOfWorker | None
    ) -> None:
        self._pool = pool
        self._leases = leases
        self._turns = turns

    def __repr__(self) -> str:
        return f"<ChoicesOfWorker {self._pool.scheduler!r}>"

    @asked
    def choose(
        self,
        number: int,
        request_id: str,
        ask: Ask,
        constraints: Constraints,
        turn: bytes | None,
    ) -> Answer[Chosen]:
        """See `Scheduler`."""
        scheduler = self._pool.scheduler
        if (beginning := ask.beginning) is not None:
            scheduler.measure(beginning)
        if scheduler.waits:
            choice = scheduler.choose(request_id, ask, constraints, turn)
            return self._chosen_later(number, choice)
        try:
            now = _at_once(scheduler.choose_now(request_id, ask, constraints, turn))
        except NotYetError as later:
            choice = scheduler.choose_later(request_id, ask, constraints, turn, later)
            return self._chosen_later(number, choice)
        return self._chosen(number, now)

    async def _chosen_later(
        self, number: int, choice: Coroutine[Any, Any, Assignment | None]
    ) -> Chosen:
        return self._chosen(number, await choice)

    def _chosen(self, number: int, found: Assignment | None) -> Chosen:
        if found is None:
            return Chosen([])
        if found.space is not None:
            self._leases.take_space(number + len(found.leases) - 1, found.space)
        leases, turn = self._leased(number, found.leases), None
        if found.turn is not None and self._turns is not None:
            turn = self._turns.give(number, found.turn)
        return Chosen(leases, found.reason, found.weighed, found.space is not None, turn)

    @asked
    def choose_one(
        self, number: int, ask: Ask, without: Sequence[str], avoid: Sequence[str]
    ) -> Answer[Chosen]:
        """See `Scheduler`."""
        found = _at_once(self._pool.scheduler.choose_one(ask, without, avoid))
        return Chosen(self._leased(number, [] if found is None else [found]))

    @asked
    def choose_encoders(
        self, number: int, asks: Sequence[Ask], without: Sequence[str], *, proven: bool
    ) -> Answer[Chosen]:
        """See `Scheduler`."""
        found = _at_once(self._pool.scheduler.choose_encoders(asks, without, proven=proven))
        return Chosen(self._leased(number, found))

    def _leased(self, number: int, leases: Sequence[Lease]) -> list[Leased]:
        told: list[Leased] = []
        for at, lease in enumerate(leases, number):
            self._leases.take(self._pool, lease, at, number)
            one = Leased(
                lease.engine.url,
                lease.role,
                lease.prompt_bytes,
                lease.since,
                lease.trial,
                lease.expected,
                lease.reports,
                lease.beside_idle,
            )
            told.append(one)
        return told

    @told
    def failed(self, url: str, role: Role, trial: int, at: float) -> None:
        """See `Scheduler`. The lease is closed, and all of it is told."""
        if (engine := self._pool.ledger.get(url)) is not None:
            lease = Lease(engine, role, 0, closed=True, trial=trial)
            self._pool.scheduler.failed(lease, at)

    @told
    def refused_more(self, url: str) -> None:
        """An engine has refused a request since it has too many."""
        if (capacity := self._pool.capacity()) is not None:
            capacity.refused(url)

    @told
    def restore(self, leases: Sequence[Held]) -> None:
        """Take over leases that the worker has of a scheduler process that was before."""
        pool = self._pool
        for held in leases:
            lease = pool.ledger.restore(held.url, held.role, held.prompt_bytes, held.since)
            if lease is None:
                continue  # its engine was removed
            self._leases.take(pool, lease, held.number, held.number)
            if held.space:
                buffers = pool.buffers
                space = buffers.take(held.url, buffers.chunks(held.space))
                self._leases.take_space(held.number, space)


def serve_choices(client: SchedulerClient, pools: Sequence[PoolChoices]) -> LeasesOfWorker:
    """Have a worker choose engines in these pools, which have this order. Return its leases."""
    leases = LeasesOfWorker()
    client.hold(leases)
    client.serve(LeasesOfWorker, leases)
    for at, pool in enumerate(pools):
        turns = None if pool.turns is None else TurnsOfWorker(pool.turns)
        if turns is not None:
            client.hold(turns)
            client.serve(TurnsOfWorker, turns, at)
        client.serve(ChoicesOfWorker, ChoicesOfWorker(pool, leases, turns), at)
        client.serve(Scheduler, pool.scheduler, at)
    return leases


def _at_once(choice: Coroutine[Any, Any, T]) -> T:
    """Return what is chosen without waiting. A task would cost more than the choice."""
    try:
        choice.send(None)
    except StopIteration as done:
        found: T = done.value
        return found
    raise AssertionError("this choice waits")
