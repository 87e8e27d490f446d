"""Places of several workers: as many as one process has, and the one that has waited longest is
next, wherever it waits.
"""

from __future__ import annotations

import asyncio
import os
import random
import time

import pytest

from pdproxy.kit import shared_places
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import OverloadedError, RefusalReason
from pdproxy.kit.shared_places import MEASURES, MORE, SharedPlaces
from pdproxy.kit.shared_table import SharedTable
from pdproxy.observe.events import Observers
from pdproxy.serving.access.clients import Client, Clients
from pdproxy.serving.request.admission import Admission, Place
from pdproxy.serving.request.demand import RequestDemand
from pdproxy.serving.request.worker_admission import WorkerAdmission
from pdproxy.settings.limits import Deadlines, Limits, Overload
from tests.fakes.world import until


class Workers:
    """Admissions of several workers in one event loop."""

    def __init__(
        self, count: int, places: int, queue: int = 8, tokens: int = 0, timeout: float = 60.0
    ) -> None:
        self.table = SharedTable(count, 1, MEASURES)
        self.wakes = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(count)]
        self.all = [self.made(number, places, queue, tokens, timeout) for number in range(count)]
        self.order: list[str] = []
        self.places: dict[str, Place] = {}

    def made(
        self, number: int, places: int, queue: int = 8, tokens: int = 0, timeout: float = 60.0
    ) -> WorkerAdmission:
        shared = SharedPlaces(
            number, self.table.column(number), self.table.others(number), self.wakes, time.monotonic
        )
        made = WorkerAdmission(
            Limits(max_inflight=places, max_queue=queue, max_inflight_tokens=tokens),
            Deadlines(queue=timeout),
            Overload(output_weight=1.0),
            Observers([]),
            Clock(),
            Clients(()),
            shared=shared,
        )
        made.start()
        return made

    async def enter(self, number: int, name: str = "", prompt: int = 1) -> Place:
        place = await self.all[number].enter(Client("c"), RequestDemand(prompt=prompt, limit=0))
        self.order.append(name)
        self.places[name] = place
        return place

    def close(self) -> None:
        for one in self.all:
            one.stop()
        for wake in self.wakes:
            os.close(wake)


async def test_places_are_those_of_all() -> None:
    """The third request of two workers waits; it begins when the other worker gives a place
    back.
    """
    workers = Workers(2, 2)
    first, _ = await workers.enter(0), await workers.enter(1)
    waits = asyncio.create_task(workers.enter(1, "waits"))
    await until(lambda: workers.all[1].waiting)
    assert workers.all[0].everywhere == workers.all[1].everywhere == 3
    first.leave()
    await waits
    assert (workers.all[0].inflight, workers.all[1].inflight) == (0, 2)
    assert workers.all[0].everywhere == 2
    workers.close()


async def test_who_has_waited_longest_is_next() -> None:
    """Whoever gives the place back: a worker does not keep it for its own requests, nor for one
    that just comes.
    """
    workers = Workers(3, 1)
    first = await workers.enter(0, "first")
    tasks = []
    for number, name in ((1, "a"), (0, "b"), (2, "c"), (0, "d")):
        tasks.append(asyncio.create_task(workers.enter(number, name)))
        await until(lambda: sum(one.waiting for one in workers.all) == len(tasks))
    first.leave()
    newcomer = asyncio.create_task(workers.enter(0, "newcomer"))
    for name in ("a", "b", "c", "d", "newcomer"):
        await until(lambda name=name: name in workers.places)  # type: ignore[misc]
        workers.places[name].leave()
    await asyncio.gather(*tasks, newcomer)
    assert workers.order == ["first", "a", "b", "c", "d", "newcomer"]
    workers.close()


async def test_the_queue_is_as_long_as_one_process_has() -> None:
    workers = Workers(2, 1, queue=2)
    first = await workers.enter(0)
    tasks = [asyncio.create_task(workers.enter(number)) for number in (0, 1)]
    await until(lambda: workers.all[0].waiting and workers.all[1].waiting)
    with pytest.raises(OverloadedError) as refused:
        await workers.enter(0)
    assert refused.value.reason is RefusalReason.QUEUE_FULL
    first.leave()
    for task in tasks:
        (await task).leave()
    workers.close()


async def test_tokens_in_flight_are_those_of_all() -> None:
    """A large request waits for the other worker's, and is served alone if it is larger than
    all.
    """
    workers = Workers(2, 8, tokens=100)
    small = await workers.enter(0, "small", prompt=60)
    large = asyncio.create_task(workers.enter(1, "large", prompt=500))
    await until(lambda: workers.all[1].waiting)
    small.leave()
    place = await large
    behind = asyncio.create_task(workers.enter(0, "behind", prompt=10))
    await until(lambda: workers.all[0].waiting)
    place.leave()
    (await behind).leave()
    assert workers.order == ["small", "large", "behind"]
    workers.close()


async def test_a_size_without_bound() -> None:
    """A request that asks for thousands of answers, after an engine that claimed enormous ones: it
    is served.
    """
    workers = Workers(2, 2)
    workers.all[0]._outputs.add(1, 2**60)
    place = await workers.all[0].enter(Client("c"), RequestDemand(answers=2**14))
    assert workers.all[1].everywhere == 1
    place.leave()
    assert workers.all[1].everywhere == 0
    workers.close()


async def test_what_a_dead_worker_had_is_free() -> None:
    """It wakes nobody: who waits looks by itself."""
    workers = Workers(2, 1)
    await workers.enter(0)
    waits = asyncio.create_task(workers.enter(1, "waits"))
    await until(lambda: workers.all[1].waiting)
    workers.table.clear(0)
    await waits
    assert workers.order == ["", "waits"]
    workers.close()


async def test_a_worker_that_stands_still_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request has waited longest, but it does not look: after a while others go on."""
    monkeypatch.setattr(shared_places, "STALE", 50_000)
    workers = Workers(2, 1)
    first = await workers.enter(1)
    stopped = asyncio.create_task(workers.enter(0, "stopped"))
    await until(lambda: workers.all[0].waiting)
    workers.all[0].stop()
    monkeypatch.setattr(workers.all[0], "look", lambda: None)
    waits = asyncio.create_task(workers.enter(1, "waits"))
    await until(lambda: workers.all[1].waiting)
    first.leave()
    await waits
    assert workers.order == ["", "waits"]
    stopped.cancel()
    await asyncio.gather(stopped, return_exceptions=True)
    workers.close()


async def test_fewer_places_of_one_hold_for_all() -> None:
    """One worker has learned that fewer are better; a number that nobody has confirmed for a while
    counts no more.
    """
    workers = Workers(2, 8)
    workers.all[0]._limit.places = 2
    workers.all[0]._resize()
    workers.all[0].look()
    await workers.enter(1)
    await workers.enter(1)
    waits = asyncio.create_task(workers.enter(1, "waits"))
    await until(lambda: workers.all[1].waiting)
    assert workers.all[1].inflight == 2
    later = workers.all[1]._shared._now
    workers.all[1]._shared._now = lambda: later() + 61
    await waits
    assert workers.all[1].inflight == 3
    workers.close()


async def test_an_operator_changes_the_places() -> None:
    """Fewer hold once any worker has read the settings, more once all have: also within a minute,
    and for those that wait.
    """
    workers = Workers(2, 3)

    def configure(number: int, places: int) -> None:
        workers.all[number]._limits = Limits(max_inflight=places, max_queue=8)
        workers.all[number].configure()
        workers.all[number].look()

    configure(0, 1)
    await workers.enter(1)
    waits = asyncio.create_task(workers.enter(1, "waits"))
    await until(lambda: workers.all[1].waiting)
    configure(1, 1)
    configure(0, 4)
    workers.all[1].look()
    assert (workers.all[1].inflight, workers.all[1].waiting) == (1, 1)
    configure(1, 4)
    await waits
    assert [one.places for one in workers.all] == [1, 4], "the first one has not looked yet"
    workers.all[0].look()
    assert workers.all[0].places == 4
    for number in (0, 1):
        await workers.enter(number)
    late = asyncio.create_task(workers.enter(0, "late"))
    await until(lambda: workers.all[0].waiting)
    late.cancel()
    await asyncio.wait([late])
    workers.close()


async def test_many_requests_at_many_workers() -> None:
    """All are served, and never more at once than there are places; each worker serves some."""
    workers = Workers(4, 5, queue=1000)
    most = 0

    async def request(number: int) -> None:
        nonlocal most
        place = await workers.enter(number % 4, str(number))
        most = max(most, sum(one.inflight for one in workers.all))
        await asyncio.sleep(0.001)
        place.leave()

    await asyncio.gather(*(request(number) for number in range(200)))
    assert len(workers.order) == 200
    assert most == 5
    assert sum(one.inflight + one.waiting for one in workers.all) == 0
    workers.close()


class _Request:
    """A request of one of several workers, and the same one of a process that is alone."""

    def __init__(self, number: int, here: asyncio.Task[Place], alone: asyncio.Task[Place]) -> None:
        self.number = number
        self.both = here, alone

    async def end(self) -> None:
        """It is over: its place is free, or it waits no more."""
        for task in self.both:
            task.cancel()
        for found in await asyncio.gather(*self.both, return_exceptions=True):
            if isinstance(found, Place):
                found.leave()


@pytest.mark.parametrize("seed", range(8))
async def test_as_many_are_served_as_by_one_process(seed: int) -> None:
    """Requests come and go at any worker, engines come and go, and workers are killed: no place is
    lost, none too many taken.
    """
    chance, count = random.Random(seed), 3
    workers = Workers(count, 12, queue=1000)
    alone = Admission(
        Limits(max_inflight=12, max_queue=1000),
        Deadlines(queue=60.0),
        Overload(output_weight=1.0),
        Observers([]),
        Clock(),
        Clients(()),
    )
    requests: list[_Request] = []

    async def ended(request: _Request) -> None:
        requests.remove(request)
        await request.end()

    waited = 0
    for _ in range(150):
        step = chance.random()
        if step < 0.5:
            number, demand = chance.randrange(count), RequestDemand(prompt=1, limit=0)
            both = [
                asyncio.create_task(one.enter(Client("c"), demand))
                for one in (workers.all[number], alone)
            ]
            requests.append(_Request(number, *both))
        elif step < 0.85 and requests:
            await ended(chance.choice(requests))
        elif step < 0.95:
            # places, and tokens: one each
            bounds = chance.choice((None, 1, 4, 20)), chance.choice((0, 2, 5, 100))
            for one in (*workers.all, alone):
                one.resize(*bounds)
        else:
            killed = chance.randrange(count)
            workers.all[killed].stop()
            workers.table.clear(killed)
            for request in [request for request in requests if request.number == killed]:
                await ended(request)
            workers.all[killed].stop()
            workers.table.clear(killed)
            workers.all[killed] = workers.made(killed, 12, queue=1000)
            workers.all[killed].resize(alone._engines_places, alone._engines_tokens)
        for one in workers.all:
            one.look()
        await asyncio.sleep(0)
        for one in workers.all:
            one.look()
        await asyncio.sleep(0)
        waited += alone.waiting
        assert sum(one.inflight for one in workers.all) == alone.inflight
        assert sum(one.waiting for one in workers.all) == alone.waiting
    assert waited
    for request in [*requests]:
        await ended(request)
    assert [one.inflight + one.waiting for one in workers.all] == [0] * count
    workers.close()


async def test_what_was_learned_is_read_as_long_as_it_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind that, requests read no more of a worker than its places and their size."""
    workers = Workers(2, 8)
    first, second = workers.all
    first._own_places, first._learned = 2, time.monotonic()
    first.look()
    (row,) = second._shared.others
    assert row[MORE]
    place = await workers.enter(1)
    assert second.places == 2
    monkeypatch.setattr(shared_places, "RECENT", 0)
    first.look()
    assert not row[MORE]
    second.look()
    assert second.places == 8
    place.leave()
    workers.close()
