"""The ledger under any sequence of events: loads, leases, breakers, ejections."""

# How engines are ranked: test_policy.py.

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdproxy.scheduling.compatibility import prefill_and_decode
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.scheduling.policy import Ask

SPECS = [
    EngineSpec("p1", Role.PREFILL),
    EngineSpec("p2", Role.PREFILL),
    EngineSpec("d1", Role.DECODE),
    EngineSpec("d2", Role.DECODE),
    EngineSpec("a1", Role.AGGREGATED),
]
URLS = [spec.url for spec in SPECS]
SPLIT = (Role.PREFILL, Role.DECODE)


def evidence(
    models: str = "m", version: str = "1", started: float = 1.0, block: int | None = 16
) -> Evidence:
    """What an engine reports about itself."""
    return Evidence(frozenset(models), version, block, ((1, 2),), 5, started)


def ledger(*, probed: bool = True) -> Ledger:
    """All engines, up and compatible."""
    made = Ledger(SPECS, LedgerOptions(breaker_failures=2, breaker_cooldown=10))
    if probed:
        for url in URLS:
            made.mark_up(url, evidence())
    return made


class LedgerMachine(RuleBasedStateMachine):
    """Any events in any order, beside a simple model of what must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ledger()
        self.open: list[Lease] = []
        self.closed: list[Lease] = []
        self.ejected: set[frozenset[str]] = set()
        self.down: set[str] = set()
        self.now = 0.0
        self.started = 1.0

    @rule(
        size=st.integers(0, 1000),
        model=st.sampled_from(["m", None, "other"]),
        without=st.sets(st.sampled_from(URLS)),
    )
    def pair(self, size: int, model: str | None, without: set[str]) -> None:
        got = self.ledger.assign(SPLIT, Ask(model, size, self.now), without=without)
        if got is None:
            return
        p, d = (lease.engine for lease in got.leases)
        assert (p.role, d.role) == (Role.PREFILL, Role.DECODE)
        assert frozenset((p.url, d.url)) not in self.ejected
        assert not {p.url, d.url} & (self.down | without)
        for engine in (p, d):
            assert engine.up
            others = [
                n for n in self.ledger.engines if n.role is engine.role and n.url not in without
            ]
            assert engine.usable(self.now) or not any(n.usable(self.now) for n in others)
        assert model != "other"
        assert p.evidence is not None
        assert d.evidence is not None
        assert p.evidence.difference(d.evidence) is None
        self.open += got.leases

    @rule(size=st.integers(0, 1000), model=st.sampled_from(["m", None, "other"]))
    def alone(self, size: int, model: str | None) -> None:
        lease = self.ledger.assign_alone(Ask(model, size, self.now))
        if lease is not None:
            assert lease.engine.role is not Role.PREFILL
            assert lease.engine.url not in self.down
            others = [n for n in self.ledger.engines if n.role is not Role.PREFILL]
            assert lease.engine.usable(self.now) or not any(n.usable(self.now) for n in others)
            self.open.append(lease)

    @rule(data=st.data(), verdict=st.sampled_from(Verdict))
    def close(self, data: st.DataObject, verdict: Verdict) -> None:
        if self.open:
            lease = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
            self.ledger.close(lease, verdict, self.now)
            if verdict in (Verdict.UNREACHABLE, Verdict.DEAD):
                self.down.add(lease.engine.url)
            self.closed.append(lease)

    @rule(data=st.data(), verdict=st.sampled_from(Verdict))
    def close_again(self, data: st.DataObject, verdict: Verdict) -> None:
        if self.closed:
            lease = data.draw(st.sampled_from(range(len(self.closed))).map(self.closed.__getitem__))
            before = repr(self.ledger)
            assert self.ledger.close(lease, verdict, self.now) is False
            assert repr(self.ledger) == before

    @rule(p=st.sampled_from(["p1", "p2"]), d=st.sampled_from(["d1", "d2"]))
    def eject(self, p: str, d: str) -> None:
        self.ledger.eject(p, d)
        self.ejected.add(frozenset((p, d)))

    @rule(url=st.sampled_from(URLS), restarted=st.booleans(), version=st.sampled_from("12"))
    def saw(self, url: str, restarted: bool, version: str) -> None:
        engine = next(engine for engine in self.ledger.engines if engine.url == url)
        if restarted:
            self.started += 1
        assert engine.evidence is not None
        found = evidence(
            version=version, started=self.started if restarted else engine.evidence.started
        )
        if found != engine.evidence:
            self.ejected = {pair for pair in self.ejected if url not in pair}
        self.ledger.mark_up(url, found)
        self.down.discard(url)

    @rule(url=st.sampled_from(URLS))
    def lost(self, url: str) -> None:
        assert self.ledger.mark_down(url, "gone", self.now) is (url not in self.down)
        self.down.add(url)

    @rule(seconds=st.floats(0.1, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def loads_are_what_is_open(self) -> None:
        for engine in self.ledger.engines:
            mine = [lease for lease in self.open if lease.engine is engine]
            assert engine.requests == len(mine)
            assert engine.prompt_bytes == sum(lease.prompt_bytes for lease in mine)
            assert engine.failures >= 0
        assert isinstance(self.ledger.shortcomings(self.now), list)
        alive = [n for n in self.ledger.engines if n.up]
        assert {n.url for n in alive} == set(URLS) - self.down
        assert (self.ledger.not_ready() is None) is any(n.role is not Role.PREFILL for n in alive)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("without", [(), ("none of these",)])
def test_the_least_loaded_is_taken(without: tuple[str, ...]) -> None:
    """Prefill by outstanding bytes, decode by requests, whether engines are excluded or not."""
    made = ledger()
    first = made.assign(SPLIT, Ask("m", 1000, 0), without=without)
    second = made.assign(SPLIT, Ask("m", 10, 0), without=without)
    third = made.assign(SPLIT, Ask("m", 10, 0), without=without)
    assert first is not None
    assert second is not None
    assert third is not None
    assert second[Role.PREFILL].engine is third[Role.PREFILL].engine
    assert second[Role.PREFILL].engine is not first[Role.PREFILL].engine
    fourth = made.assign(SPLIT, Ask("m", 10, 0), without=without)
    assert fourth is not None
    assert fourth[Role.PREFILL].engine is second[Role.PREFILL].engine, (
        "three short prompts are less work than a long one"
    )
    assert {first[Role.DECODE].engine.url, second[Role.DECODE].engine.url} == {"d1", "d2"}


def test_ties_go_round_for_each_role() -> None:
    """Requests one after the other use all engines of both roles equally."""
    made = ledger()
    used: list[str] = []
    for _ in range(8):
        pair = made.assign(SPLIT, Ask("m", 1, 0))
        assert pair is not None
        used += [pair[Role.PREFILL].engine.url, pair[Role.DECODE].engine.url]
        for lease in pair.leases:
            made.close(lease, Verdict.GOOD, 0)
    assert {url: used.count(url) for url in URLS[:4]} == dict.fromkeys(URLS[:4], 4)


def test_which_engines_work_beside_idle_ones() -> None:
    """Those for decode, while one for prefill could be used and has no request of any proxy."""
    made = ledger()
    assert [url for url in (*URLS, "removed") if made.works_beside_idle(url, 0)] == ["d1", "d2"]
    first = made.assign(SPLIT, Ask("m", 1, 0))
    assert first is not None
    assert made.works_beside_idle("d1", 0)
    second = made.assign(SPLIT, Ask("m", 1, 0))
    assert second is not None
    assert not made.works_beside_idle("d1", 0)
    made.close(first[Role.PREFILL], Verdict.GOOD, 0)
    assert made.works_beside_idle("d1", 0)
    idle = first[Role.PREFILL].engine
    made.mark_draining(idle.url, "by an operator")
    assert not made.works_beside_idle("d1", 0)
    made.mark_draining(idle.url, None)
    made.exclude(idle.url, "slow", 10, 0)
    assert not made.works_beside_idle("d1", 0)
    assert made.works_beside_idle("d1", 10)


def test_how_long_an_engine_has_been_down() -> None:
    """It counts from the first failed probe, not from later ones, and ends with the first good
    probe.
    """
    made = ledger()
    engine = made.engines[2]
    assert (engine.up, engine.down_for(50)) == (True, 0)
    assert made.mark_down("d1", "gone", 10) is True
    assert made.mark_down("d1", "still gone", 20) is False
    assert (engine.up, engine.down_for(25)) == (False, 15)
    made.mark_up("d1", evidence())
    assert (engine.up, engine.down_for(30)) == (True, 0)
    lease = made.assign_alone(Ask("m", 0, 31), without={"a1", "d2"})
    assert lease is not None
    made.close(lease, Verdict.UNREACHABLE, 31)
    assert engine.down_for(32) == 1


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (evidence(models="x"), "no model in common"),
        (evidence(version="2"), "different versions"),
        (evidence(block=32), "different block sizes"),
        (Evidence(frozenset("m"), "1", 16, ((9,),), 5, 1.0), "canary"),
        (replace(evidence(), counts=(7, 9)), "canary message"),
        (replace(evidence(), counts=(7, None)), None),
        (evidence(started=99), None),
    ],
)
def test_differences(other: Evidence, why: str | None) -> None:
    """Everything that makes KV of one engine wrong for another counts; the start time does not."""
    found = replace(evidence(), counts=(7, 8)).difference(other)
    assert (found is None) is (why is None)
    assert why is None or why in (found or "")


def test_an_engine_that_does_not_know_the_model_replaces_none_that_does() -> None:
    """Its 404 would be the answer, though the model exists: the one that failed is asked again
    instead.
    """
    made = Ledger(
        [EngineSpec("d1", Role.DECODE), EngineSpec("d2", Role.DECODE)],
        LedgerOptions(breaker_failures=2, breaker_cooldown=10),
    )
    made.mark_up("d1", evidence())
    made.mark_up("d2", evidence(models="x"))
    assert made.assign_alone(Ask("m", 1, 0), without=["d1"]) is None
    for model, without, wanted in (("m", [], "d1"), ("x", ["d1"], "d2"), ("unknown", ["d1"], "d2")):
        lease = made.assign_alone(Ask(model, 1, 0), without=without)
        assert lease is not None
        assert lease.engine.url == wanted
        made.close(lease, Verdict.GOOD, 0)


def test_a_release_goes_to_an_engine_that_knows_the_model() -> None:
    """A handle is released where its model is served, and not where it failed."""
    made = ledger()
    made.mark_up("d2", evidence(models="x"))
    engine = made.releasing.through("http://p1", "m", 0, prefer_not="d2")
    assert engine is not None
    assert engine.url == "d1"
    made.mark_up("d2", evidence())
    for _ in range(3):
        engine = made.releasing.through("http://p1", "m", 0, prefer_not="d1")
        assert engine is not None
        assert engine.url == "d2"


def test_not_ready_before_all_are_probed() -> None:
    """A pool that was not probed yet is not ready, and names the engines that it waits for."""
    made = ledger(probed=False)
    assert "p1, p2, d1, d2, a1" in (made.not_ready() or "")
    assert made.assign(SPLIT, Ask("m", 1, 0)) is None
    assert made.assign_alone(Ask("m", 1, 0)) is None


def test_an_engine_that_is_added_later_does_not_make_it_unready() -> None:
    """Only the engines of the start are waited for, all of them; a later one stands in the details
    until it was probed.
    """
    made = ledger(probed=False)
    for engine in made.engines[1:]:
        made.mark_up(engine.url, evidence())
    assert "not probed yet: p1" in (made.not_ready() or "")
    made.mark_down("p1", "gone", 0.0)
    assert made.not_ready() is None
    made.add(EngineSpec("d9", Role.DECODE))
    assert made.not_ready() is None
    assert "decode d9: not probed yet" in made.shortcomings(0.0)
    for url in ("d1", "d2", "a1"):
        made.mark_down(url, "gone", 0.0)
    assert "no decode or aggregated engine is up" in (made.not_ready() or "")


def test_an_unprobed_engine_that_is_removed_is_not_waited_for() -> None:
    """And a ledger without engines is not past its start."""
    made = ledger(probed=False)
    for engine in made.engines[1:]:
        made.mark_up(engine.url, evidence())
    made.remove("p1")
    assert made.not_ready() is None
    empty = Ledger([], LedgerOptions(breaker_failures=3, breaker_cooldown=5))
    empty.add(EngineSpec("d", Role.DECODE))
    assert "starting" in (empty.not_ready() or "")


@pytest.mark.parametrize(("gone", "why"), [(None, None), ("p1", ": p1 gone"), ("d1", ": d1 gone")])
def test_where_no_decode_engine_serves_alone_a_pool_needs_both(
    gone: str | None, why: str | None
) -> None:
    specs = [SPECS[0], SPECS[2]]
    options = LedgerOptions(breaker_failures=3, breaker_cooldown=5, alone=(Role.AGGREGATED,))
    made = Ledger(specs, options)
    for spec in specs:
        made.mark_up(spec.url, evidence())
    if gone is not None:
        made.mark_down(gone, "gone", 0.0)
    found = made.not_ready()
    assert found is None if why is None else (found or "").endswith(f"a decode engine{why}")


@pytest.mark.parametrize("url", ["p1", "d1"])
def test_an_engine_that_has_changed_is_paired_again(url: str) -> None:
    """With those that counted other lengths of prompts before."""
    specs = [SPECS[0], SPECS[2]]
    made = Ledger(specs, LedgerOptions(breaker_failures=3, breaker_cooldown=5))
    for spec in specs:
        made.mark_up(spec.url, evidence())
    made.eject("p1", "d1")
    assert made.assign(SPLIT, Ask("m", 1, 0.0)) is None
    made.mark_up(url, evidence(started=2.0))
    assert made.assign(SPLIT, Ask("m", 1, 0.0)) is not None


SOURCES = [
    EngineSpec("p1", Role.PREFILL),
    EngineSpec("p2", Role.PREFILL),
    EngineSpec("d1", Role.DECODE, frozenset({"p1"})),
    EngineSpec("d2", Role.DECODE, frozenset({"p2"})),
    EngineSpec("d3", Role.DECODE),
]


def test_a_decode_engine_with_sources_takes_from_no_other() -> None:
    """Whatever the loads are: pairs are as configured, and a decode engine without sources takes
    from every prefill engine.
    """
    made = Ledger(SOURCES, LedgerOptions(breaker_failures=2, breaker_cooldown=10))
    for spec in SOURCES:
        made.mark_up(spec.url, evidence())
    seen = set()
    for size in range(60):
        pair = made.assign(SPLIT, Ask("m", size % 7, 0.0))
        assert pair is not None
        seen.add((pair[Role.PREFILL].engine.url, pair[Role.DECODE].engine.url))
    assert seen == {("p1", "d1"), ("p1", "d3"), ("p2", "d2"), ("p2", "d3")}
    assert made.shortcomings(0.0) == [], "pairs that are not configured are no shortcoming"


def test_a_decode_engine_whose_sources_are_gone_is_in_no_pair() -> None:
    """Another prefill engine is up, but not one of its own."""
    made = Ledger(SOURCES[:3], LedgerOptions(breaker_failures=2, breaker_cooldown=10))
    for url in ("p1", "p2", "d1"):
        made.mark_up(url, evidence())
    assert made.assign(SPLIT, Ask("m", 1, 0.0)) is not None
    made.mark_down("p1", "gone", 0.0)
    assert made.assign(SPLIT, Ask("m", 1, 0.0)) is None
    assert made.assign_alone(Ask("m", 1, 0.0)) is not None
    p2, d1 = made.engines[1], made.engines[2]
    assert prefill_and_decode(p2, d1) == "not configured as a pair"


def run_of(made: Ledger, url: str) -> int:
    """The number of an engine's present run."""
    return next(engine.run_number for engine in made.engines if engine.url == url)


@pytest.mark.parametrize(
    ("before", "after", "down", "another"),
    [
        (evidence(), evidence(), True, False),
        (evidence(), evidence("mn"), False, False),
        (evidence(), evidence(started=2.0), False, True),
        (evidence(started=0.0), evidence(started=0.0), False, False),
        (evidence(started=0.0), evidence(started=0.0), True, True),
        (evidence(started=0.0), evidence("mn", started=0.0), False, True),
        (evidence(), evidence(started=0.0), True, True),
    ],
)
def test_which_run_of_an_engine_it_is(
    before: Evidence, after: Evidence, down: bool, another: bool
) -> None:
    """Its start time decides. Where it reports none, an engine that was down or has changed may be
    another run.
    """
    made = ledger(probed=False)
    unseen = run_of(made, "p1")
    made.mark_up("p1", before)
    first, other = run_of(made, "p1"), run_of(made, "p2")
    assert len({unseen, first, other}) == 3
    if down:
        made.mark_down("p1", "gone", 0.0)
        assert run_of(made, "p1") == first
    made.mark_up("p1", after)
    assert (run_of(made, "p1") != first) is another
    assert run_of(made, "p2") == other


def test_the_end_of_an_engines_run_is_reported() -> None:
    """Once it is down, and if it was started again unseen. Not for what it only reports anew, or
    for a breaker.
    """
    made, lost = ledger(), list[str]()
    made.when_lost(lost.append)
    made.mark_up("p1", evidence())
    made.mark_up("p1", evidence(models="n"))
    assert lost == []
    made.mark_up("p1", evidence(started=2.0))
    assert lost == ["p1"]
    made.mark_down("p2", "no answer", 1.0)
    made.mark_down("p2", "no answer", 2.0)
    assert lost == ["p1", "p2"]
    made.mark_up("p2", evidence())
    assert lost == ["p1", "p2"]
    for _ in range(2):
        lease = made.assign_alone(Ask("n", 1, 0.0))
        assert lease is not None
        made.close(lease, Verdict.FAILED, 0.0)
    engine = next(one for one in made.engines if one.url == "d1")
    made.remove("d1")
    made.mark_removed(engine, None, 3.0)
    made.mark_removed(engine, "gone", 4.0)
    made.mark_removed(engine, "gone", 5.0)
    assert lost == ["p1", "p2", "d1"]


def test_an_engine_that_takes_no_connection_is_lost() -> None:
    made, lost = ledger(), list[str]()
    made.when_lost(lost.append)
    assignment = made.assign(SPLIT, Ask("m", 1, 0.0))
    assert assignment is not None
    made.close(assignment.leases[0], Verdict.UNREACHABLE, 1.0)
    assert lost == [assignment.leases[0].engine.url]


@pytest.mark.parametrize("verdict", [Verdict.FAILED, Verdict.GOOD])
def test_legs_of_a_removed_engine_move_no_breaker(verdict: Verdict) -> None:
    """They end as they may: the engine stays removed, and no engine looks as if it were out of
    use.
    """
    made = ledger()
    found = [made.assign(SPLIT, Ask("m", 1, 0.0)) for _ in range(8)]
    leases = [
        lease
        for one in found
        if one is not None
        for lease in one.leases
        if lease.engine.url == "p1"
    ]
    assert len(leases) > 2
    made.close(leases.pop(), Verdict.FAILED, 0.0)
    made.remove("p1")
    for lease in leases:
        assert not made.close(lease, verdict, 1.0)
    engine = leases[0].engine
    assert not made.breakers.opened
    assert not engine.usable(1e9)
    assert (engine.requests, engine.trial_places) == (0, 0)


def test_an_engine_falls_asleep_and_wakes_once() -> None:
    made = ledger()
    assert [
        made.mark_asleep(url, how)
        for url, how in (("d1", "1"), ("d1", "1"), ("d1", None), ("gone", "1"))
    ] == [
        True,
        False,
        True,
        False,
    ]
    made.mark_asleep("d1", "2")
    found = [made.assign(SPLIT, Ask("m", 1, 0.0)) for _ in range(4)]
    assert {lease.engine.url for one in found if one is not None for lease in one.leases} == {
        "p1",
        "p2",
        "d2",
    }


def test_a_model_that_only_a_stalled_engine_serves_is_waited_for() -> None:
    """No other engine is asked: its 404 would be wrong. One that is down is not waited for."""
    made = Ledger(
        [EngineSpec("d1", Role.DECODE), EngineSpec("d2", Role.DECODE)],
        LedgerOptions(breaker_failures=3, breaker_cooldown=10),
    )
    made.mark_up("d1", evidence("a"))
    made.mark_up("d2", evidence("b"))
    ask = Ask("a", 1, 0.0)
    changes: list[None] = []
    made.when_changed(lambda: changes.append(None))
    made.mark_stalled("d1", "stands still")
    assert changes
    assert made.assign_alone(ask) is None
    assert (made.may_return("a"), made.may_return("b"), made.may_return("c")) == (
        True,
        False,
        False,
    )
    assert (lease := made.assign_alone(Ask("c", 1, 0.0))) is not None
    assert lease.engine.url == "d2"
    made.mark_down("d1", "refused", 0.0)
    assert not made.may_return("a")
    assert made.assign_alone(ask) is not None
