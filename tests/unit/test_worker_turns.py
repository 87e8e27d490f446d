"""Turns that several workers keep: each is given once, to any of them, whoever is stopped or
killed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.handle_hosts import HandleHosts
from pdproxy.kit.clock import Clock
from pdproxy.kit.engine_networks import USUAL
from pdproxy.observe.events import Event, Observers, TurnClaimed, TurnDropped, TurnKept
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.serving.kv import worker_turns
from pdproxy.serving.kv.kept_turns import KeptTurn, Reuse, TurnRecord
from pdproxy.serving.kv.turn_messages import is_turn
from pdproxy.serving.kv.worker_turns import CLAIMS, PATIENCE, SILENT, TOLD_AGAIN, WorkerTurns
from pdproxy.settings.limits import Deadlines
from pdproxy.transfer.turns import DecodeHandle, TurnRules, read
from pdproxy.workers.records import SharedRecords
from tests.fakes.engine_model import in_virtual_time
from tests.unit.test_kept_turns import HISTORY, LIMITS, SCOPE, node, params, text
from tests.unit.test_siblings import Parent

UNITS = 64


class Worker:
    """One worker: its engines, with runs of its own numbers, and what became of its turns."""

    def __init__(self, workers: Workers, number: int) -> None:
        self.workers, self.number = workers, number
        base = 10 * number
        self.p = node("p", Role.PREFILL, base + 1)
        self.nodes = {
            "d": node("d", Role.DECODE, base + 2),
            "e": node("e", Role.DECODE, base + 3),
            "p": self.p,
        }
        self.engines = {
            url: SimpleNamespace(in_ledger=one, url=url, kv_host=None)
            for url, one in self.nodes.items()
        }
        self.counted: Counter[str] = Counter()
        self.released: list[str] = []
        self.registry = _Registry(self.engines)
        self.turns = WorkerTurns(
            TurnRules(),
            workers.limits,
            cast("Any", None),
            cast("EngineRegistry", self.registry),
            Deadlines(),
            Observers([self]),
            Clock(now=asyncio.get_running_loop().time),
            by_notice=True,
            hosts=HandleHosts(USUAL, self.registry.get),
            number=number,
            pool=0,
            area=workers.records.area(number),
            siblings=workers.parent.all[number],
        )
        self.turns.releases = cast("Any", SimpleNamespace(release=self._release, named=set()))

    def _release(self, record: TurnRecord, handle: DecodeHandle) -> None:
        assert record.decode_run == self.nodes[record.decode].run_number
        self.released.append(handle.request_id)
        self.workers.ends[handle.request_id] += 1

    def notify(self, event: Event) -> None:
        if isinstance(event, TurnClaimed):
            self.counted[event.result] += 1
        elif isinstance(event, TurnDropped):
            self.counted[event.reason] += 1
        elif isinstance(event, TurnKept):
            self.counted["kept"] += 1

    def keep(self, name: str, *ids: int, decode: str = "d", more: int = 0) -> None:
        """Finish a turn whose ids are these."""
        handle = read(params(len(ids) - 1, name))
        assert isinstance(handle, DecodeHandle)
        record = TurnRecord(
            decode, self.nodes[decode].run_number, "p", self.p.run_number, name, "tiny", (), None, 0
        )
        key = SCOPE + text(*ids) + b"1," * more
        turn = KeptTurn(record, handle, key, len(ids) - 1, asyncio.get_running_loop().time())
        if self.turns.kept.add(turn):
            self.turns._added(turn)

    async def take(self, *ids: int) -> Reuse | None:
        """Return what a prompt may use."""
        return await self.turns.take(SCOPE + text(*ids), self.p)

    async def name(self, *ids: int) -> str | None:
        """Return the name of that turn."""
        reuse = await self.take(*ids)
        return None if reuse is None else reuse.turn.handle.request_id


class _Registry(dict[str, Any]):
    @property
    def known(self) -> dict[str, Any]:
        return self


class Workers:
    """All workers. `limits`: of each."""

    def __init__(self, count: int = 3, **limits: Any) -> None:
        self.parent = Parent(count)
        self.records = SharedRecords(count, UNITS)
        self.limits = msgspec.structs.replace(LIMITS, **limits)
        self.ends: Counter[str] = Counter()
        """How often each handle was used or released."""
        self.all = [Worker(self, number) for number in range(count)]

    def known(self) -> list[int]:
        return [len(one.turns.kept) for one in self.all]

    def left(self, number: int) -> list[bytes]:
        return [record for record in self.records.taken(number) if is_turn(record)]


async def settled() -> None:
    """Let messages come."""
    await asyncio.sleep(0.001)


NEXT = (*HISTORY, 1, 2, 3)


def test_what_one_has_kept_another_one_uses_once() -> None:
    """With its whole handle, and numbers of runs that are its own. The worker that kept it has no
    record of it any more.
    """

    async def run() -> None:
        workers = Workers()
        first, second, third = workers.all
        first.keep("a", *HISTORY)
        await settled()
        assert workers.known() == [1, 1, 1]
        assert [len(one.turns.kept.own) for one in workers.all] == [1, 0, 0]
        assert [one.turns.kept.blocks() for one in workers.all] == [{"d": 4}, {}, {}]
        reuse = await second.take(*NEXT)
        assert reuse is not None
        assert (reuse.params, reuse.tokens, reuse.prefill) == (params(59, "a"), 59, "p")
        assert (reuse.turn.record.decode_run, reuse.turn.record.prefill_run) == (12, 11)
        await settled()
        assert workers.known() == [0, 0, 0]
        assert await first.take(*NEXT) is await third.take(*NEXT) is None
        assert workers.left(0) == []
        assert [dict(one.counted) for one in workers.all] == [{"kept": 1}, {"given": 1}, {}]
        second.turns.unused(reuse)
        assert second.released == ["a"]

    in_virtual_time(run)


def test_of_two_that_want_it_one_gets_it() -> None:
    """The other one goes on with the next best, of whichever worker."""

    async def run() -> None:
        workers = Workers()
        workers.all[0].keep("a", *HISTORY)
        workers.all[0].keep("b", *HISTORY[:40])
        await settled()
        found = await asyncio.gather(
            *[one.name(*NEXT) for one in workers.all[1:]], workers.all[0].name(*range(9))
        )
        assert found == ["a", "b", None]
        assert workers.all[2].counted == {"gone": 1, "given": 1}

    in_virtual_time(run)


def test_no_prompt_asks_for_ever() -> None:
    """Where all that it continues is gone, so many workers are asked, and no more."""

    async def run() -> None:
        workers = Workers()
        for number in range(CLAIMS + 1):
            workers.all[0].keep(f"t{number}", *HISTORY)
        await settled()
        workers.all[0].turns._own.clear()  # it has lost them, and the others do not know
        assert await workers.all[1].take(*NEXT) is None
        assert workers.all[1].counted == {"gone": CLAIMS}

    in_virtual_time(run)


def test_one_that_does_not_answer_is_not_asked_again() -> None:
    """It is stopped. When it goes on, what it gives too late is released by the one that asked."""

    async def run() -> None:
        workers, loop = Workers(), asyncio.get_running_loop()
        first, second, third = workers.all
        first.keep("a", *HISTORY)
        first.keep("b", *HISTORY[:40])
        third.keep("c", *HISTORY[:30])
        await settled()
        held: list[Any] = []
        receive = workers.parent.all[0].received
        workers.parent.all[0].received = held.append  # type: ignore[method-assign, assignment]
        begin = loop.time()
        assert await second.take(*NEXT) is None
        assert PATIENCE <= loop.time() - begin <= PATIENCE + 0.06
        assert second.counted == {"late": 1}
        assert await second.name(*NEXT) == "c"
        await asyncio.sleep(SILENT)
        assert await second.take(*NEXT) is None, "it is asked again: it may have gone on"
        assert len(held) > 0
        for message in held:
            receive(message)
        await settled()
        assert second.released == ["a", "b"]
        assert second.counted == {"late": 2, "given": 1, "unused": 2}
        assert workers.known() == [0, 0, 0]

    in_virtual_time(run)


def test_late_answers_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given behind it is left to its engine's own time."""
    monkeypatch.setattr(worker_turns, "MAX_LATE", 2)

    async def run() -> None:
        workers = Workers()
        first, second, _ = workers.all
        for at, name in enumerate("abc"):
            first.keep(name, *HISTORY[: 40 - at])
        await settled()
        held: list[Any] = []
        receive = workers.parent.all[0].received
        workers.parent.all[0].received = held.append  # type: ignore[method-assign, assignment]
        for _ in range(3):
            assert await second.take(*NEXT) is None
            await asyncio.sleep(SILENT)
        assert len(second.turns._late) == 2
        for message in held:
            receive(message)
        await settled()
        assert sorted(second.released) == ["b", "c"]

    in_virtual_time(run)


@pytest.mark.parametrize("answered", [False, True])
def test_a_client_that_leaves_while_another_worker_is_asked(answered: bool) -> None:
    """What is given is released, whether the answer comes before or after."""

    async def run() -> None:
        workers = Workers()
        workers.all[0].keep("a", *HISTORY)
        await settled()
        task = asyncio.create_task(workers.all[1].take(*NEXT))
        await asyncio.sleep(0)
        if answered:
            claim, _ = next(iter(workers.all[1].turns._claims.values()))
            while not claim.done():
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await settled()
        assert workers.ends == ({"a": 1} if workers.all[1].released else {})
        assert workers.all[1].released == ["a"] or (answered and task.result())
        assert workers.known() == [0, 0, 0]
        assert not workers.all[1].turns._claims
        assert not workers.all[1].turns._late

    in_virtual_time(run)


def test_an_answer_between_a_cancellation_and_the_end_of_its_task() -> None:
    """A client leaves, and in the same pass of the event loop the turn is given: it is released,
    and forgotten.
    """

    async def run() -> None:
        workers = Workers()
        first, second, _ = workers.all
        first.keep("a", *HISTORY)
        await settled()
        held: list[Any] = []
        receive = workers.parent.all[1].received
        workers.parent.all[1].received = held.append  # type: ignore[method-assign, assignment]
        task = asyncio.create_task(second.take(*NEXT))
        while not held:
            await asyncio.sleep(0)
        task.cancel()
        for message in held:
            receive(message)
        await asyncio.wait([task])
        assert task.cancelled()
        assert second.released == ["a"]
        assert not second.turns._claims
        assert not second.turns._late

    in_virtual_time(run)


def test_kv_of_an_engine_that_was_started_again_is_not_given() -> None:
    """The worker that keeps it knows it first."""

    async def run() -> None:
        workers = Workers()
        workers.all[0].keep("a", *HISTORY)
        await settled()
        workers.all[0].engines["d"].in_ledger.run_number += 5
        assert await workers.all[1].take(*NEXT) is None
        workers.all[0].keep("b", *HISTORY, decode="e")
        await settled()
        workers.all[2].engines["e"].in_ledger.run_number += 5
        assert await workers.all[2].take(*NEXT) is None
        assert workers.all[2].counted == {}
        assert await workers.all[1].name(*NEXT) == "b"

    in_virtual_time(run)


def test_what_a_killed_worker_kept_is_released() -> None:
    """Of its pool, and not what it had given away or was using."""

    async def run() -> None:
        workers = Workers()
        first, second, third = workers.all
        for name, ids in (
            ("a", HISTORY),
            ("b", range(500, 540)),
            ("c", range(900, 930)),
            ("x", range(700, 740)),
        ):
            first.keep(name, *ids, decode="e" if name == "x" else "d")
        await settled()
        assert await second.name(*range(500, 540), 1) == "b"
        assert await first.name(*range(900, 930), 1) == "c"
        left = workers.left(0)
        del third.registry["e"]
        third.turns._pool = 1
        third.turns.adopt(left)
        assert third.released == []
        third.turns._pool = 0
        third.turns.adopt(left)
        assert third.released == ["a"]
        assert third.counted == {"worker_ended": 1}

    in_virtual_time(run)


def test_a_successor_knows_what_the_others_keep() -> None:
    """The newest, up to a bound. What the one before kept is forgotten, and the new one never gives
    it.
    """

    async def run() -> None:
        workers = Workers()
        first, second, third = workers.all
        first.keep("a", *HISTORY)
        second.keep("b", *range(500, 540))
        await settled()
        workers.all[0] = successor = Worker(workers, 0)
        assert await third.take(*NEXT) is None, "it has another process by now"
        assert third.counted == {"gone": 1}
        successor.turns.start()
        successor.keep("a2", *range(600, 640))
        await settled()
        assert [len(one.turns.kept) for one in (successor, second, third)] == [2, 2, 2]
        assert await successor.name(*range(500, 540), 1) == "b"

    in_virtual_time(run)


def test_an_answer_to_a_predecessor_is_none() -> None:
    """It has asked, and was killed: its successor's own question is another one."""

    async def run() -> None:
        workers = Workers(2)
        workers.all[0].keep("a", *HISTORY)
        workers.all[0].keep("b", *range(500, 540))
        await settled()
        answers: list[Any] = []
        receive = workers.parent.all[1].received
        workers.parent.all[1].received = answers.append  # type: ignore[method-assign, assignment]
        asked = asyncio.create_task(workers.all[1].take(*NEXT))
        await settled()
        asked.cancel()
        workers.parent.all[1].received = receive  # type: ignore[method-assign]
        workers.all[1] = successor = Worker(workers, 1)
        successor.turns.start()
        await settled()
        workers.all[0].turns._own.clear()
        claim = asyncio.create_task(successor.take(*range(500, 540), 1))
        await asyncio.sleep(0)
        for message in answers:
            workers.parent.all[1].received(message)
        assert await claim is None
        assert successor.counted == {"gone": 1}

    in_virtual_time(run)


def test_what_is_told_again_is_known_once() -> None:
    async def run() -> None:
        workers = Workers(2)
        workers.all[0].keep("a", *HISTORY)
        await settled()
        workers.all[1].turns.start()
        await settled()
        assert workers.known() == [1, 1]
        assert len(workers.all[1].turns._copies) == 1
        assert await workers.all[0].name(*NEXT) == "a"
        await settled()
        assert workers.known() == [0, 0]

    in_virtual_time(run)


def test_what_a_successor_is_told_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_turns, "TOLD_AGAIN", 3000)

    async def run() -> None:
        workers = Workers(2)
        for number in range(20):
            workers.all[1].keep(f"t{number}", *range(number * 100, number * 100 + 60))
        await settled()
        workers.all[0] = Worker(workers, 0)
        workers.all[0].turns.start()
        await settled()
        names = [one.handle.request_id for one in workers.all[0].turns.kept._by_age.values()]
        assert names == ["t19", "t18", "t17", "t16", "t15"]

    assert TOLD_AGAIN <= 8 << 20
    in_virtual_time(run)


def test_bounds_are_those_of_all() -> None:
    """The oldest of a decode engine is released, by the worker that keeps it, for a newer one of
    another worker.
    """

    async def run() -> None:
        workers = Workers(max_blocks=8)
        first, second, _ = workers.all
        first.keep("a", *HISTORY)
        first.keep("b", *range(500, 560))
        await settled()
        second.keep("c", *range(700, 760))
        await settled()
        assert first.released == ["a"]
        assert second.released == []
        assert workers.known() == [2, 2, 2]
        assert sum(one.turns.kept.blocks().get("d", 0) for one in workers.all) == 8

    in_virtual_time(run)


def test_one_that_is_too_large_stays_with_its_worker() -> None:
    async def run() -> None:
        workers = Workers(2, max_bytes=8 << 20, min_share=0)
        workers.all[0].keep("a", *HISTORY, more=1 << 19)
        await settled()
        assert workers.known() == [1, 0]
        assert await workers.all[0].name(*NEXT) == "a"

    in_virtual_time(run)


def test_a_parent_that_does_not_read_is_sent_no_more() -> None:
    """Nothing is told, and nothing given that could not be named; what is here is used here."""

    async def run() -> None:
        workers = Workers(2)
        workers.all[0].keep("a", *HISTORY)
        await settled()
        workers.parent.all[0].is_behind = lambda: True
        assert await workers.all[1].take(*NEXT) is None
        assert workers.all[1].counted == {"late": 1}
        workers.all[0].keep("b", *range(500, 540))
        await settled()
        assert workers.known() == [2, 0]
        assert await workers.all[0].name(*NEXT) == "a"

    in_virtual_time(run)


def test_an_engine_that_never_answers_is_known_to_all() -> None:
    async def run() -> None:
        workers = Workers()
        workers.all[0].keep("a", *HISTORY)
        workers.all[1].keep("b", *HISTORY)
        await settled()
        reuse = await workers.all[0].take(*NEXT)
        assert reuse is not None
        workers.all[0].turns.hung(reuse)
        await settled()
        assert [await one.take(*NEXT) for one in workers.all] == [None, None, None]
        assert all("bidirectional_kv_xfer" in one.turns.shortcomings()[0] for one in workers.all)

    in_virtual_time(run)


@pytest.mark.parametrize("seed", range(30))
def test_each_handle_ends_once_at_most(seed: int) -> None:
    """Whatever is kept, wanted, stopped, killed or dropped at random: none is given or released
    twice, or given and released.
    """
    chance = random.Random(seed)

    async def run() -> None:
        workers = Workers(3, max_blocks=24, seconds=30)
        held: dict[int, list[Any]] = {}
        tasks: set[asyncio.Task[None]] = set()
        count = 0

        def listen(number: int) -> Callable[[Any], None]:
            receive = type(workers.parent.all[0]).received

            def received(message: Any) -> None:
                if number in held:
                    held[number].append(message)
                else:
                    receive(workers.parent.all[number], message)

            return received

        for number, sibling in enumerate(workers.parent.all):
            sibling.received = listen(number)  # type: ignore[method-assign, assignment]

        async def use(worker: Worker, ids: tuple[int, ...]) -> None:
            reuse = await worker.take(*ids)
            if reuse is None:
                return
            workers.ends[reuse.turn.handle.request_id] += 1
            if chance.random() < 0.3:
                workers.ends[reuse.turn.handle.request_id] -= 1  # given back, which counts it again
                worker.turns.unused(reuse)

        for _ in range(300):
            worker = chance.choice(workers.all)
            begin = 100 * chance.randrange(4)
            ids = tuple(range(begin, begin + chance.choice((20, 40, 60))))
            what = chance.random()
            if worker.number in held and what < 0.9:
                what = 1.0  # a stopped one does nothing
            if what < 0.4:
                count += 1
                worker.keep(f"t{count}", *ids, decode=chance.choice("de"))
            elif what < 0.8:
                task = asyncio.create_task(use(worker, (*ids, 7)))
                tasks.add(task)
                if chance.random() < 0.1:
                    asyncio.get_running_loop().call_later(chance.random() / 20, task.cancel)
            elif what < 0.84 and len(held) < 2:
                held[worker.number] = []
            elif what < 0.9 and held:
                number = chance.choice(list(held))
                for message in held.pop(number):
                    workers.parent.all[number].received(message)
            elif what < 0.93:
                held.pop(worker.number, None)
                await asyncio.wait([asyncio.create_task(asyncio.sleep(0.2)), *tasks])
                left = workers.left(worker.number)
                workers.all[worker.number] = Worker(workers, worker.number)
                heir = chance.choice([one for one in workers.all if one is not worker])
                heir.turns.adopt(left)
                workers.all[worker.number].turns.start()
            await asyncio.sleep(chance.random() / 50)
        for number in list(held):
            for message in held.pop(number):
                workers.parent.all[number].received(message)
        await asyncio.wait([asyncio.create_task(asyncio.sleep(1.0)), *tasks])
        for one in workers.all:
            one.turns.kept.drop_all("shutdown")
        await settled()
        assert count > 50
        assert set(workers.ends.values()) <= {0, 1}, workers.ends
        ended = sum(workers.ends.values())
        assert ended >= 0.8 * count, "few are left to their engines' own time"
        assert workers.known() == [0, 0, 0]
        assert workers.left(0) == workers.left(1) == workers.left(2) == []

    in_virtual_time(run)
