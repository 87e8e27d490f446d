"""Places and limits of keys by message: as in one process, whatever ends on either side, and
whenever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdproxy.deciding.local_admission import LocalAdmission
from pdproxy.deciding.local_quotas import LocalQuotas, decode_levels, encode_levels
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import LimitError, OverloadedError, PdproxyError, RefusalReason
from pdproxy.observe.events import Observers
from pdproxy.scheduling.admission import RequestDemand
from pdproxy.serving.access.clients import Client, Clients
from pdproxy.settings.keys import KeyLimits
from pdproxy.settings.limits import Deadlines, Limits, Overload
from pdproxy.workers import links
from pdproxy.workers.admitted_worker import AdmissionOfAll, AdmittedWorker
from pdproxy.workers.kept import keep
from pdproxy.workers.links import Message
from pdproxy.workers.remote_admission import RemoteAdmission, RemotePlace, RemoteQuotas, RemoteUse
from pdproxy.workers.scheduler_clients import SchedulerClient
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.share import WorkerShare, WorkersMemory

ONE = RequestDemand(prompt=1, limit=0)
MINUTE = {"a": KeyLimits(rpm=3, tpm=1000, inflight=2)}


class Scheduler:
    """A scheduler process."""

    def __init__(self, places: int = 2, queue: int = 8) -> None:
        self.now = 1000.0
        self.clients = Clients()
        self.admission = LocalAdmission(
            Limits(max_inflight=places, max_queue=queue),
            Deadlines(),
            Overload(output_weight=1.0),
            Observers([]),
            Clock(),
            self.clients,
        )
        self.quotas = LocalQuotas(lambda: MINUTE, lambda: self.now)
        self.workers: list[SchedulerClient] = []

    def connect(self, link: SchedulerLink) -> SchedulerClient:
        """Connect a worker."""
        mine, its = links.pair()
        of_all = AdmissionOfAll(self.admission, self.quotas, self.clients)
        said = SchedulerClient.welcome
        worker = SchedulerClient(mine, self.workers.remove, said)
        AdmittedWorker(of_all, worker)
        self.workers.append(worker)
        link.connect(its)
        return worker

    @property
    def level(self) -> float:
        """The tokens that the key has left."""
        tokens = self.quotas._accounts["a"].tokens
        assert tokens is not None
        return tokens.level

    @property
    def uses(self) -> int:
        """The requests of the key."""
        return self.quotas._accounts["a"].inflight

    def close(self) -> None:
        """End, as a process does."""
        while self.workers:
            worker = self.workers.pop()
            worker._is_over = True  # its places end with it
            worker._link.close()


class Reader:
    """A connection whose client reads its answer too slowly."""

    def __init__(self) -> None:
        self.errors: list[PdproxyError] = []

    def evict(self, error: PdproxyError) -> None:
        self.errors.append(error)


class Worker:
    """A worker."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.link = SchedulerLink()
        self.clients = Clients()
        self.admission = RemoteAdmission(self.link, self.clients)
        self.quotas = RemoteQuotas(self.link, lambda: MINUTE)
        self.own = scheduler.connect(self.link)

    def begin(self, name: str = "c", weight: float = 1.0) -> asyncio.Task[RemotePlace]:
        """A request that enters."""
        client = Client(name)
        client.weight = weight
        return asyncio.ensure_future(self.admission.enter(client, ONE))

    async def use(self) -> RemoteUse:
        """A request of the key."""
        use = await self.quotas.enter("a")
        assert use is not None
        return use


async def settled() -> None:
    """Let all that was sent arrive."""
    for _ in range(30):
        await asyncio.sleep(0)


@asynccontextmanager
async def running(
    count: int = 2, places: int = 2, queue: int = 8
) -> AsyncIterator[tuple[Scheduler, list[Worker]]]:
    """A scheduler process and so many workers."""
    s = Scheduler(places, queue)
    workers = [Worker(s) for _ in range(count)]
    await settled()
    yield s, workers
    for worker in workers:
        worker.link.close()
    s.close()


# -- places


async def test_places_are_those_of_all_and_who_waited_longest_is_next() -> None:
    async with running(3, places=1) as (s, workers):
        first = await workers[0].begin()
        order: list[int] = []
        tasks = []
        for number in (1, 0, 2, 0):
            task = workers[number].begin()
            task.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
            tasks.append(task)
            await settled()
        assert (s.admission.inflight, s.admission.waiting) == (1, 4)
        assert [one.admission.inflight for one in workers] == [1, 0, 0]
        assert [one.admission.waiting for one in workers] == [2, 1, 1]
        first.leave()
        for task in tasks:
            (await task).leave()
        assert order == [1, 0, 2, 0]
        await settled()
        assert (s.admission.inflight, len(s.clients)) == (0, 0)


async def test_shares_hold_whichever_workers_the_requests_came_to() -> None:
    """Three places to one, though the tenants' requests are at other workers."""
    async with running(2, places=1, queue=100) as (_, workers):
        first = await workers[0].begin("first")
        served: list[str] = []
        tasks = []
        for at in range(40):
            for name, weight in (("a", 3.0), ("b", 1.0)):
                number = at % 2 if name == "a" else 1
                task = workers[number].begin(name, weight)
                task.add_done_callback(lambda _, name=name: served.append(name))  # type: ignore[misc]
                tasks.append(task)
        await settled()
        first.leave()
        while len(served) < 32:
            await settled()
            for task in tasks:
                if task.done() and not hasattr(task, "left"):
                    task.left = True  # type: ignore[attr-defined]
                    task.result().leave()
        assert served[:32].count("a") == pytest.approx(24, abs=1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_full_queue_is_one_for_all_and_the_largest_client_gives_way() -> None:
    async with running(2, places=1, queue=2) as (_, workers):
        first = await workers[0].begin()
        greedy = [workers[0].begin("greedy"), workers[1].begin("greedy")]
        await settled()
        with pytest.raises(OverloadedError) as full:
            await workers[1].begin("greedy")
        assert full.value.reason is RefusalReason.QUEUE_FULL
        other = workers[0].begin("other")
        with pytest.raises(LimitError) as share:
            await greedy[1]
        assert share.value.reason is RefusalReason.SHARE
        first.leave()
        (await greedy[0]).leave()
        (await other).leave()


async def test_a_wait_is_predicted_by_what_other_workers_have_served() -> None:
    async with running(2, places=1) as (s, workers):
        place = await workers[0].begin()
        place.leave(seconds=5.0, prompt=1, completion=1)
        await settled()
        place = await workers[0].begin()
        tasks = [workers[0].begin() for _ in range(3)]
        await settled()
        now = s.admission._clock.now()
        with pytest.raises(OverloadedError) as refused:
            await workers[1].admission.enter(Client("c"), ONE, now + 1.0)
        assert refused.value.reason is RefusalReason.DEADLINE
        place.leave()
        for task in tasks:
            (await task).leave()


@pytest.mark.parametrize("turns", range(8))
async def test_who_leaves_at_any_moment_leaves_no_place(turns: int) -> None:
    """While it waits, while it is granted, and while the answer is on its way."""
    async with running(1, places=1) as (s, (worker,)):
        first = await worker.begin()
        waits = worker.begin()
        await settled()
        first.leave()
        for _ in range(turns):
            await asyncio.sleep(0)
        waits.cancel()
        left = await asyncio.gather(waits, return_exceptions=True)
        if isinstance(left[0], RemotePlace):
            left[0].leave()
        await settled()
        assert (s.admission.inflight, s.admission.waiting, len(s.clients)) == (0, 0, 0)
        (await worker.begin()).leave()


async def test_what_a_dead_worker_had_is_free_again() -> None:
    async with running(2, places=2) as (s, workers):
        await workers[0].begin()
        await workers[0].begin()
        dead, living = workers[0].begin(), workers[1].begin()
        use = await workers[0].use()
        await use.reserve(100, 200)
        await settled()
        assert (s.admission.inflight, s.admission.waiting) == (2, 2)
        workers[0].link._drop_link()  # as its end does
        (await living).leave()
        await settled()
        assert (s.admission.inflight, s.admission.waiting, s.uses) == (0, 0, 0)
        assert s.level == 700, "what it had reserved is paid"
        dead.cancel()


async def test_a_new_scheduler_process_is_told_of_places_and_asked_again() -> None:
    async with running(2, places=2) as (s, workers):
        places = [await workers[0].begin(), await workers[1].begin()]
        waits = workers[1].begin()
        await settled()
        s.close()
        await settled()
        successor = Scheduler(places=1)
        for worker in workers:
            successor.connect(worker.link)
        await settled()
        assert (successor.admission.inflight, successor.admission.waiting) == (2, 1)
        places[0].leave()
        await settled()
        assert not waits.done(), "there is one place now, which is taken"
        places[1].leave()
        (await waits).leave()
        await settled()
        assert (successor.admission.inflight, len(successor.clients)) == (0, 0)
        successor.close()


async def test_a_drain_refuses_who_waits_and_ends_with_the_last_request() -> None:
    async with running(2, places=1) as (s, workers):
        place = await workers[0].begin()
        waits, other = workers[0].begin(), workers[1].begin()
        await settled()
        closing = asyncio.ensure_future(workers[0].admission.close())
        for refused in (waits, workers[0].begin()):
            with pytest.raises(OverloadedError) as error:
                await refused
            assert error.value.reason is RefusalReason.DRAINING
        await settled()
        assert not closing.done()
        assert (s.admission.inflight, s.admission.waiting) == (1, 1)
        place.leave()
        await closing
        (await other).leave()


async def test_a_slow_reader_goes_as_soon_as_a_request_of_another_worker_waits() -> None:
    async with running(2, places=2) as (s, workers):
        client, reader = workers[0].clients.enter("slow"), Reader()
        places = [await workers[0].begin("slow") for _ in range(2)]
        for _ in range(2):  # as it is measured
            assert not workers[0].admission.over_share(client)
            workers[0].clients.mark_slow(client, reader)
        own = workers[1].begin("slow")
        await settled()
        assert reader.errors == [], "only its own request waits"
        other = workers[1].begin("other")
        await settled()
        (error,) = reader.errors
        assert isinstance(error, OverloadedError)
        assert error.reason is RefusalReason.SLOW_READER
        workers[0].admission.over_share(client)
        await settled()
        assert len(reader.errors) == 2, "it is over its share while it is measured, too"
        workers[0].clients.unmark_slow(client, reader)
        await settled()
        assert not s.clients.with_slow
        for place in places:
            place.leave()
        for task in (own, other):
            (await task).leave()
        await settled()
        assert len(s.clients) == 0


# -- limits of keys


async def test_limits_of_keys_are_those_of_all() -> None:
    async with running() as (s, workers):
        uses = [await worker.use() for worker in workers]
        with pytest.raises(LimitError) as refused:
            await workers[0].use()
        assert refused.value.reason is RefusalReason.KEY_INFLIGHT
        await uses[0].reserve(100, 300)
        with pytest.raises(LimitError) as refused:
            await uses[1].reserve(100, 900)
        assert refused.value.reason is RefusalReason.KEY_TOKENS
        await uses[1].reserve(100, 400)
        assert s.level == 100
        uses[0].end(150)
        uses[1].end(500)
        await settled()
        assert (s.level, s.uses) == (350, 0)
        uses[0].add(50)
        uses[1].add(10**9)
        await settled()
        assert s.level == 300 - 10_000, "at most ten minutes"
        with pytest.raises(LimitError):
            await workers[1].use()
        assert await workers[0].quotas.enter("without") is None


async def test_tokens_without_an_end_are_charged_until_the_minute_is_empty() -> None:
    async with running() as (s, (worker, _)):
        use = await worker.use()
        await use.reserve(0, None)
        use.spend(1000)
        await settled()
        assert s.level == 0
        use.spend(1)
        await settled()
        with pytest.raises(LimitError) as refused:
            use.spend(1)
        assert refused.value.reason is RefusalReason.KEY_TOKENS
        use.end(1002)


@pytest.mark.parametrize("turns", range(6))
async def test_a_request_that_leaves_while_its_key_is_asked_for_counts_no_more(turns: int) -> None:
    async with running(1) as (s, (worker,)):
        asking = asyncio.ensure_future(worker.use())
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        left = await asyncio.gather(asking, return_exceptions=True)
        if isinstance(left[0], RemoteUse):
            left[0].end(0)
        await settled()
        if "a" in s.quotas._accounts:
            assert s.uses == 0
        assert len(worker.quotas._uses) == 0


async def test_a_new_scheduler_process_goes_on_with_what_keys_have_left() -> None:
    async with running() as (s, workers):
        ended, running_on = await workers[0].use(), await workers[1].use()
        await ended.reserve(100, 200)
        ended.end(250)
        await running_on.reserve(100, 400)
        await settled()
        levels = decode_levels(encode_levels(s.quotas.levels()))
        assert s.level == 250
        s.close()
        successor = Scheduler()
        successor.quotas.take_over(levels)
        for worker in workers:
            successor.connect(worker.link)
        await settled()
        assert (successor.level, successor.uses) == (250, 1)
        running_on.end(150)
        await settled()
        assert (successor.level, successor.uses) == (600, 0)
        (await workers[0].use()).end(0)
        with pytest.raises(LimitError) as refused:
            await workers[0].use()
        assert refused.value.reason is RefusalReason.KEY_REQUESTS
        successor.close()


async def test_the_supervisor_keeps_what_keys_have_left() -> None:
    """Whatever it has kept last is what the next scheduler process begins with."""
    memory = WorkersMemory(2, 1)

    def begun() -> tuple[WorkerShare, Scheduler]:
        share, made = memory.of(1, sent.append), Scheduler()
        share.admission(lambda: made.admission, made.clients)
        share.quotas(lambda: made.quotas, lambda: MINUTE)
        return share, made

    sent: list[Message] = []
    share, first = begun()
    use = await first.quotas.enter("a")
    assert use is not None
    await use.reserve(100, 200)
    use.end(250)
    for _ in range(2):
        share.tell_levels()
        await settled()
    assert len(sent) == 1, "nothing has changed"
    keep(memory.kept, sent[0])
    _, successor = begun()
    assert successor.level == first.level == 750


async def test_names_that_have_their_whole_minute_again_are_forgotten() -> None:
    """Each of many names is used once: nothing is kept of those that have filled up, here or in the
    supervisor, nor of names without such limits. What becomes known behind the end still counts.
    """
    time = 0.0
    limits = {f"n{number}": KeyLimits(rpm=60, tpm=600) for number in range(200)}
    limits |= {f"i{number}": KeyLimits(inflight=4) for number in range(200)}
    memory, sent, clients = WorkersMemory(2, 1), list[Message](), Scheduler()
    share, quotas = memory.of(1, sent.append), LocalQuotas(lambda: limits, lambda: time)
    share.admission(lambda: clients.admission, clients.clients)
    share.quotas(lambda: quotas, lambda: limits)
    runs = quotas.begin("i7")
    for name in limits:
        time += 0.25
        use = quotas.begin(name)
        assert use is not None
        await use.reserve(10, 20)
        use.end(15)
        share.tell_levels()
        await settled()
        for message in sent:
            keep(memory.kept, message)
        sent.clear()
        assert len(memory.kept) <= 10
        assert len(quotas._accounts) <= 10
    assert list(quotas._accounts) == ["i7"]
    assert runs is not None
    runs.end(0)
    quotas.charge("n3", 700, 0)
    share.tell_levels()
    assert list(quotas._accounts) == ["n3"]
    with pytest.raises(LimitError):
        quotas.begin("n3")
