"""One of several replicas: what is estimated of the others' load, and that our own is never lost in
it.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdproxy.scheduling.auto.auto import AutoOptions
from pdproxy.scheduling.auto.replica import ReplicaAuto
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.scheduling.placement import NotYetError
from pdproxy.scheduling.policies import POLICIES
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.replicas import MAX_REPLICAS, MAX_REPORTED, ReplicaLedger, others
from tests.auto.fleets import H200, B, auto
from tests.unit.test_ledger import SPECS, SPLIT, URLS, evidence

COUNTS = st.integers(0, 10_000)
REPLICAS = st.integers(1, MAX_REPLICAS)


def made(
    *,
    replicas: int = 4,
    max_age: float = 15.0,
    specs: list[EngineSpec] = SPECS,
    policy: str | None = None,
) -> ReplicaLedger:
    """All engines, up and compatible."""
    policies = (
        {} if policy is None else dict.fromkeys((Role.PREFILL, Role.DECODE), POLICIES[policy])
    )
    of = ReplicaLedger(
        specs,
        LedgerOptions(
            breaker_failures=2,
            breaker_cooldown=10,
            policies=policies,
            chance=random.Random(0).random,
        ),
        replicas=replicas,
        max_age=lambda: max_age,
    )
    for spec in specs:
        of.mark_up(spec.url, evidence())
    return of


def plain(count: int) -> list[EngineSpec]:
    return [EngineSpec(f"a{at}", Role.AGGREGATED) for at in range(count)]


def one(of: Ledger, size: int = 10, now: float = 0.0) -> Lease:
    lease = of.assign_alone(Ask("m", size, now))
    assert lease is not None
    return lease


# -- the formula


@given(own=COUNTS, replicas=REPLICAS)
def test_without_a_report_ours_stands_for_that_of_all(own: int, replicas: int) -> None:
    assert own + others(own, replicas) == replicas * own


@given(own=COUNTS, reported=st.floats(0, MAX_REPORTED), replicas=REPLICAS)
def test_at_a_report_the_load_is_what_was_reported(
    own: int, reported: float, replicas: int
) -> None:
    """But never less than our own."""
    assert own + others(own, replicas, reported, own) == max(own, round(reported))


@given(own=COUNTS, then=COUNTS, reported=st.floats(0, MAX_REPORTED), replicas=REPLICAS)
def test_each_lease_since_the_report_counts_for_all_replicas(
    own: int, then: int, reported: float, replicas: int
) -> None:
    """One that began adds as many as there are replicas, where the others have any; one that ended
    takes as many.
    """
    load, more = (count + others(count, replicas, reported, then) for count in (own, own + 1))
    assert load >= own
    assert 1 <= more - load <= replicas
    if load > own:
        assert more - load == replicas


@given(own=COUNTS, then=COUNTS, reported=st.floats(0, MAX_REPORTED))
def test_with_one_replica_the_report_is_what_others_had(
    own: int, then: int, reported: float
) -> None:
    assert others(own, 1, reported, then) == max(0, round(reported) - then)


# -- the ledger


class ReplicaMachine(RuleBasedStateMachine):
    """Any events in any order: an engine's load is always that of our open leases, and what is
    estimated of others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = made()
        self.open: list[Lease] = []
        self.draining: set[str] = set()
        self.gone: dict[str, EngineSpec] = {}
        self.now = 0.0
        self.runs = 1.0

    @rule(size=st.integers(0, 1000), pair=st.booleans())
    def lease(self, size: int, pair: bool) -> None:
        ask = Ask("m", size, self.now)
        got = self.ledger.assign(SPLIT, ask) if pair else self.ledger.assign_alone(ask)
        self.open += [] if got is None else [got] if isinstance(got, Lease) else got.leases

    @rule(at=st.integers(0, 1000), verdict=st.sampled_from(Verdict))
    def close(self, at: int, verdict: Verdict) -> None:
        if self.open:
            self.ledger.close(self.open.pop(at % len(self.open)), verdict, self.now)

    @rule(
        url=st.sampled_from([*URLS, "unknown"]),
        count=st.none() | st.floats(allow_nan=False) | st.integers(-(2**70), 2**70),
    )
    def report(self, url: str, count: float | None) -> None:
        self.ledger.reported(url, count, self.now)

    @rule(url=st.sampled_from(URLS), why=st.sampled_from((None, "draining")))
    def drain(self, url: str, why: str | None) -> None:
        self.ledger.mark_draining(url, why)
        if url not in self.gone:
            (self.draining.discard if why is None else self.draining.add)(url)

    @rule(url=st.sampled_from(URLS))
    def restart(self, url: str) -> None:
        if url not in self.gone:
            self.runs += 1
            self.ledger.mark_up(url, evidence(started=self.runs))

    @rule(url=st.sampled_from(URLS))
    def remove_or_add(self, url: str) -> None:
        if url in self.gone:
            self.ledger.add(self.gone.pop(url))
            self.ledger.mark_up(url, evidence())
        else:
            self.gone[url] = next(spec for spec in SPECS if spec.url == url)
            self.ledger.remove(url)
            self.draining.discard(url)

    @rule(replicas=st.integers(1, 8))
    def count(self, replicas: int) -> None:
        self.ledger.use_replicas(replicas)

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def ours_is_not_lost(self) -> None:
        engines = {
            id(engine): engine
            for engine in (*self.ledger.engines, *(lease.engine for lease in self.open))
        }
        for engine in engines.values():
            ours = [lease for lease in self.open if lease.engine is engine]
            assert engine.requests - engine.of_replicas[0] == len(ours)
            assert engine.prompt_bytes - engine.of_replicas[1] == sum(
                lease.prompt_bytes for lease in ours
            )
            assert 0 <= engine.of_replicas[0] <= MAX_REPORTED + 8 * len(ours)
            assert engine.of_replicas[1] >= 0
            if engine.url in self.draining or engine.url in self.gone:
                assert engine.of_replicas == (0, 0)


TestReplicaMachine = ReplicaMachine.TestCase
TestReplicaMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("policy", POLICIES)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_one_replica_without_reports_chooses_as_a_plain_ledger(policy: str, seed: int) -> None:
    chance = random.Random(seed)
    policies = dict.fromkeys((Role.PREFILL, Role.DECODE), POLICIES[policy])
    same: list[Ledger] = [
        made(replicas=1, policy=policy),
        Ledger(
            SPECS,
            LedgerOptions(
                breaker_failures=2,
                breaker_cooldown=10,
                policies=policies,
                chance=random.Random(0).random,
            ),
        ),
    ]
    for url in URLS:
        same[1].mark_up(url, evidence())
    leases: list[list[Lease]] = []
    for step in range(60):
        if leases and chance.random() < 0.4:
            for of, lease in zip(same, leases.pop(chance.randrange(len(leases))), strict=True):
                of.close(lease, Verdict.GOOD, float(step))
            continue
        ask = Ask("m", chance.randrange(1000), float(step), session=chance.choice((None, "a", "b")))
        pair = chance.random() < 0.5
        got = [of.assign(SPLIT, ask) if pair else of.assign_alone(ask) for of in same]
        found = [
            list(each.leases) if each is not None and not isinstance(each, Lease) else [each]
            for each in got
        ]
        for ours, theirs in zip(*found, strict=True):
            assert isinstance(ours, Lease)
            assert isinstance(theirs, Lease)
            assert ours.engine.url == theirs.engine.url
            leases.append([ours, theirs])


@pytest.mark.parametrize("policy", ["least_load", "session", "prefix"])
def test_an_engine_that_others_use_gets_less(policy: str) -> None:
    of = made(specs=plain(4), policy=policy)
    of.reported("a0", 8, 0.0)
    for url in ("a1", "a2", "a3"):
        of.reported(url, 0, 0.0)
    seen = Counter(one(of).engine.url for _ in range(6))
    assert seen == {"a1": 2, "a2": 2, "a3": 2}
    assert Counter(one(of).engine.url for _ in range(4)) == {"a0": 1, "a1": 1, "a2": 1, "a3": 1}, (
        "each stands for four"
    )


def test_a_report_that_is_too_old_does_not_count() -> None:
    """Nor one of an engine that reports nothing any more: it would get no requests for ever."""
    of = made(specs=plain(2), max_age=15.0)
    of.reported("a0", 50, 0.0)
    of.reported("a1", 50, 10.0)
    assert [engine.requests for engine in of.engines] == [50, 50]
    of.reported("unknown", 0, 15.5)
    assert [engine.requests for engine in of.engines] == [0, 50]
    of.reported("a1", None, 16.0)
    assert [engine.requests for engine in of.engines] == [0, 0]


def test_a_report_of_another_run_does_not_count() -> None:
    of = made(specs=plain(1))
    of.reported("a0", 50, 0.0)
    of.mark_up("a0", evidence(started=2.0))
    lease = one(of)
    assert lease.engine.requests == 4


def test_others_prompts_are_taken_to_be_as_large_as_ours() -> None:
    specs = [
        EngineSpec("p1", Role.PREFILL),
        EngineSpec("p2", Role.PREFILL),
        EngineSpec("d1", Role.DECODE),
    ]
    of = made(specs=specs, replicas=2)
    for _ in range(1000):
        assignment = of.assign(SPLIT, Ask("m", 600, 0.0))
        assert assignment is not None
        for lease in assignment.leases:
            of.close(lease, Verdict.GOOD, 0.0)
    of.reported("p1", 3, 0.0)
    first, second, decode = of.engines
    assert (first.requests, first.prompt_bytes) == (3, 1800)
    assert (second.prompt_bytes, decode.prompt_bytes) == (0, 0)
    for _ in range(2):
        assignment = of.assign(SPLIT, Ask("m", 600, 0.0))
        assert assignment is not None
        assert assignment[Role.PREFILL].engine is second


@pytest.mark.parametrize("count", [1e308, float("inf"), 2**63])
def test_an_engine_can_report_anything(count: float) -> None:
    of = made(specs=plain(2))
    of.reported("a0", count, 0.0)
    for less in (-count, float("nan")):
        of.reported("a1", less, 0.0)
        assert [engine.requests for engine in of.engines] == [MAX_REPORTED, 0]
    assert one(of).engine.url == "a1"


# -- the placement


def placing(replicas: int | None, engines: int = 4) -> ReplicaLedger:
    """A ledger with `auto`. `replicas` None: the placement does not know of others."""
    urls = [f"http://{at}:1" for at in range(engines)]
    of = ReplicaLedger(
        [EngineSpec(url, Role.ANY) for url in urls],
        LedgerOptions(
            breaker_failures=2,
            breaker_cooldown=10,
            placement=auto(B)
            if replicas is None
            else ReplicaAuto(
                AutoOptions(times_of=lambda _: (H200, 2048), slo=B),
                replicas=replicas,
                chance=lambda: 0.0,
            ),
        ),
        replicas=replicas or 1,
        max_age=lambda: 15.0,
    )
    for url in urls:
        of.mark_up(url, Evidence(frozenset("m"), "", 16, (), 0, 1.0))
    return of


def place(of: Ledger, now: float, tokens: int = 4000) -> tuple[Lease, ...]:
    assignment = of.place(Ask("m", 4 * tokens, now, tokens=tokens), split=True)
    assert assignment is not None
    return assignment.leases


@given(seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_auto_with_one_replica_chooses_as_if_it_were_alone(seed: int) -> None:
    chance = random.Random(seed)
    pair, now = (placing(None), placing(1)), 0.0
    leases: list[list[tuple[Lease, ...]]] = []
    for _ in range(80):
        now += chance.expovariate(20.0)
        if leases and chance.random() < 0.4:
            both = leases.pop(0)
            for of, own in zip(pair, both, strict=True):
                if len(own) > 1:
                    of.close(own[0], Verdict.GOOD, now)
                of.began(own[-1], now)
                of.close(own[-1], Verdict.GOOD, now, 50)
            continue
        tokens = chance.randrange(200, 8000)
        later, found = set(), []
        for of in pair:
            try:
                found.append(place(of, now, tokens))
            except NotYetError as error:
                later.add(error.at)
        if later:
            assert len(later) == 1
            assert not found
            continue
        assert [[lease.engine.url for lease in own] for own in found[:1]] == [
            [lease.engine.url for lease in own] for own in found[1:]
        ]
        leases.append(found)


def test_auto_avoids_engines_that_others_use() -> None:
    of = placing(4, engines=8)
    for at in range(40):  # so that it knows what requests are like
        leases = place(of, at * 0.05)
        of.began(leases[-1], at * 0.05 + 0.02)
        if at % 2:
            for lease in leases:
                of.close(lease, Verdict.GOOD, at * 0.05 + 0.04, 100)
    for engine in of.engines:
        of.reported(engine.url, 60 if engine.url in ("http://0:1", "http://1:1") else 0, 2.0)
    seen = Counter(lease.engine.url for at in range(18) for lease in place(of, 2.3 + at * 0.001))
    assert not seen["http://0:1"] + seen["http://1:1"]
    assert len(seen) == 6
