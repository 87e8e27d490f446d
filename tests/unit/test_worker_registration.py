"""Registrations that the scheduler process takes: all workers know them, and tell them to the next
scheduler process.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.registration import of_url
from pdproxy.observe.events import NodeChanged
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.transfer import moriio
from pdproxy.workers import links
from pdproxy.workers.publisher import Subscribed
from pdproxy.workers.registrations import RegistrationsOfWorker, publish_registrations
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks
from pdproxy.workers.subscriber import Subscriber
from tests.fakes.clock import ManualClock
from tests.fakes.registry import unused_client
from tests.unit.test_registration import TIMEOUT, A, D, P, Stage, beat

TOPIC = "registrations 0"


class Scheduler(Stage):
    """A scheduler process. `timeout`: for which it goes on from what workers know."""

    def __init__(self, clock: ManualClock, timeout: float = TIMEOUT) -> None:
        super().__init__(moriio.registered, clock)
        self.links = SchedulerLinks(chooses=True, workers=2)
        self.links.start()
        publish_registrations(self.links.publisher, TOPIC, self.known, self.engines, timeout)


class Worker:
    """A worker with its own view of the same engines. `knows`: those that it has."""

    def __init__(self, *knows: str) -> None:
        self.ledger = Ledger([], LedgerOptions(breaker_failures=3, breaker_cooldown=5))
        self.engines = EngineRegistry(self.ledger)
        self.link = SchedulerLink()
        self.known = RegistrationsOfWorker(self.link.subscriber, TOPIC, self.engines, self.ledger)
        for url in knows or (P, D, A):
            self.add(url)

    def add(self, url: str) -> None:
        role = {P: Role.PREFILL, D: Role.DECODE, A: Role.AGGREGATED}[url]
        self.engines.add(EngineSpec(url, role), unused_client(url), registered_as=of_url(url, None))
        self.up(url, 1.0)

    def up(self, url: str, started: float) -> None:
        if self.ledger.mark_up(url, Evidence(frozenset("m"), "1", 16, (), 0, started)):
            self.known.notify(NodeChanged(url, "prefill", up=True, reason=""))

    def connect(self, scheduler: Scheduler) -> None:
        mine, its = links.pair()
        scheduler.links.connect(its)
        self.link.connect(mine)

    def state(self, *urls: str) -> list[object]:
        """What legs and choices see."""
        return [
            (one.in_ledger.kv_not_ready, one.in_ledger.kv_mode, one.run.peers.get(0))
            for one in (self.engines[url] for url in urls or (P, D, A))
        ]


async def settled() -> None:
    """Let all that was sent arrive."""
    for _ in range(20):
        await asyncio.sleep(0)


def agree(scheduler: Scheduler, workers: Sequence[Worker]) -> bool:
    """Whether all know the same."""
    state = Worker.state(scheduler)  # type: ignore[arg-type]
    return all(one.state() == state for one in workers)


def m(url: str = P, role: str = "P", zmq: str = "10.0.0.1:1", **more: str):
    """A heartbeat of MoRIIO."""
    address = f"host:{zmq.partition(':')[0]},handshake:{zmq.partition(':')[2]},notify:7"
    return beat(url, role, address, transfer_mode="READ", dp_size=1, tp_size=2, **more)


async def test_what_comes_to_the_scheduler_process_all_workers_know() -> None:
    """Those that are there, and one that connects later; an engine that a worker adds later, or
    that it knows and the scheduler process does not.
    """
    scheduler, first = Scheduler(ManualClock()), Worker()
    first.connect(scheduler)
    assert not first.known.complete
    await settled()
    assert first.known.complete
    assert agree(scheduler, [first])
    scheduler.known.receive(m(), b"1", "10.0.0.1")
    await settled()
    assert (first.known.count, scheduler.not_ready(P)) == (1, None)
    late = Worker(D)
    late.connect(scheduler)
    await settled()
    late.add(P)
    late.add(A)
    assert agree(scheduler, [first, late])
    scheduler.engines.remove(P)
    await settled()
    assert first.state(P)[0][0] == "has not registered"
    assert first.known.count == 0
    for one in (first, late):
        one.link.close()
    scheduler.links.stop()


async def test_a_restarted_engine_keeps_its_peers() -> None:
    scheduler, worker = Scheduler(ManualClock()), Worker()
    worker.connect(scheduler)
    scheduler.known.receive(m(), b"1", "10.0.0.1")
    await settled()
    run = worker.engines[P].run
    worker.up(P, 2.0)
    assert worker.engines[P].run is not run
    assert worker.engines[P].run.peers.get(0) == scheduler.peer(P)
    worker.link.close()
    scheduler.links.stop()


async def test_heartbeats_that_change_nothing_are_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, worker = Scheduler(ManualClock()), Worker()
    worker.connect(scheduler)
    await settled()
    heard: list[str] = []
    follow = Subscriber.follow

    def followed(self: Subscriber, topic: str, key: str, value: bytes | None) -> None:
        heard.append(key)
        follow(self, topic, key, value)

    monkeypatch.setattr(Subscriber, "follow", followed)
    worker.link.serve(Subscribed, worker.link.subscriber)
    for _ in range(5):
        scheduler.known.receive(m(), b"1", "10.0.0.1")
        await scheduler.clock.advance(1)
        await settled()
    assert len(heard) == 1
    worker.link.close()
    scheduler.links.stop()


@pytest.mark.parametrize("is_added_late", [False, True])
async def test_the_next_scheduler_process_goes_on(is_added_late: bool) -> None:
    """The owner stays the owner, a stranger does not become one, and silence ends it as ever; also
    of an engine that a source finds a moment later.
    """
    clock = ManualClock()
    await clock.advance(100)
    first, workers = Scheduler(clock), [Worker(), Worker()]
    for one in workers:
        one.connect(first)
    first.known.receive(m(), b"1", "10.0.0.1")
    await settled()
    first.links.stop()
    await settled()
    assert agree(first, workers), "nothing changes without a scheduler process"
    second = Scheduler(clock)
    if is_added_late:
        second.engines.remove(P)
    for one in workers:
        one.connect(second)
    await settled()
    if is_added_late:
        spec = EngineSpec(P, Role.PREFILL)
        second.engines.add(spec, unused_client(P), registered_as=of_url(P, None))
        second.up(P)
        await settled()
    assert second.not_ready(P) is None
    assert agree(second, workers)
    second.known.receive(m(zmq="6.6.6.6:1"), b"2", "6.6.6.6")
    second.known.receive(m(), b"3", "10.0.0.1")
    assert second.results == {"contested": 1, "known": 1}
    await clock.advance(TIMEOUT + 1)
    await settled()
    assert second.not_ready(P) == "has not registered"
    assert agree(second, workers)
    for one in workers:
        one.link.close()
    second.links.stop()


async def test_what_is_newer_counts() -> None:
    """A heartbeat of this process; of what workers hold the newest, in whatever order it comes; and
    nothing that is held counts for an engine that is added long after.
    """
    clock = ManualClock()
    await clock.advance(100)
    old, new = Scheduler(clock), Scheduler(clock)
    old.known.receive(m(zmq="10.0.0.1:7"), b"1", "10.0.0.1")
    await clock.advance(1)
    new.known.receive(m(zmq="10.0.0.2:8"), b"1", "10.0.0.2")
    peer = new.peer(P)
    for order in ((old, new), (new, old)):
        third = Scheduler(clock)
        for one in order:
            for known in one.known.known():
                third.known.restore(known)
        assert third.peer(P) == peer
    third = Scheduler(clock)
    await clock.advance(1)
    third.known.receive(m(zmq="10.0.0.3:9"), b"1", "10.0.0.3")
    for known in new.known.known():
        third.known.restore(known)
    assert third.peer(P).host == "10.0.0.3"
    worker = Worker()
    worker.connect(third)
    await settled()
    third.links.stop()
    fourth = Scheduler(clock, timeout=0.02)
    fourth.engines.remove(P)
    await settled()
    worker.connect(fourth)
    await settled()
    await asyncio.sleep(0.05)
    fourth.engines.add(EngineSpec(P, Role.PREFILL), unused_client(P), registered_as=of_url(P, None))
    fourth.up(P)
    assert fourth.not_ready(P) == "has not registered"
    worker.link.close()
    for one in (old, new, fourth):
        one.links.stop()


async def test_two_processes_of_one_machine_are_two_for_the_next_scheduler_process() -> None:
    clock = ManualClock()
    await clock.advance(100)
    first, worker = Scheduler(clock), Worker()
    worker.connect(first)
    first.known.receive(m(), b"1", "10.0.0.1")
    first.known.receive(m(zmq="10.0.0.1:9"), b"2", "10.0.0.1")
    await settled()
    first.links.stop()
    second = Scheduler(clock)
    worker.connect(second)
    await settled()
    assert "registered by two processes" in (second.not_ready(P) or "")
    await clock.advance(TIMEOUT - 1)
    second.known.receive(m(), b"1", "10.0.0.1")
    await clock.advance(2)
    assert second.not_ready(P) is None
    await settled()
    assert agree(second, [worker])
    worker.link.close()
    second.links.stop()


@pytest.mark.parametrize("seed", range(20))
async def test_all_know_the_same_whatever_happens(seed: int) -> None:
    draw, clock = random.Random(seed), ManualClock()
    await clock.advance(100)
    scheduler, workers = Scheduler(clock), [Worker(), Worker()]
    for one in workers:
        one.connect(scheduler)
    for _ in range(100):
        moment = draw.random()
        if moment < 0.05:
            scheduler.links.stop()
            await settled()
            scheduler = Scheduler(clock)
            for one in workers:
                one.connect(scheduler)
        elif moment < 0.1:
            at = draw.randrange(2)
            workers[at].link.close()
            workers[at] = Worker()
            workers[at].connect(scheduler)
        elif moment < 0.3:
            await clock.advance(draw.choice((0.5, 2.0, TIMEOUT + 1)))
        else:
            url, role = draw.choice(((P, "P"), (D, "D")))
            host = draw.choice(("10.0.0.1", "10.0.0.2"))
            scheduler.known.receive(m(url, role, f"{host}:{draw.randrange(2)}"), b"1", host)
        if draw.random() < 0.3:
            await settled()
            assert agree(scheduler, workers)
    await settled()
    assert agree(scheduler, workers)
    for one in workers:
        one.link.close()
    scheduler.links.stop()
