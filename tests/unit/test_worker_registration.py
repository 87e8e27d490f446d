"""Registrations of several workers: made of the same messages in the same order, whoever reads a
heartbeat, leads, or begins.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from pdproxy.fleet import worker_registration
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.registration import REGISTRATIONS, of_url
from pdproxy.fleet.worker_registration import ASK_EVERY, MAX_BEATS, MAX_SENDERS, WorkerRegistrations
from pdproxy.kit.siblings import ALL
from pdproxy.observe.description import Description, Samples
from pdproxy.observe.events import Event, Observers
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Role
from pdproxy.transfer import p2p_nccl
from tests.fakes.clock import ManualClock
from tests.fakes.registry import unused_client
from tests.unit.test_registration import TIMEOUT, D, P, beat


class _Lead:
    """A lead that the test gives and takes."""

    def __init__(self, *, leads: bool) -> None:
        self.leads = leads


class Worker:
    """One worker, and what it has not read yet."""

    def __init__(self, stage: Stage, number: int, *, succeeds: bool = False) -> None:
        self.stage = stage
        self.number = number
        self.lead = _Lead(leads=number == 0)
        self.results: Counter[str] = Counter()
        self.inbox: list[bytes] = []
        self.failures: list[Exception] = []
        self.is_stopped = self.is_behind = False
        ledger = Ledger([], LedgerOptions(breaker_failures=3, breaker_cooldown=5))
        self.engines = EngineRegistry(ledger)
        self.known = WorkerRegistrations(
            self.engines,
            ledger,
            p2p_nccl.registered,
            Observers([self]),
            stage.clock,
            timeout=TIMEOUT,
            number=number,
            lead=self.lead,  # type: ignore[arg-type]
            succeeds=succeeds,
            pass_on=self.pass_on,
            failed=self.failures.append,
        )
        for url, role in ((P, Role.PREFILL), (D, Role.DECODE)):
            self.engines.add(
                EngineSpec(url, role), unused_client(url), registered_as=of_url(url, None)
            )

    def notify(self, event: Event) -> None:
        raise AssertionError(event)

    def counters_of(self, kind: type[Event]) -> list[Callable[[Event], None]]:
        raise AssertionError(kind)

    def count(self, metric: Description, *labels: str, by: float = 1) -> None:
        assert (metric, by) == (REGISTRATIONS, 1)
        self.results[labels[0]] += 1

    def show(self, metric: Description, read: Callable[[], Samples]) -> None:
        raise AssertionError(metric)

    def pass_on(self, worker: int, body: bytes) -> bool:
        if not self.is_behind:
            self.stage.passed += 1
            for one in self.stage.workers:
                if worker in (one.number, ALL):
                    one.inbox.append(body)
        return not self.is_behind

    def read(self) -> None:
        """Take the messages that have come."""
        while self.inbox and not self.is_stopped:
            self.known.received(self.inbox.pop(0))

    def wrong(self, url: str = P) -> str | None:
        """Why an engine takes part in no KV transfer, as this worker sees it."""
        return self.engines[url].in_ledger.kv_not_ready

    def owner(self, url: str = P) -> tuple[object, ...] | None:
        owned = self.known._entries[url.removeprefix("http://")].owned
        return (
            None
            if owned is None
            else (owned.registration, owned.connection, owned.address, owned.rival is not None)
        )


class Stage:
    """Workers, and a parent that puts their messages in one order. Number 0 leads until the test
    says otherwise.
    """

    def __init__(self, count: int = 3) -> None:
        self.clock = ManualClock()
        self.passed = 0
        self.workers: list[Worker] = []
        self.workers += [Worker(self, number) for number in range(count)]
        for one in self.workers:
            one.known.look()
        self.settle()

    def settle(self) -> None:
        """Have everybody read what has come, and what comes of that."""
        while any(one.inbox and not one.is_stopped for one in self.workers):
            for one in self.workers:
                one.read()

    async def wait(self, seconds: float) -> None:
        """Let time pass."""
        while seconds > 0:
            step = min(seconds, ASK_EVERY / 2)
            await self.clock.advance(step)
            seconds -= step
            for one in self.workers:
                if not one.is_stopped:
                    one.known.look()
            self.settle()

    def restart(self, number: int) -> Worker:
        """Kill a worker and start its successor, which has not asked yet."""
        self.workers[number] = Worker(self, number, succeeds=True)
        return self.workers[number]

    def results(self) -> Counter[str]:
        return sum((one.results for one in self.workers), Counter())


async def test_a_heartbeat_that_one_reads_all_know_and_one_counts() -> None:
    stage = Stage()
    assert all(one.known.complete for one in stage.workers)
    stage.workers[2].known.receive(beat(), b"1", "10.0.0.1")
    stage.settle()
    assert [one.wrong() for one in stage.workers] == [None] * 3
    assert [one.engines[P].run.peers.get(0).address for one in stage.workers] == [
        "10.0.0.1:21001"
    ] * 3
    assert [dict(one.results) for one in stage.workers] == [{}, {}, {"known": 1}]
    for at in (0, 1):  # its connection is made again, to another worker
        await stage.wait(3)
        stage.workers[at].known.receive(beat(), b"2", "10.0.0.1")
        stage.settle()
    assert {one.wrong() for one in stage.workers} == {None}
    assert stage.results() == {"known": 3}


async def test_what_is_silent_is_silent_for_all_at_once() -> None:
    stage = Stage()
    stage.workers[1].known.receive(beat(), b"1", "10.0.0.1")
    stage.settle()
    await stage.clock.advance(TIMEOUT + 0.1)
    # the leader has said it, and nobody has heard it yet
    assert [one.wrong() for one in stage.workers] == [None] * 3
    stage.settle()
    assert [one.wrong() for one in stage.workers] == ["has not registered"] * 3
    assert stage.results() == {"known": 1, "expired": 1}


async def test_silence_that_a_heartbeat_has_overtaken_counts_for_nobody() -> None:
    stage = Stage()
    stage.workers[1].known.receive(beat(), b"1", "10.0.0.1")
    stage.settle()
    await stage.clock.advance(TIMEOUT - 0.01)
    stage.workers[1].known.receive(beat(), b"1", "10.0.0.1")
    await stage.clock.advance(0.1)  # the leader says it, behind the heartbeat that it has not read
    stage.settle()
    assert [one.wrong() for one in stage.workers] == [None] * 3
    await stage.wait(TIMEOUT + 1)
    assert [one.wrong() for one in stage.workers] == ["has not registered"] * 3
    assert stage.results() == {"known": 2, "expired": 1}


async def test_without_a_leader_nothing_is_silent_until_there_is_one() -> None:
    stage = Stage()
    stage.workers[1].known.receive(beat(), b"1", "10.0.0.1")
    stage.settle()
    stage.workers[0].is_stopped = True
    stage.workers[0].lead.leads = False
    await stage.wait(TIMEOUT + 1)
    assert stage.workers[1].wrong() is None
    stage.workers[1].lead.leads = stage.workers[2].lead.leads = True  # two for a moment
    await stage.wait(ASK_EVERY + 1)
    assert [one.wrong() for one in stage.workers[1:]] == ["has not registered"] * 2
    stage.workers[2].lead.leads = stage.workers[0].is_stopped = False
    stage.settle()
    assert stage.workers[0].wrong() == "has not registered"
    assert stage.results()["expired"] == 1


async def test_of_two_senders_all_believe_the_same_one() -> None:
    """Whoever read them, and however often each came first in its own worker."""
    stage = Stage()
    stage.workers[0].known.receive(beat(), b"1", "10.0.0.1")
    stage.workers[2].known.receive(beat(zmq="6.6.6.6:1"), b"1", "6.6.6.6")
    stage.settle()
    assert {one.engines[P].run.peers.get(0).address for one in stage.workers} == {"10.0.0.1:21001"}
    assert all(
        "6.6.6.6 registers it, too" in " ".join(one.known.shortcomings()) for one in stage.workers
    )
    assert stage.results() == {"known": 1, "contested": 1}


async def test_the_name_of_a_connection_holds_in_its_own_process_only() -> None:
    """A stranger that takes it at another worker's socket does not keep the engine registered."""
    stage = Stage()
    stage.workers[0].known.receive(beat(), b"1", "10.0.0.1")
    stage.workers[1].known.receive(beat(), b"1", "6.6.6.6")
    stage.settle()
    assert stage.results() == {"known": 1, "contested": 1}


async def test_two_processes_of_one_machine_until_one_is_silent() -> None:
    stage = Stage()
    for at in range(3):
        stage.workers[0].known.receive(beat(), b"1", "10.0.0.1")
        if at == 0:
            stage.workers[1].known.receive(beat(zmq="10.0.0.1:9"), b"2", "10.0.0.1")
        stage.settle()
        assert {one.wrong() is None for one in stage.workers} == {at == 2}
        await stage.wait(3)
    assert {one.owner() for one in stage.workers} == {stage.workers[0].owner()}


async def test_a_worker_that_begins_learns_what_others_know() -> None:
    """Also who is believed: a stranger that it hears first changes nothing."""
    stage = Stage()
    stage.workers[1].known.receive(beat(), b"1", "10.0.0.1")
    stage.workers[1].known.receive(beat(D, "D"), b"2", "10.0.0.2")
    stage.workers[1].known.receive(beat(D, "D", zmq="other:1"), b"3", "10.0.0.2")
    stage.workers[1].known.receive(beat(zmq="6.6.6.6:1"), b"4", "6.6.6.6")
    stage.settle()
    one = stage.restart(2)
    one.known.receive(beat(zmq="6.6.6.6:1"), b"5", "6.6.6.6")
    one.known.look()
    stage.workers[1].known.receive(beat(D, "D"), b"2", "10.0.0.2")  # behind its question
    assert not one.known.complete
    stage.settle()
    assert one.known.complete
    assert one.known.shortcomings() == stage.workers[0].known.shortcomings()
    for url in (P, D):
        assert one.owner(url) == stage.workers[0].owner(url)
    await stage.wait(TIMEOUT + 2)
    assert [one.wrong(url) for url in (P, D)] == ["has not registered"] * 2


async def test_what_comes_behind_the_question_is_taken_behind_the_answer() -> None:
    stage = Stage()
    stage.workers[1].is_stopped = True
    one = stage.restart(2)
    one.known.look()
    one.known.receive(beat(), b"1", "10.0.0.1")
    one.known.receive(beat(zmq="6.6.6.6:1"), b"2", "6.6.6.6")
    one.read()
    assert one.wrong() == "has not registered"
    stage.settle()
    assert one.owner() == stage.workers[0].owner()
    assert one.wrong() is None


async def test_a_leader_that_ends_before_it_answers() -> None:
    """It is asked again, or who leads in its place."""
    stage = Stage()
    stage.workers[0].known.receive(beat(), b"1", "10.0.0.1")
    stage.settle()
    stage.workers[0].is_stopped = True
    one = stage.restart(2)
    one.known.look()
    stage.settle()
    assert not one.known.complete
    stage.workers[0].lead.leads, stage.workers[1].lead.leads = False, True
    await stage.wait(ASK_EVERY)
    assert one.known.complete
    assert one.wrong() is None


async def test_who_leads_in_place_of_a_dead_one_learns_what_others_know() -> None:
    """And what has come behind its question; where nobody answers, it begins with nothing."""
    stage = Stage()
    stage.workers[1].known.receive(beat(), b"1", "10.0.0.1")
    stage.settle()
    for is_alone in (False, True):
        for one in stage.workers[1:]:
            one.is_stopped = is_alone
        one = stage.restart(0)
        one.known.look()
        one.known.receive(beat(D, "D"), b"2", "10.0.0.2")
        assert not one.known.complete
        stage.settle()
        await stage.wait(ASK_EVERY)
        assert one.known.complete
        assert (one.wrong(), one.wrong(D)) == ("has not registered" if is_alone else None, None)


async def test_an_engine_that_is_added_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    one = stage.workers[2]
    monkeypatch.setattr(one.known, "_started", True)
    one.engines.remove(P)
    stage.workers[0].known.receive(beat(), b"1", "10.0.0.1")
    stage.settle()
    one.engines.add(EngineSpec(P, Role.PREFILL), unused_client(P), registered_as=of_url(P, None))
    assert one.wrong() == "has not registered"
    stage.settle()
    assert one.wrong() is None
    assert one.known.complete


async def test_a_worker_that_was_stopped_asks_again() -> None:
    """It may have missed what was more than a link holds."""
    stage = Stage()
    one = stage.workers[2]
    one.is_stopped = True
    for _ in range(3):
        stage.workers[0].known.receive(beat(), b"1", "10.0.0.1")
        await stage.wait(3)
    one.inbox.clear()
    one.is_stopped = False
    assert one.wrong() == "has not registered"
    await stage.wait(ASK_EVERY)
    assert one.wrong() is None


async def test_too_much_behind_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_registration, "MAX_KEPT", 2)
    stage = Stage()
    stage.workers[0].is_stopped = True
    one = stage.restart(2)
    one.known.look()
    for _ in range(4):
        stage.workers[1].known.receive(beat(), b"1", "10.0.0.1")
        await stage.clock.advance(1)
        one.read()
    assert one.known._kept is None or len(one.known._kept) <= 2
    stage.workers[0].is_stopped = False
    stage.settle()
    assert one.known.complete
    assert one.owner() == stage.workers[0].owner()


async def test_what_is_of_no_engine_is_counted_where_it_comes() -> None:
    """Also behind a heartbeat that another worker has read and counted."""
    stage = Stage()
    stage.workers[0].known.receive(beat(), b"1", "10.0.0.1")
    stage.settle()
    one = stage.workers[1]
    one.known.unreadable()
    one.known.receive(beat("http://unknown:1"), b"1", "6.6.6.6")
    one.is_behind = True
    one.known.receive(beat(), b"1", "10.0.0.1")
    assert one.results == {"unreadable": 1, "unknown": 1, "not_passed": 1}
    assert stage.workers[0].results == {"known": 1}


async def test_a_flood_is_not_passed_on() -> None:
    """Of one engine and address only a few heartbeats are; of another address they still are."""
    stage = Stage()
    one = stage.workers[1]
    before = stage.passed
    for number in range(1000):
        one.known.receive(beat(zmq=f"x:{number}"), b"1", "6.6.6.6")
        one.known.receive(beat("http://unknown:1"), b"1", "6.6.6.6")
        one.known.unreadable()
    assert stage.passed - before == MAX_BEATS
    one.known.receive(beat(D, "D"), b"2", "10.0.0.2")
    stage.settle()
    assert {worker.wrong(D) for worker in stage.workers} == {None}
    assert stage.results()["not_passed"] == 1000 - MAX_BEATS
    assert stage.results()["unknown"] == stage.results()["unreadable"] == 1000
    for number in range(2 * MAX_SENDERS):
        one.known.receive(beat(), b"1", f"10.1.{number >> 8}.{number & 255}")
    assert len(one.known._passed) == MAX_SENDERS
    await stage.clock.advance(1)
    one.is_behind = True
    one.known.receive(beat(), b"1", "10.0.0.9")
    one.is_behind = False
    assert not any(len(worker.inbox) > MAX_SENDERS + 1 for worker in stage.workers)


async def test_a_heartbeat_that_fails_does_not_lose_what_is_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage()
    one = stage.workers[1]

    def fails(_: object) -> str:
        raise ValueError("made to fail")

    monkeypatch.setattr(one.known, "_read", fails)
    stage.workers[0].known.receive(beat(), b"1", "10.0.0.1")
    stage.settle()
    assert [str(error) for error in one.failures] == ["made to fail"]
    assert stage.workers[2].wrong() is None


@pytest.mark.parametrize("seed", range(40))
async def test_all_know_the_same_whatever_happens(seed: int) -> None:
    """Workers are stopped and killed while engines and strangers send: in the end nobody believes
    anybody else.
    """
    chance = random.Random(seed)
    stage = Stage()
    beats = [
        (beat(), "10.0.0.1"),
        (beat(zmq="10.0.0.1:9"), "10.0.0.1"),
        (beat(zmq="6.6.6.6:1"), "6.6.6.6"),
        (beat(D, "D"), "10.0.0.2"),
    ]
    for _ in range(120):
        one = chance.choice(stage.workers)
        what = chance.random()
        if what < 0.6:
            if not one.is_stopped:
                registration, address = chance.choice(beats)
                one.known.receive(registration, bytes([chance.randrange(3)]), address)
        elif what < 0.7:
            one.read()
        elif what < 0.9:
            await stage.wait(chance.choice((0.3, 1.0, 3.0, TIMEOUT)))
        elif what < 0.95:
            one.is_stopped = not one.is_stopped
        else:
            stage.restart(one.number).known.look()
    for one in stage.workers:
        one.is_stopped = False
    stage.settle()
    await stage.wait(2 * ASK_EVERY)
    assert sum(one.lead.leads for one in stage.workers) == 1
    assert all(one.known.complete for one in stage.workers)
    for url in (P, D):
        assert len({one.owner(url) for one in stage.workers}) == 1
        assert len({one.wrong(url) for one in stage.workers}) == 1
