"""Breakers of several workers: failures count together, one that opens is open in all, one request
of all tries it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdproxy.kit.shared_table import SharedTable
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger import LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, LedgerEngine, Role
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.worker_breakers import KEPT, MEASURES, WorkerBreakers
from pdproxy.scheduling.worker_ledger import MEASURES as LOADS
from pdproxy.scheduling.worker_ledger import LedgerShare, WorkerLedger

EVIDENCE = Evidence(frozenset({"m"}), "1", 16, ((1, 2),), 5, 1.0)
SPECS = [EngineSpec("a0", Role.AGGREGATED), EngineSpec("a1", Role.AGGREGATED)]
COOLDOWN = 10.0


def shared(table: SharedTable, number: int) -> Callable[[int, float, float], WorkerBreakers]:
    """What makes the breakers of a worker."""
    return partial(
        WorkerBreakers, column=table.column(number), others=table.others(number), number=number
    )


class Workers:
    """The ledgers of so many workers, and a time."""

    def __init__(self, count: int = 2, slow_start: float = 0.0) -> None:
        self.loads = SharedTable(count, 8, LOADS)
        self.table = SharedTable(count, 8, MEASURES, KEPT)
        self.slow_start = slow_start
        self.now = 100.0
        self.ledgers = [self.made(number) for number in range(count)]

    def made(self, number: int) -> WorkerLedger:
        """A worker's ledger, of a process that begins."""
        made = WorkerLedger(
            SPECS,
            LedgerOptions(
                breaker_failures=3, breaker_cooldown=COOLDOWN, slow_start=self.slow_start
            ),
            LedgerShare(*self.loads.of(number), shared(self.table, number)),
        )
        for engine in made.engines:
            with made.following(engine):
                made.mark_up(engine.url, EVIDENCE)
        return made

    def killed(self, number: int) -> None:
        """A worker ends, and another process begins in its place."""
        for table in (self.loads, self.table):
            table.clear(number)
        self.ledgers[number] = self.made(number)

    def lease(self, number: int, without: str = "a1") -> Lease:
        """A request of a worker that goes to one engine if it may go there."""
        self.now += 0.01
        lease = self.ledgers[number].assign_alone(Ask("m", 10, self.now), without=(without,))
        assert lease is not None
        return lease

    def ends(self, number: int, lease: Lease, verdict: Verdict) -> bool:
        """It ends."""
        return self.ledgers[number].close(lease, verdict, self.now)

    def fails(self, number: int, times: int = 1) -> bool:
        """So many requests to the engine fail. Return whether the last one has opened its
        breaker.
        """
        return [self.ends(number, self.lease(number), Verdict.FAILED) for _ in range(times)][-1]

    def engine(self, number: int, url: str = "a0") -> LedgerEngine:
        """An engine as a worker sees it now."""
        self.ledgers[number].refresh()
        return next(engine for engine in self.ledgers[number].engines if engine.url == url)

    def states(self) -> list[str]:
        """How each worker sees the engine."""
        return [self.engine(number).state(self.now) for number in range(len(self.ledgers))]


def test_failures_of_all_workers_open_the_breaker_in_all() -> None:
    workers = Workers(3)
    assert [workers.fails(number) for number in range(3)] == [False, False, True]
    assert workers.states() == ["excluded"] * 3
    assert [workers.engine(number).failures for number in range(3)] == [3] * 3
    assert [workers.engine(number).open_until for number in range(3)] == pytest.approx(
        [workers.now + COOLDOWN] * 3
    )


def test_a_good_leg_of_any_worker_ends_the_row_of_failures() -> None:
    workers = Workers()
    workers.fails(0, 2)
    good = workers.lease(1)
    assert workers.engine(1).failures == 2
    workers.ends(1, good, Verdict.GOOD)
    assert workers.fails(0, 2) is False
    assert workers.fails(1) is True


def test_one_request_of_all_tries_an_engine_behind_its_cooldown() -> None:
    """The others' requests go to another engine, and what it shows holds for all."""
    workers = Workers(3)
    workers.fails(0, 3)
    workers.now += COOLDOWN
    assert workers.states() == ["half_open"] * 3
    leases = [
        workers.ledgers[number].assign_alone(Ask("m", 10, workers.now))
        for number in (1, 0, 2, 0, 1, 2)
        for _ in range(3)
    ]
    trials = [lease for lease in leases if lease is not None and lease.engine.url == "a0"]
    assert len(trials) == 1
    workers.ends(1, trials[0], Verdict.GOOD)
    assert workers.states() == ["up"] * 3
    assert [ledger.breakers.opened for ledger in workers.ledgers] == [set()] * 3


def test_a_trial_that_fails_opens_it_in_all_again() -> None:
    workers = Workers()
    workers.fails(0, 3)
    workers.now += COOLDOWN
    trial = workers.lease(1)
    assert trial.trial
    assert workers.ends(1, trial, Verdict.FAILED) is True
    assert workers.states() == ["excluded"] * 2


def test_a_trial_of_a_killed_worker_is_made_by_another() -> None:
    """Its breaker and what all have counted stay, also for the worker's successor."""
    workers = Workers()
    workers.fails(0, 3)
    workers.now += COOLDOWN
    assert workers.lease(0).trial
    assert not workers.engine(1).takes(workers.now)
    workers.killed(0)
    assert workers.states() == ["half_open"] * 2
    trial = workers.lease(1)
    assert trial.trial
    workers.ends(1, trial, Verdict.GOOD)
    assert workers.states() == ["up"] * 2


def test_a_worker_that_starts_again_counts_on() -> None:
    workers = Workers()
    workers.fails(0, 2)
    workers.killed(0)
    assert workers.engine(0).failures == 2
    assert workers.fails(0) is True
    workers.killed(0)
    assert workers.states() == ["excluded"] * 2


def test_a_slow_start_gives_all_workers_together_its_places() -> None:
    workers = Workers(2, slow_start=8.0)
    workers.fails(0, 3)
    workers.now += COOLDOWN
    workers.ends(1, workers.lease(1), Verdict.GOOD)
    assert workers.states() == ["slow_start"] * 2
    leases = [workers.ledgers[at % 2].assign_alone(Ask("m", 10, workers.now)) for at in range(12)]
    assert sum(lease is not None and lease.engine.url == "a0" for lease in leases) == 2
    workers.now += 8.0
    for ledger in workers.ledgers:
        ledger.assign_alone(Ask("m", 10, workers.now))
    assert workers.states() == ["up"] * 2


def test_a_cooldown_ends_at_the_same_moment_in_all_workers() -> None:
    """Also at one that would be another float after a way through nanoseconds."""
    workers, ends = Workers(), 172181.16914658798
    workers.ledgers[0].exclude("a0", "slow", ends, workers.now)
    assert workers.states() == ["excluded"] * 2
    workers.now = ends
    assert workers.states() == ["half_open"] * 2


def test_what_another_worker_has_found_changes_its_breaker_once() -> None:
    """Each worker hears that an engine is up again: the second must not take back what has happened
    since.
    """
    workers = Workers()
    for number in range(2):
        workers.ledgers[number].mark_down("a0", "gone", workers.now)
    workers.ledgers[0].mark_up("a0", EVIDENCE)
    workers.fails(0, 3)
    assert workers.engine(0).state(workers.now) == "excluded"
    with workers.ledgers[1].following(workers.engine(1)):
        workers.ledgers[1].mark_up("a0", EVIDENCE)
    assert workers.states() == ["excluded"] * 2


def test_why_an_engine_is_excluded_is_passed_on() -> None:
    workers = Workers()
    workers.ledgers[0].exclude("a0", "slow", workers.now + 30, workers.now)
    engine = workers.engine(1)
    assert (engine.state(workers.now), engine.excluded_because) == ("excluded", None)
    workers.ledgers[1].breakers.explain(engine, "slow")
    assert engine.excluded_because == "slow"
    workers.now += 30
    workers.ends(1, workers.lease(1), Verdict.GOOD)
    assert [workers.engine(number).excluded_because for number in range(2)] == [None, None]


def test_legs_of_a_removed_engine_end_without_effect() -> None:
    workers = Workers()
    leases = [workers.lease(0) for _ in range(4)]
    workers.ledgers[0].remove("a0")
    for lease in leases:
        workers.ends(0, lease, Verdict.FAILED)
    assert workers.engine(1).state(workers.now) == "up"
    assert workers.ledgers[0].add(SPECS[0]).failures == 0


class AsOne(RuleBasedStateMachine):
    """Any course of requests at two workers gives the states that one process has."""

    def __init__(self) -> None:
        super().__init__()
        self.workers = Workers()
        self.one = Workers(1)
        self.open: list[tuple[int, Lease, Lease]] = []

    @rule(number=st.integers(0, 1))
    def begins(self, number: int) -> None:
        self.one.now = self.workers.now
        self.open.append((number, self.workers.lease(number), self.one.lease(0)))

    @rule(
        at=st.integers(0, 99),
        verdict=st.sampled_from([Verdict.GOOD, Verdict.FAILED, Verdict.FAILED, Verdict.NEUTRAL]),
    )
    def ends(self, at: int, verdict: Verdict) -> None:
        if self.open:
            number, lease, one = self.open.pop(at % len(self.open))
            self.workers.engine(number)
            opened = self.workers.ends(number, lease, verdict)
            self.one.now = self.workers.now
            assert opened == self.one.ends(0, one, verdict)

    @rule(seconds=st.sampled_from([1.0, COOLDOWN / 2, COOLDOWN]))
    def waits(self, seconds: float) -> None:
        self.workers.now += seconds

    @invariant()
    def is_as_in_one_process(self) -> None:
        self.one.now = self.workers.now
        assert self.workers.states() == self.one.states() * 2
        one = self.one.engine(0)
        for number in range(2):
            engine = self.workers.engine(number)
            assert engine.failures == one.failures
            if one.trial_places:
                assert engine.trials == one.trials


TestAsOne = AsOne.TestCase
TestAsOne.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
