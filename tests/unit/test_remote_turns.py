"""Finished turns that the scheduler process keeps for all workers: each is given once, and ends
once, whichever process is killed, and whenever.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdproxy.deciding.buffers import ReceiveBuffers
from pdproxy.deciding.kept_turns import Reuse
from pdproxy.deciding.local_scheduler import LocalScheduler
from pdproxy.deciding.turns import PoolTurns
from pdproxy.fleet.transfers import Transfers
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import OverloadedError
from pdproxy.observe.events import Observers, TurnDropped, TurnReused
from pdproxy.scheduling.leases import Assignment, Lease, Verdict
from pdproxy.scheduling.outliers import Outliers
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.scheduler import Constraints
from pdproxy.scheduling.turn_before import FoundTurn, TurnEnd
from pdproxy.settings.health import OutlierSettings
from pdproxy.settings.limits import Deadlines
from pdproxy.transfer.kept_turn import KeptTurn, TurnRecord, scope_of
from pdproxy.transfer.turns import DecodeHandle, TurnRules, read
from pdproxy.workers import item_link, links, remote_turns
from pdproxy.workers.pool_share import PoolMemory
from pdproxy.workers.remote_scheduler import RemoteScheduler
from pdproxy.workers.remote_turns import RemoteTurn, RemoteTurns
from pdproxy.workers.scheduler_clients import SchedulerClient
from pdproxy.workers.scheduler_link import Question, SchedulerLink
from pdproxy.workers.turn_messages import LARGEST, Kept
from pdproxy.workers.turns_of_workers import RecordedTurns, WorkersTurns
from pdproxy.workers.worker_choices import PoolChoices, serve_choices
from tests.fakes.recorder import Recorder
from tests.unit.test_kept_turns import HISTORY, LIMITS, params, text
from tests.unit.test_remote_scheduler import D2, D, P, fleet, settled

SCOPE = scope_of("m", b"")
NEXT = (*HISTORY, 1, 2, 3)
OTHER = tuple(range(500, 540))


class Process:
    """A scheduler process. `memory`: what it shares with workers, and the one before has left."""

    def __init__(self, memory: PoolMemory, ends: Counter[str], left: set[str]) -> None:
        self.engines, self.ledger = fleet()
        self.recorder = Recorder()
        observers, clock = Observers([self.recorder]), Clock(now=lambda: 2.0)
        self.turns = PoolTurns(
            TurnRules(),
            LIMITS,
            self.ledger,
            self.engines,
            Deadlines(),
            observers,
            clock,
            partial(RecordedTurns, memory.turns.area(0)),
        )
        self.ends = ends
        contacts = SimpleNamespace(add=lambda *_: None)
        release = SimpleNamespace(release=self._released, contacts=contacts)
        self.turns.releases = cast("Any", release)
        leave = self.turns._ends[TurnEnd.LEFT]

        def leaves(reuse: Reuse) -> None:
            left.add(reuse.turn.handle.request_id)
            leave(reuse)

        self.turns._ends[TurnEnd.LEFT] = leaves
        self.scheduler = LocalScheduler(
            self.ledger,
            Outliers(OutlierSettings()),
            ReceiveBuffers(self.engines, 16, clock, observers, Deadlines()),
            Transfers(self.ledger, observers, clock.now),
            observers,
            clock.now,
            None,
            None,
            self.turns,
        )
        of_workers = WorkersTurns(self.turns, self.ledger, memory.heard)
        self.pool = PoolChoices(
            self.scheduler, self.ledger, cast("Any", None), lambda: None, lambda: 2.0, of_workers
        )
        self.clients: dict[int, SchedulerClient] = {}
        of_workers.adopt(memory.turns.taken(0))

    def _released(self, record: TurnRecord, handle: DecodeHandle) -> None:
        engine = self.ledger.get(record.decode)
        if engine is not None and engine.run_number == record.decode_run:
            self.ends[handle.request_id] += 1

    def connect(self, worker: Worker) -> None:
        mine, its = links.pair()
        client = SchedulerClient(mine, lambda _: None, SchedulerClient.welcome)
        serve_choices(client, [self.pool])
        self.clients[worker.number] = client
        worker.link.connect(its)

    def killed(self) -> None:
        """What it has not sent is lost, and so is what it has not read."""
        for client in self.clients.values():
            client._is_over = True
            client._link.close()

    @property
    def drops(self) -> Counter[str]:
        """How many turns were dropped, by reason."""
        events = [one for one in self.recorder.events if isinstance(one, TurnDropped)]
        return Counter(event.reason for event in events)


class Worker:
    """A worker with its own view of the same fleet: its runs have other numbers."""

    def __init__(self, memory: PoolMemory, number: int, start: int = 0) -> None:
        self.number = number
        self.engines, self.ledger = fleet()
        for url in (P, D, D2):
            self.engines.known[url].in_ledger.run_number += 10 * (number + 1)
        self.link = SchedulerLink()
        self.turns = RemoteTurns(
            self.link, 0, self.engines, number, memory.heard, (start << 32) + 1, 100, lambda: 2.0
        )
        self.scheduler = RemoteScheduler(
            self.link,
            0,
            self.engines,
            self.ledger,
            Observers([]),
            lambda _: True,
            lambda: 2.0,
            self.turns,
        )

    def keep(self, name: str, *ids: int, decode: str = D, key: bytes | None = None) -> None:
        """Finish a turn whose ids are these."""
        handle = read(params(len(ids) - 1, name))
        assert isinstance(handle, DecodeHandle)
        record = TurnRecord(decode, self.run(decode), P, self.run(P), name, "m", (), b"x", 0)
        self.turns.keep(KeptTurn(record, handle, key or SCOPE + text(*ids), len(ids) - 1, 2.0))

    def run(self, url: str) -> int:
        return self.engines.known[url].in_ledger.run_number

    async def chosen(self, *ids: int) -> Assignment:
        """Return engines for a prompt, with the turn that it continues."""
        found = await self.scheduler.choose(
            "id", Ask("m", 100, 1.0, 25), Constraints(without=(D2,)), SCOPE + text(*ids)
        )
        assert found is not None
        return found

    async def taken(self, *ids: int) -> tuple[FoundTurn, Lease]:
        """Return the turn that a prompt continues, and its prefill engine's lease."""
        found = await self.chosen(*ids)
        self.scheduler.close(found.leases[1], Verdict.GOOD, 3.0)
        assert found.turn is not None
        assert found.turn.take()
        return found.turn, found.leases[0]

    def over(self, lease: Lease) -> None:
        self.scheduler.close(lease, Verdict.GOOD, 3.0)

    def killed(self) -> None:
        """What it has not sent is lost."""
        self.link._drop_link()


class Workers:
    """A scheduler process and its workers."""

    def __init__(self, count: int = 2) -> None:
        self.memory = PoolMemory(count + 1)
        self.ends: Counter[str] = Counter()
        """How often each handle was used or released."""
        self.left: set[str] = set()
        """Handles that a prefill engine may still read."""
        self.process = Process(self.memory, self.ends, self.left)
        self.all = [Worker(self.memory, number) for number in range(count)]
        for worker in self.all:
            self.process.connect(worker)

    def restart(self) -> None:
        """Kill the scheduler process, and start it again."""
        self.process.killed()
        self.process = Process(self.memory, self.ends, self.left)

    def connect(self) -> None:
        for worker in self.all:
            self.process.connect(worker)

    def close(self) -> None:
        for worker in self.all:
            worker.link.close()
        for client in self.process.clients.values():
            client.close()

    @property
    def kept(self) -> list[str]:
        return [one.handle.request_id for one in self.process.turns.kept._by_age.values()]

    def records(self) -> int:
        """How many turns would be released if the scheduler process was killed now."""
        return sum(1 for size in self.memory.turns._areas[0][0] if size)


@pytest.fixture
async def two():
    workers = Workers()
    yield workers
    workers.close()


async def test_what_one_has_finished_another_one_uses_once(two: Workers) -> None:
    first, second = two.all
    first.keep("a", *HISTORY)
    await settled()
    assert (two.kept, two.records()) == (["a"], 1)
    turn, lease = await second.taken(*NEXT)
    assert (turn.params, turn.tokens, turn.decode) == (params(59, "a"), 59, D)
    assert turn.is_there()
    assert (two.kept, two.records()) == ([], 0)
    assert (await first.chosen(*NEXT)).turn is None, "nobody else gets it"
    turn.end(TurnEnd.USED)
    second.over(lease)
    await settled()
    reused = [one for one in two.process.recorder.events if isinstance(one, TurnReused)]
    assert [one.tokens for one in reused] == [59]
    assert two.ends == {}
    assert second.turns._given != {}  # until something else shows that this was heard
    second.turns.freed("none", "expired")
    assert second.turns._given == {}


@pytest.mark.parametrize(
    ("how", "reason", "released"),
    [
        (TurnEnd.UNUSED, "unused", True),
        (TurnEnd.REFUSED, "failed", True),
        (TurnEnd.LEFT, "unanswered", False),
        (TurnEnd.HUNG, "unanswered", False),
    ],
)
async def test_whatever_comes_of_it_is_told(
    two: Workers, how: TurnEnd, reason: str, released: bool
) -> None:
    """As in one process."""
    two.all[0].keep("a", *HISTORY)
    two.all[0].keep("b", *HISTORY)
    turn, lease = await two.all[1].taken(*NEXT)
    turn.end(how)
    two.all[1].over(lease)
    await settled()
    assert two.process.drops == {reason: 1}
    assert sum(two.ends.values()) == released
    # one that does not answer gets no more
    found = (await two.all[0].chosen(*NEXT)).turn
    assert (found is None) == (how is TurnEnd.HUNG)


@pytest.mark.parametrize("how", ["not_taken", "cancelled", "engine_unknown"])
async def test_what_is_given_in_vain_is_kept_again(two: Workers, how: str) -> None:
    """The prompt's ids are not sent, its client has left, or the worker does not know the
    engine.
    """
    first, second = two.all
    first.keep("a", *HISTORY)
    await settled()
    if how == "not_taken":
        found = await second.chosen(*NEXT)
        assert two.kept == []
        for lease in found.leases:
            second.over(lease)
    elif how == "cancelled":
        task = asyncio.create_task(second.chosen(*NEXT))
        while two.kept:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    else:
        known = second.engines.known
        known_d = known[D]
        del known[D]
        with pytest.raises(AssertionError):
            await second.chosen(*NEXT)
        known[D] = known_d
    await settled()
    assert (two.kept, two.records(), two.ends) == (["a"], 1, {})
    turn, _ = await first.taken(*NEXT)
    assert turn.tokens == 59


async def test_a_client_that_leaves_in_the_turn_of_the_answer(
    two: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.all[0].keep("a", *HISTORY)
    await settled()
    task = asyncio.create_task(two.all[1].chosen(*NEXT))
    came = Question.came

    def answered(self: Question[Any], value: Any) -> None:
        came(self, value)
        task.cancel()

    monkeypatch.setattr(Question, "came", answered)
    await asyncio.wait([task])
    assert task.cancelled()
    await settled()
    assert (two.kept, two.ends) == (["a"], {})


async def test_a_worker_that_is_killed_while_it_uses_one(two: Workers) -> None:
    """The prefill engine may still pull: it is left to the decode engine's own time."""
    first, second = two.all
    first.keep("a", *HISTORY)
    first.keep("b", *OTHER)
    await second.taken(*NEXT)
    second.killed()
    await settled()
    assert (two.kept, two.ends, two.process.drops) == (["b"], {}, {"unanswered": 1})


async def test_a_killed_worker_s_last_turns_are_kept(
    two: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the scheduler process finds that it can't be answered before it has read them."""
    await settled()
    monkeypatch.setattr(item_link, "_READ", 64)
    first, second = two.all
    asked = asyncio.create_task(second.chosen(*NEXT))
    await asyncio.sleep(0)
    second.keep("a", *HISTORY)
    flush(second)
    second.killed()
    await settled()
    await settled()
    assert two.kept == ["a"]
    assert two.process.clients[1]._is_over
    asked.cancel()
    assert (await first.chosen(*NEXT)).turn is not None


def flush(worker: Worker) -> None:
    """Send what the worker has told."""
    assert worker.link._link is not None
    worker.link._link.flush()


# -- the scheduler process is killed


async def test_what_a_killed_scheduler_process_kept_is_released(two: Workers) -> None:
    """By its successor, and not what it had given away."""
    first, second = two.all
    first.keep("a", *HISTORY)
    second.keep("b", *OTHER)
    await settled()
    turn, lease = await second.taken(*NEXT)
    two.restart()
    assert (two.ends, two.process.drops) == ({"b": 1}, {"process_ended": 1})
    await settled()
    two.connect()
    await settled()
    assert (two.kept, two.ends, two.records()) == ([], {"b": 1}, 0)
    assert turn.is_there()
    turn.end(TurnEnd.REFUSED)
    second.over(lease)
    await settled()
    assert two.ends == {"a": 1, "b": 1}, "it knows what its workers use"


@pytest.mark.parametrize("when", ["before", "after"])
async def test_what_finishes_without_a_scheduler_process_is_told_the_next_one(
    two: Workers, when: str
) -> None:
    """Whether the worker has found out or not. What was heard is not told again."""
    first, second = two.all
    first.keep("a", *HISTORY)
    await settled()
    turn, _ = await second.taken(*NEXT)
    if when == "after":
        two.restart()
        await settled()
    first.keep("b", *OTHER)
    turn.end(TurnEnd.UNUSED)
    if when == "before":
        for worker in two.all:
            flush(worker)
        two.restart()
        await settled()
    two.connect()
    await settled()
    assert (two.kept, two.ends) == (["b"], {"a": 1})
    await first.taken(*OTHER, 1)
    two.restart()
    await settled()
    two.connect()
    await settled()
    assert (two.kept, two.ends) == ([], {"a": 1})


async def test_what_comes_of_it_is_heard_by_the_successor(two: Workers) -> None:
    """It was told to the one before, which had not read that."""
    first, second = two.all
    first.keep("a", *HISTORY)
    turn, lease = await second.taken(*NEXT)
    turn.end(TurnEnd.REFUSED)
    second.over(lease)
    flush(second)
    two.restart()
    await settled()
    assert two.ends == {}
    two.connect()
    await settled()
    assert two.ends == {"a": 1}
    assert two.process.drops == {"failed": 1}


async def test_an_answer_of_a_killed_scheduler_process_counts(two: Workers) -> None:
    """The worker finds out that it can't be told anything before it has read the answer."""
    first, second = two.all
    first.keep("a", *HISTORY)
    await settled()
    task = asyncio.create_task(second.taken(*NEXT))
    while two.kept:
        await asyncio.sleep(0)
    two.process.clients[1]._link.flush()
    link = second.link._link
    assert link is not None
    link.pause()
    two.restart()
    second.turns.freed("none", "expired")
    flush(second)
    link.resume()
    turn, _ = await task
    two.connect()
    turn.end(TurnEnd.UNUSED)
    await settled()
    assert two.ends == {"a": 1}


async def test_what_waits_for_the_next_process_is_bounded(
    two: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest turns are left to their engines' own time."""
    monkeypatch.setattr(remote_turns, "MAX_UNHEARD", 3)
    two.restart()
    await settled()
    for number in range(5):
        two.all[0].keep(f"t{number}", *range(number * 100, number * 100 + 60))
    two.connect()
    await settled()
    assert two.kept == ["t2", "t3", "t4"]


async def test_a_successor_of_a_worker_is_heard(two: Workers) -> None:
    """Its numbers are behind those of the one before."""
    two.all[0].keep("a", *HISTORY)
    await settled()
    two.all[0].killed()
    two.all[0] = Worker(two.memory, 0, start=2)
    two.process.connect(two.all[0])
    two.all[0].keep("b", *OTHER)
    await settled()
    assert two.kept == ["a", "b"]


# -- what is told of turns


async def test_runs_that_are_over_are_known(two: Workers) -> None:
    """To the worker or to the scheduler process: none of their turns is given or released."""
    first, second = two.all
    first.keep("a", *HISTORY)
    first.keep("b", *OTHER)
    first.engines.known[D].in_ledger.run_number += 1
    first.turns.dropped(
        TurnRecord(D, first.run(D) - 1, P, 0, "c", "m", (), None, 0),
        cast("DecodeHandle", read(params(20, "c"))),
        "abandoned",
    )
    await settled()
    turn, _ = await second.taken(*NEXT)
    second.engines.known[D].in_ledger.run_number += 1
    assert not turn.is_there()
    two.process.engines.known[D].in_ledger.run_number += 1
    assert (await second.chosen(*OTHER, 1)).turn is None
    await settled()
    assert two.process.drops == {"abandoned": 1, "restarted": 1}
    assert two.ends == {}


async def test_blocks_that_their_engine_has_freed(two: Workers) -> None:
    two.all[0].keep("a", *HISTORY)
    two.all[1].turns.freed("a", "expired")
    await settled()
    assert (two.kept, two.process.drops) == ([], {"expired": 1})


async def test_open_turns_of_all_workers_take_space(two: Workers) -> None:
    """A worker that has ended has none."""
    two.all[0].keep("a", *HISTORY)
    await settled()
    assert len(two.kept) == 1
    for worker in two.all:
        worker.turns.leave_space(LIMITS.max_bytes // 2 - 1)
    await settled()
    assert len(two.kept) == 1, "a small change is not told"
    for worker in two.all:
        worker.turns.leave_space(remote_turns.STEP)
    await settled()
    assert two.process.drops == {"evicted": 1}
    for worker in two.all:
        worker.killed()
    await settled()
    assert two.process.turns._open == {}


async def test_what_is_too_long_is_not_sent(two: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn is released; a prompt is asked for without its ids."""
    first, second = two.all
    first.keep("a", *HISTORY, key=SCOPE + b"1," * (LARGEST // 2))
    first.keep("b", *HISTORY)
    await settled()
    assert two.process.drops == {"too_long": 1}
    assert two.ends == {"a": 1}
    ids: list[object] = []
    ask = SchedulerLink.ask

    async def asked(self: SchedulerLink, *args: Any) -> Any:
        ids.append(args[-1])
        return await ask(self, *args)

    monkeypatch.setattr(SchedulerLink, "ask", asked)
    long = (*HISTORY, *range(1000, 1000 + LARGEST // 5))
    assert (await second.chosen(*long)).turn is None
    assert (await second.scheduler.choose("id", Ask("m", 100, 1.0, 25))) is not None
    assert ids == [None, None]
    # as long as a prompt's ids may be: a model's name counts by itself
    assert (await second.chosen(*HISTORY, *[1] * (LARGEST // 2 - 200))).turn is not None


async def test_how_long_prefills_take_is_told(two: Workers) -> None:
    found = await two.all[0].chosen(*NEXT)
    two.all[0].scheduler.prefilled(found.leases[0], 100, 2.0)
    await settled()
    run = two.process.engines.known[P].in_ledger.run_number
    assert two.process.turns.speeds.seconds(run, 10) == pytest.approx(0.2)


# -- at random


@pytest.mark.parametrize("killed", ["workers", "scheduler", "both"])
@pytest.mark.parametrize("seed", range(12))
async def test_each_handle_ends_once(seed: int, killed: str) -> None:
    """Whatever is kept, wanted, cancelled or killed at random: none is used or released twice. Only
    those in the hands of a killed worker are left to their engines' own time, and of a killed
    scheduler process those that nobody waits for any more.
    """
    chance = random.Random(seed)
    workers = Workers(3)
    count = kills = 0
    left: set[str] = set()
    """Handles that a killed worker had."""
    tasks: list[tuple[Worker, asyncio.Task[None]]] = []

    async def use(worker: Worker, ids: tuple[int, ...]) -> None:
        try:
            found = await worker.chosen(*ids)
        except OverloadedError:
            return  # under two scheduler processes that were killed
        how = None
        try:
            if (turn := found.turn) is not None and chance.random() < 0.7:
                assert turn.take()
                how = TurnEnd.UNUSED
                await asyncio.sleep(chance.random() / 500)
                how = chance.choice([TurnEnd.USED, TurnEnd.UNUSED, TurnEnd.REFUSED])
        finally:
            if worker in workers.all:
                if turn is not None and how is not None:
                    if how is TurnEnd.USED:
                        workers.ends[name_of(turn)] += 1
                    turn.end(how)
                for lease in found.leases:
                    worker.over(lease)

    for step in range(400):
        worker = chance.choice(workers.all)
        begin = 100 * chance.randrange(4)
        ids = tuple(range(begin, begin + chance.choice((20, 40, 60))))
        what = chance.random()
        if what < 0.45:
            count += 1
            worker.keep(f"t{count}", *ids)
        elif what < 0.9:
            task = asyncio.create_task(use(worker, (*ids, 7)))
            tasks.append((worker, task))
            if chance.random() < 0.2:
                asyncio.get_running_loop().call_later(chance.random() / 500, task.cancel)
        elif killed == "workers" or (killed == "both" and what < 0.95):
            kills += 1
            news = [one for _, one in worker.turns._unheard]
            left |= {one.turn.handle.request_id for one in news if isinstance(one, Kept)}
            left |= {one.turn.handle.request_id for one in worker.turns._given.values()}
            worker.killed()
            workers.all[worker.number] = Worker(workers.memory, worker.number, start=step + 1)
            for one, task in tasks:
                if one is worker:
                    task.cancel()
            workers.process.connect(workers.all[worker.number])
        else:
            kills += 1
            workers.restart()
            if chance.random() < 0.5:
                await asyncio.sleep(chance.random() / 200)
            workers.connect()
        for _ in range(chance.randrange(6)):
            await asyncio.sleep(0)
    await asyncio.wait([task for _, task in tasks])
    await settled()
    workers.process.turns.kept.drop_all("shutdown")
    assert count > 100
    assert kills > 20
    assert set(workers.ends.values()) == {1}, workers.ends
    assert workers.records() == 0
    lost = {f"t{number}" for number in range(1, count + 1)} - workers.ends.keys()
    assert lost <= left | workers.left
    workers.close()


def name_of(turn: FoundTurn) -> str:
    assert isinstance(turn, RemoteTurn)
    return turn._reuse.turn.handle.request_id
