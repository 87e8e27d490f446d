"""The ledger under any sequence of events: loads, leases, breakers, ejections."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdproxy.scheduling.ledger import Lease, Ledger, Verdict
from pdproxy.scheduling.nodes import Evidence, Node, NodeSpec, Role

SPECS = [
    NodeSpec("p1", Role.PREFILL),
    NodeSpec("p2", Role.PREFILL),
    NodeSpec("d1", Role.DECODE),
    NodeSpec("d2", Role.DECODE),
    NodeSpec("a1", Role.AGGREGATED),
]
URLS = [spec.url for spec in SPECS]


def evidence(models: str = "m", version: str = "1", started: float = 1.0, block: int | None = 16) -> Evidence:
    """What an engine says of itself."""
    return Evidence(frozenset(models), version, block, ((1, 2),), 5, started)


def ledger(*, probed: bool = True) -> Ledger:
    """All engines, up and alike."""
    made = Ledger(SPECS, breaker_failures=2, breaker_cooldown=10)
    if probed:
        for url in URLS:
            made.saw(url, evidence())
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
        size=st.integers(0, 1000), model=st.sampled_from(["m", None, "other"]), without=st.sets(st.sampled_from(URLS))
    )
    def pair(self, size: int, model: str | None, without: set[str]) -> None:
        got = self.ledger.pair(model, size, self.now, without=without)
        if got is None:
            return
        p, d = got.prefill.node, got.decode.node
        assert (p.role, d.role) == (Role.PREFILL, Role.DECODE)
        assert frozenset((p.url, d.url)) not in self.ejected
        assert not {p.url, d.url} & (self.down | without)
        for node in (p, d):
            assert node.alive
            alike = [n for n in self.ledger.nodes if n.role is node.role and n.url not in without]
            assert node.usable(self.now) or not any(n.usable(self.now) for n in alike)
        assert model != "other"
        assert p.evidence is not None
        assert d.evidence is not None
        assert p.evidence.difference(d.evidence) is None
        self.open += [got.prefill, got.decode]

    @rule(size=st.integers(0, 1000), model=st.sampled_from(["m", None, "other"]))
    def alone(self, size: int, model: str | None) -> None:
        lease = self.ledger.alone(model, size, self.now)
        if lease is not None:
            assert lease.node.role is not Role.PREFILL
            assert lease.node.url not in self.down
            others = [n for n in self.ledger.nodes if n.role is not Role.PREFILL]
            assert lease.node.usable(self.now) or not any(n.usable(self.now) for n in others)
            self.open.append(lease)

    @rule(data=st.data(), verdict=st.sampled_from(Verdict))
    def close(self, data: st.DataObject, verdict: Verdict) -> None:
        if self.open:
            lease = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
            self.ledger.close(lease, verdict, self.now)
            if verdict is Verdict.UNREACHABLE:
                self.down.add(lease.node.url)
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
        node = next(node for node in self.ledger.nodes if node.url == url)
        if restarted:
            self.started += 1
        assert node.evidence is not None
        found = evidence(version=version, started=self.started if restarted else node.evidence.started)
        if found != node.evidence:
            self.ejected = {pair for pair in self.ejected if url not in pair}
        self.ledger.saw(url, found)
        self.down.discard(url)

    @rule(url=st.sampled_from(URLS))
    def lost(self, url: str) -> None:
        assert self.ledger.lost(url, "gone", self.now) is (url not in self.down)
        self.down.add(url)

    @rule(seconds=st.floats(0.1, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def loads_are_what_is_open(self) -> None:
        for node in self.ledger.nodes:
            mine = [lease for lease in self.open if lease.node is node]
            assert node.requests == len(mine)
            assert node.prompt_bytes == sum(lease.prompt_bytes for lease in mine)
            assert node.failures >= 0
        assert isinstance(self.ledger.shortcomings(self.now), list)
        alive = [n for n in self.ledger.nodes if n.alive]
        assert {n.url for n in alive} == set(URLS) - self.down
        assert (self.ledger.not_ready() is None) is any(n.role is not Role.PREFILL for n in alive)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_least_loaded_is_taken() -> None:
    """Prefill by outstanding bytes, decode by requests."""
    made = ledger()
    first = made.pair("m", 1000, 0)
    second = made.pair("m", 10, 0)
    third = made.pair("m", 10, 0)
    assert first is not None
    assert second is not None
    assert third is not None
    assert second.prefill.node is third.prefill.node
    assert second.prefill.node is not first.prefill.node
    assert {first.decode.node.url, second.decode.node.url} == {"d1", "d2"}


def test_ties_go_round_for_each_role() -> None:
    """Requests one after the other use all engines of both roles alike."""
    made = ledger()
    used: list[str] = []
    for _ in range(8):
        pair = made.pair("m", 1, 0)
        assert pair is not None
        used += [pair.prefill.node.url, pair.decode.node.url]
        for lease in (pair.prefill, pair.decode):
            made.close(lease, Verdict.GOOD, 0)
    assert {url: used.count(url) for url in URLS[:4]} == dict.fromkeys(URLS[:4], 4)


def test_the_breaker() -> None:
    """Failures in a row shut an engine out for the cooldown; one good leg forgives."""
    made = ledger()

    def fail(now: float, verdict: Verdict = Verdict.FAILED) -> bool:
        lease = made.alone("m", 0, now)
        assert lease is not None
        assert lease.node.url == "a1"
        return made.close(lease, verdict, now)

    assert [fail(0), fail(0, Verdict.GOOD), fail(0), fail(0)] == [False, False, False, True]
    other = made.alone("m", 0, 9.9)
    assert other is not None
    assert other.node.role is Role.DECODE
    assert fail(10) is True, "the first failure after the cooldown shuts it out again"
    assert any("shut out" in line for line in made.shortcomings(11))


def test_the_breaker_never_takes_the_last_engine() -> None:
    """Where all engines of a role, or of a model, are shut out, they are used all the same, and the pool stays ready."""
    made = ledger()
    made.saw("d1", evidence(models="x"))
    made.lost("a1", "gone", 0)

    def shut_out(url: str) -> None:
        for _ in range(2):
            lease = made.alone("x" if url == "d1" else "m", 0, 0)
            assert lease is not None
            assert lease.node.url == url
            made.close(lease, Verdict.FAILED, 0)

    shut_out("d1")
    only = made.alone("x", 0, 1)
    assert only is not None
    assert only.node.url == "d1", "d2 would only say that it does not know the model"
    shut_out("d2")
    assert not any(node.usable(1) for node in made.nodes if node.role is Role.DECODE)
    pair = made.pair("m", 1, 1)
    assert pair is not None
    assert pair.decode.node.url == "d2"
    assert made.not_ready() is None
    for url in ("d1", "d2"):
        made.lost(url, "gone", 1)
    assert made.pair("m", 1, 1) is None, "an engine that is down is no engine"
    assert "d1 gone; d2 gone; a1 gone" in (made.not_ready() or "")


def test_how_long_an_engine_has_been_down() -> None:
    """It counts from the first bad news, not from each repetition, and ends with the first good one."""
    made = ledger()
    node = made.nodes[2]
    assert (node.alive, node.down_for(50)) == (True, 0)
    assert made.lost("d1", "gone", 10) is True
    assert made.lost("d1", "still gone", 20) is False
    assert (node.alive, node.down_for(25)) == (False, 15)
    made.saw("d1", evidence())
    assert (node.alive, node.down_for(30)) == (True, 0)
    lease = made.alone("m", 0, 31, without={"a1", "d2"})
    assert lease is not None
    made.close(lease, Verdict.UNREACHABLE, 31)
    assert node.down_for(32) == 1


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (evidence(models="x"), "no model in common"),
        (evidence(version="2"), "different versions"),
        (evidence(block=32), "different block sizes"),
        (Evidence(frozenset("m"), "1", 16, ((9,),), 5, 1.0), "canary"),
        (evidence(started=99), None),
    ],
)
def test_differences(other: Evidence, why: str | None) -> None:
    """Everything that makes KV of one engine wrong for another counts; the start time does not."""
    found = evidence().difference(other)
    assert (found is None) is (why is None)
    assert why is None or why in (found or "")


def test_a_release_goes_to_an_engine_that_knows_the_model() -> None:
    """A handle is given back where its model is served, and elsewhere than where it failed."""
    made = ledger()
    made.saw("d2", evidence(models="x"))
    node = made.releaser("http://p1", "m", 0, prefer_not="d2")
    assert node is not None
    assert node.url == "d1"
    made.saw("d2", evidence())
    for _ in range(3):
        node = made.releaser("http://p1", "m", 0, prefer_not="d1")
        assert node is not None
        assert node.url == "d2"


def test_not_ready_before_all_are_probed() -> None:
    """A pool that has not been looked at is not ready, and names whom it waits for."""
    made = ledger(probed=False)
    assert "p1, p2, d1, d2, a1" in (made.not_ready() or "")
    assert made.pair("m", 1, 0) is None
    assert made.alone("m", 1, 0) is None


def plainly(nodes: list[Node], role: Role, turns: dict[Role, int]) -> Node:
    """The least loaded engine of a role by the definition: in the order of the settings, begun at the next turn."""
    mine = [node for node in nodes if node.role is role]
    if len(mine) > 1:
        turns[role] += 1
        mine = mine[turns[role] % len(mine) :] + mine[: turns[role] % len(mine)]
    loads = {
        node.url: (node.prompt_bytes, node.requests) if role is Role.PREFILL else (node.requests, node.prompt_bytes)
        for node in mine
    }
    return min(mine, key=lambda node: loads[node.url])


@given(
    st.integers(1, 12), st.integers(1, 12), st.integers(0, 2),
    st.lists(st.tuples(st.sampled_from(["pair", "alone", "close", "down", "up"]), st.integers(0, 40)), max_size=120),
)  # fmt: skip
def test_choosing_is_as_defined(prefills: int, decodes: int, others: int, steps: list[tuple[str, int]]) -> None:
    """Whatever the loads, and whoever goes and comes back: the engines that are chosen are those of the plain definition."""
    counts = ((Role.PREFILL, prefills), (Role.DECODE, decodes), (Role.AGGREGATED, others))
    specs = [NodeSpec(f"{role.value}{n}", role) for role, count in counts for n in range(count)]
    made = Ledger(specs, breaker_failures=2, breaker_cooldown=10)
    for spec in specs:
        made.saw(spec.url, evidence())
    turns = dict.fromkeys(Role, 0)
    leases: list[Lease] = []
    for act, number in steps:
        up = [node for node in made.nodes if node.alive]
        roles = {node.role for node in up}
        if act == "pair" and {Role.PREFILL, Role.DECODE} <= roles:
            wanted = [plainly(up, role, turns) for role in (Role.PREFILL, Role.DECODE)]
            got = made.pair("m", number, 0.0)
            assert got is not None
            assert [got.prefill.node, got.decode.node] == wanted
            leases += [got.prefill, got.decode]
        elif act == "alone" and roles - {Role.PREFILL}:
            best = [plainly(up, role, turns) for role in (Role.AGGREGATED, Role.DECODE) if role in roles]
            lease = made.alone("m", number, 0.0)
            assert lease is not None
            assert lease.node is best[0]
            leases.append(lease)
        elif act == "close" and leases:
            made.close(leases.pop(number % len(leases)), Verdict.GOOD, 0.0)
        elif act == "down":
            made.lost(specs[number % len(specs)].url, "gone", 0.0)
        elif act == "up":
            made.saw(specs[number % len(specs)].url, evidence())


SOURCES = [
    NodeSpec("p1", Role.PREFILL),
    NodeSpec("p2", Role.PREFILL),
    NodeSpec("d1", Role.DECODE, frozenset({"p1"})),
    NodeSpec("d2", Role.DECODE, frozenset({"p2"})),
    NodeSpec("d3", Role.DECODE),
]


def test_a_decode_engine_with_sources_takes_from_no_other() -> None:
    """Whatever the loads are: pairs are as configured, and without sources all of all."""
    made = Ledger(SOURCES, breaker_failures=2, breaker_cooldown=10)
    for spec in SOURCES:
        made.saw(spec.url, evidence())
    seen = set()
    for size in range(60):
        pair = made.pair("m", size % 7, 0.0)
        assert pair is not None
        seen.add((pair.prefill.node.url, pair.decode.node.url))
    assert seen == {("p1", "d1"), ("p1", "d3"), ("p2", "d2"), ("p2", "d3")}
    assert made.shortcomings(0.0) == [], "pairs that nobody wants are no shortcoming"


def test_a_decode_engine_whose_sources_are_gone_is_in_no_pair() -> None:
    """Another prefill engine is up, but not one of its own."""
    made = Ledger(SOURCES[:3], breaker_failures=2, breaker_cooldown=10)
    for url in ("p1", "p2", "d1"):
        made.saw(url, evidence())
    assert made.pair("m", 1, 0.0) is not None
    made.lost("p1", "gone", 0.0)
    assert made.pair("m", 1, 0.0) is None
    assert made.alone("m", 1, 0.0) is not None
    p2, d1 = made.nodes[1], made.nodes[2]
    assert made.unlike(p2, d1) == "not configured as a pair"


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
def test_which_life_of_an_engine_it_is(before: Evidence, after: Evidence, down: bool, another: bool) -> None:
    """Its start tells, whatever was between. Where it tells none, one that was down or has changed may be another one."""
    made = ledger(probed=False)
    unseen = made.life("p1")
    made.saw("p1", before)
    first, other = made.life("p1"), made.life("p2")
    assert len({unseen, first, other}) == 3
    if down:
        made.lost("p1", "gone", 0.0)
        assert made.life("p1") == first
    made.saw("p1", after)
    assert (made.life("p1") != first) is another
    assert made.life("p2") == other
