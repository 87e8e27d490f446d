"""What is lost under requests of several workers, and who of them is tried again: counted once, as
in one process, whatever ends on either side.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdproxy.deciding.comebacks import Comebacks
from pdproxy.deciding.engines_lost import FORGETS_EVERY, EnginesLost
from pdproxy.deciding.retry_budget import RetryBudget
from pdproxy.deciding.retry_slots import RetrySlots
from pdproxy.deciding.suspects import KEPT
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.errors import EnginesLostError, OverloadedError
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import EngineLost, Observers
from pdproxy.scheduling.leases import Lease
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, LedgerEngine, Role
from pdproxy.scheduling.losses import SOON
from pdproxy.serving.dispatch.resources import LegHeaders
from pdproxy.settings.limits import Deadlines, Limits
from pdproxy.workers import links, scheduler_clients
from pdproxy.workers.loss_clients import LossesOfPool, LossesOfWorker, decide_losses
from pdproxy.workers.remote_losses import RemoteLosses
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks
from tests.fakes.clock import ManualClock
from tests.fakes.recorder import Recorder
from tests.fakes.registry import registry, unused_client

URLS = [f"http://e:{number}" for number in range(5)]
ONE, OTHER = b"1" * 16, b"2" * 16


def fleet() -> tuple[EngineRegistry, Ledger]:
    engines, ledger = registry()
    for url in URLS:
        engines.add(EngineSpec(url, Role.AGGREGATED), unused_client(url))
        ledger.mark_up(url, Evidence(frozenset({"m"}), "1", 16, (), 0, 1.0))
    return engines, ledger


class Deciding:
    """A scheduler process. Engines whose health is asked for answer once `tells`, and those in
    `dead` answer that they are gone.
    """

    def __init__(self, clock: ManualClock, workers: int) -> None:
        self.engines, self.ledger = fleet()
        self.recorder = Recorder()
        observers, limits = Observers([self.recorder]), Limits(min_retries=1, max_inflight=100)
        self.dead: set[str] = set()
        self.tells = asyncio.Event()
        self.tells.set()
        self.lost = EnginesLost(
            lambda *_: None,
            self.engines,
            self._is_alive,
            observers,
            TaskOwner("tests"),
            clock,
            clock.now,
            limits,
        )
        self.budget = RetryBudget(limits, Deadlines(), lambda: 0, clock)
        self.comebacks = Comebacks(self.ledger, clock, observers, limits)
        self.links = SchedulerLinks(chooses=True, workers=workers)
        slots = RetrySlots(self.budget, self.lost, Deadlines())
        decide_losses(self.links, 0, LossesOfPool(self.ledger, self.lost, slots, self.comebacks))
        self.links.start()
        self.links.choose()

    async def _is_alive(self, url: str) -> bool:
        await self.tells.wait()
        return url not in self.dead

    @property
    def losses(self) -> list[int]:
        """Of each engine that was lost, how many its fingerprint had lost."""
        return [event.losses for event in self.recorder.of(EngineLost)]

    def has(self) -> list[tuple[int, int, int]]:
        """How many requests, slots and turns each worker has."""
        every = [one for client in self.links.clients for one in client._holders]
        return [
            (len(one._requests), len(one._slots), len(one._turns))
            for one in every
            if isinstance(one, LossesOfWorker)
        ]


class Worker:
    """A worker with its own view of the same fleet."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.engines, self.ledger = fleet()
        self.link = SchedulerLink()
        self.losses = RemoteLosses(self.link, 0, self.engines, clock.now)

    def connect(self, deciding: Deciding) -> None:
        mine, its = links.pair()
        deciding.links.connect(mine)
        self.link.connect(its)

    def engine(self, number: int) -> LedgerEngine:
        return self.engines.known[URLS[number]].in_ledger

    def broke(self, sender: LegHeaders, number: int) -> None:
        """A leg that was sent just now has broken."""
        engine = self.engine(number)
        assert self.losses.broke(sender, engine, self._clock.now(), streamed=False)


class Several:
    """A scheduler process, and two workers."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.all = [Worker(self.clock) for _ in range(2)]
        self.start()

    def start(self) -> Deciding:
        """Start a scheduler process."""
        self.deciding = Deciding(self.clock, len(self.all))
        for worker in self.all:
            worker.connect(self.deciding)
        return self.deciding

    async def lose(
        self, worker: Worker, sender: LegHeaders, number: int, fingerprint: bytes = ONE
    ) -> EnginesLostError | None:
        """Lose an engine under a request."""
        self.deciding.dead.add(URLS[number])
        worker.broke(sender, number)
        return await worker.losses.judge(sender, fingerprint)


@asynccontextmanager
async def several() -> AsyncIterator[Several]:
    made = Several()
    await settled()
    yield made
    for worker in made.all:
        worker.link.close()
    made.deciding.links.stop()


async def settled() -> None:
    """Let all that was sent arrive."""
    for _ in range(20):
        await asyncio.sleep(0)


def sender(client: str = "a") -> LegHeaders:
    return LegHeaders("id", "/v1/completions", (), (), client=client)


async def test_places_for_retries_are_those_of_all_workers() -> None:
    """One waits for the place of another worker's request. Who leaves while it waits, or as its
    place is on its way, keeps none.
    """
    async with several() as s:
        one, other = s.all
        slot = await one.losses.slot(sender())
        assert slot is not None
        waiting, leaves = [asyncio.ensure_future(other.losses.slot(sender())) for _ in range(2)]
        await settled()
        assert (s.deciding.budget.running, s.deciding.budget.waiting) == (1, 2)
        leaves.cancel()
        await settled()
        assert s.deciding.budget.waiting == 1
        slot.leave()
        slot.leave()
        second = await waiting
        assert second is not None
        assert s.deciding.has() == [(0, 0, 0), (0, 1, 0)]
        late = asyncio.ensure_future(one.losses.slot(sender()))
        await settled()
        second.leave()
        while not s.deciding.has()[0][1]:
            await asyncio.sleep(0)
        late.cancel()
        await settled()
        assert (s.deciding.budget.running, s.deciding.has()) == (0, [(0, 0, 0)] * 2)


async def test_places_are_kept_where_the_scheduler_process_ends() -> None:
    """The next one is told which are taken, and is asked again by those that wait."""
    async with several() as s:
        one, other = s.all
        slot = await one.losses.slot(sender())
        waiting = asyncio.ensure_future(other.losses.slot(sender()))
        await settled()
        s.deciding.links.stop()
        await settled()
        s.start()
        await settled()
        assert (s.deciding.budget.running, s.deciding.budget.waiting) == (1, 1)
        assert slot is not None
        slot.leave()
        assert await waiting is not None


async def test_what_a_dead_worker_had_is_free() -> None:
    """Its place, and its turn a moment later."""
    async with several() as s:
        one, other = s.all
        await s.lose(one, sender(), 0)
        assert await one.losses.turn(sender(), ONE, 9.0) is not None
        assert await one.losses.slot(sender()) is not None
        turn = asyncio.ensure_future(other.losses.turn(sender("b"), ONE, 9.0))
        slot = asyncio.ensure_future(other.losses.slot(sender("b")))
        await settled()
        assert not turn.done()
        assert not slot.done()
        one.link.close()
        assert await slot is not None
        await settled()
        assert not turn.done()
        await s.clock.advance(SOON + 0.1)
        assert await turn is not None


async def test_engines_of_all_workers_count_for_one_fingerprint() -> None:
    """Each worker is told which requests are suspects, and that one was answered."""
    async with several() as s:
        one, other = s.all
        assert not other.losses.known.remembers
        first = sender()
        assert await s.lose(one, first, 0) is None
        assert [lost.some for lost in first.lost] == [True]
        await settled()
        for worker in s.all:
            assert worker.losses.known.know(ONE, "b")
            assert worker.losses.known.know(None, "a")
            assert not worker.losses.known.know(OTHER, "b")
        # it has lost one engine: not the last one of the role, and it has turns
        again = sender("b")
        turn = await other.losses.turn(again, ONE, 1.0)
        assert turn is not None
        assert await other.losses.forbidden(again) == []
        for engine in s.deciding.ledger.engines[2:]:
            s.deciding.ledger.mark_down(engine.url, "gone", s.clock.now())
        s.deciding.ledger.mark_down(URLS[0], "gone", s.clock.now())
        assert await other.losses.forbidden(again) == [URLS[1]]
        assert await s.lose(other, again, 1) is None
        assert s.deciding.losses == [1, 2]
        # a third request gets one engine, and then it is refused
        third = sender("c")
        turn.leave()
        assert await one.losses.turn(third, ONE, 1.0) is not None
        assert isinstance(await s.lose(one, third, 2), EnginesLostError)
        assert s.deciding.losses == [1, 2, 3]
        with pytest.raises(EnginesLostError) as error:
            await other.losses.turn(sender("d"), ONE, 1.0)
        assert error.value.retry_after
        other.losses.answered("d", ONE, whole=True)
        await settled()
        assert not one.losses.known.know(ONE, "d")


async def test_what_is_remembered_is_forgotten_in_time() -> None:
    """Though nobody asks any more: workers would make fingerprints of all requests for ever."""
    async with several() as s:
        one, _ = s.all
        await s.lose(one, sender(), 0)
        await settled()
        await s.clock.advance(KEPT - 1.0)
        await settled()
        assert one.losses.known.remembers
        await s.clock.advance(FORGETS_EVERY)
        await settled()
        assert not one.losses.known.remembers
        assert not s.deciding.lost.known.remembers


async def test_requests_of_two_workers_take_turns() -> None:
    """One behind the other: a turn is left in time, or at once, or as its asker leaves."""
    async with several() as s:
        one, other = s.all
        await s.lose(one, sender(), 0)
        first = await one.losses.turn(sender(), ONE, 9.0)
        second = asyncio.ensure_future(other.losses.turn(sender("b"), ONE, 9.0))
        await settled()
        third = asyncio.ensure_future(one.losses.turn(sender("c"), ONE, 9.0))
        await settled()
        assert first is not None
        assert not second.done()
        first.leave_in(1.0, harmless=False)
        await settled()
        await s.clock.advance(0.9)
        assert not second.done()
        await s.clock.advance(0.2)
        assert await second is not None
        second_turn = second.result()
        assert second_turn is not None
        assert not third.done()
        third.cancel()
        second_turn.leave(harmless=False)
        await settled()
        assert [turns for _, _, turns in s.deciding.has()] == [0, 0]


async def test_a_worker_dies_while_its_engine_is_asked_for_its_health() -> None:
    """Its request counts as one whose client has left just then."""
    async with several() as s:
        one, _ = s.all
        s.deciding.tells.clear()
        asking = asyncio.ensure_future(s.lose(one, sender(), 0))
        await settled()
        one.link.close()
        with pytest.raises(OverloadedError):
            await asking
        await settled()
        assert s.deciding.losses == []
        s.deciding.tells.set()
        await settled()
        assert s.deciding.losses == [1]
        assert s.all[1].losses.known.know(ONE, "b")


async def test_a_client_leaves_before_its_engine_is_lost() -> None:
    async with several() as s:
        one, other = s.all
        s.deciding.dead.add(URLS[0])
        lease = Lease(one.engine(0), Role.AGGREGATED, 1, since=s.clock.now())
        left = sender()
        one.losses.left(left, [lease], ONE)
        await settled()
        assert s.deciding.losses == []
        # behind a part that was refused, its request looks for parts that were ended
        assert await one.losses.judge(left, ONE, looks_back=True) is None
        assert s.deciding.losses == [1]
        assert left.lost[0].some
        await settled()
        assert other.losses.known.remembers


async def test_the_scheduler_process_ends_between_two_losses_of_a_request() -> None:
    """What it knew is gone, but not how many engines the request has lost."""
    async with several() as s:
        one, _ = s.all
        asked = sender()
        assert await s.lose(one, asked, 0) is None
        await settled()
        s.deciding.links.stop()
        await settled()
        s.start()
        await settled()
        assert not one.losses.known.remembers
        assert isinstance(await s.lose(one, asked, 1), EnginesLostError)


async def test_it_ends_while_an_engine_is_asked_for_its_health() -> None:
    """The question is asked again, of one that knows nothing of the leg: the request goes on."""
    async with several() as s:
        one, _ = s.all
        s.deciding.tells.clear()
        asking = asyncio.ensure_future(s.lose(one, sender(), 0))
        await settled()
        s.deciding.links.stop()
        await settled()
        s.start()
        assert await asking is None


async def test_requests_that_are_over_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a worker that has more of them than it can have is not listened to any more."""
    async with several() as s:
        one, other = s.all
        asked = sender()
        one.broke(asked, 0)
        await settled()
        assert [requests for requests, _, _ in s.deciding.has()] == [1, 0]
        del asked
        await settled()
        assert [requests for requests, _, _ in s.deciding.has()] == [0, 0]
        monkeypatch.setattr(scheduler_clients, "MAX_OPEN", 2)
        monkeypatch.setattr(scheduler_clients, "COUNTED", 2)
        many = [sender() for _ in range(3)]
        for number, request in enumerate(many):
            other.broke(request, number)
        await settled()
        assert len(s.deciding.has()) == 1


async def test_an_engine_that_goes_is_not_lost() -> None:
    """One that is drained, or was removed: the worker knows it."""
    async with several() as s:
        one, _ = s.all
        drained, removed, asked = one.engine(0), one.engine(1), sender()
        one.ledger.mark_draining(URLS[0], "restart")
        one.engines.remove(URLS[1])
        for engine in (drained, removed):
            assert not one.losses.broke(asked, engine, s.clock.now(), streamed=False)
        assert asked.lost == []


async def test_a_request_waits_for_an_engine_that_stands_still() -> None:
    """In the scheduler process, which sees first that it goes on."""
    async with several() as s:
        one, _ = s.all
        ledger = s.deciding.ledger
        assert not await one.losses.engines_change("m", s.clock.now() + 5.0)
        ledger.mark_stalled(URLS[0], "silent")
        waiting = asyncio.ensure_future(one.losses.engines_change("m", s.clock.now() + 5.0))
        await settled()
        assert (waiting.done(), s.deciding.comebacks.waiting) == (False, 1)
        ledger.mark_down(URLS[1], "gone", s.clock.now())
        assert await waiting
