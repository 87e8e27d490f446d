"""The ledger with a placement: whom it may choose from, what is leased, what it learns; and engines
for any role.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from pdproxy.scheduling.leases import Assignment, Verdict
from pdproxy.scheduling.ledger import ALONE, Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.scheduling.placements import PlacementContext
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.slo import NO_SLO, Slo
from tests.fakes.placement import Scripted, late, split, whole

ASK = Ask("m", 100, 5.0)
SPLIT = (Role.PREFILL, Role.DECODE)


def evidence(models: str = "m", version: str = "1") -> Evidence:
    return Evidence(frozenset(models), version, 16, ((1, 2),), 5, 1.0)


def spec(name: str, **more: object) -> EngineSpec:
    """An engine whose role is its name's first letter: p, d, a(ggregated) or x for any."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "a": Role.AGGREGATED, "x": Role.ANY}
    return EngineSpec(name, roles[name[0]], **more)  # type: ignore[arg-type]


def made(*specs: EngineSpec, alone: Sequence[Role] = ALONE) -> tuple[Ledger, Scripted]:
    """A ledger of engines that are up, and its placement."""
    placement = Scripted(PlacementContext())
    ledger = Ledger(
        specs,
        LedgerOptions(breaker_failures=1, breaker_cooldown=10, alone=alone, placement=placement),
    )
    for one in specs:
        ledger.mark_up(one.url, evidence())
    return ledger, placement


def names(placement: Scripted) -> tuple[str, str, str]:
    """The engines that the placement could choose from at last: whole, prefill, decode."""
    last = placement.candidates[-1]
    whole_, prefill, decode = (
        "".join(engine.url for engine in some) for some in (last.whole, last.prefill, last.decode)
    )
    return whole_, prefill, decode


def roles(assignment: Assignment | None) -> list[tuple[str, str]]:
    assert assignment is not None
    return [(lease.engine.url, lease.role.value) for lease in assignment.leases]


@pytest.mark.parametrize(
    ("engines", "alone", "wanted"),
    [
        ("p d", ALONE, ("d", "p", "d")),
        ("p d a", ALONE, ("ad", "p", "d")),
        ("p d a", (Role.AGGREGATED,), ("a", "p", "d")),
        ("p d", (Role.AGGREGATED, Role.PREFILL), ("p", "p", "d")),
        ("x x2", ALONE, ("xx2", "xx2", "xx2")),
        ("p x", ALONE, ("x", "px", "x")),
        ("x d", (Role.AGGREGATED,), ("x", "x", "xd")),
    ],
)
def test_who_may_do_what(engines: str, alone: Sequence[Role], wanted: tuple[str, str, str]) -> None:
    """Whole: engines of the roles that the contract allows, each once. What must be whole has no
    pairs.
    """
    ledger, placement = made(*[spec(name) for name in engines.split()], alone=alone)
    placement.usual = whole()
    assert ledger.place(ASK, split=True) is not None
    assert names(placement) == wanted
    assert ledger.place(ASK, split=False) is not None
    assert names(placement) == (wanted[0], "", "")


def test_a_prefill_engine_that_serves_whole_is_a_candidate() -> None:
    ledger, placement = made(spec("p", serves_whole=True), spec("d"))
    placement.usual = whole()
    assert roles(ledger.place(ASK, split=True)) == [("p", "aggregated")]
    assert names(placement) == ("pd", "p", "d")


def test_the_leases_say_what_each_engine_does() -> None:
    """Only the engine that computes the prompt has its bytes as load."""
    ledger, placement = made(spec("x"), spec("x2"))
    placement.choices.extend([split(0), split(1), whole(1)])
    placed = [ledger.place(ASK, split=True) for _ in range(3)]
    assert [roles(one) for one in placed] == [
        [("x", "prefill"), ("x2", "decode")],
        [("x2", "prefill"), ("x", "decode")],
        [("x2", "aggregated")],
    ]
    assert [(n.requests, n.prompt_bytes) for n in ledger.engines] == [(2, 100), (3, 200)]
    for one in placed:
        assert one is not None
        for lease in one.leases:
            ledger.began(lease, 6.0)
            ledger.close(lease, Verdict.GOOD, 7.0, 9)
            ledger.close(lease, Verdict.GOOD, 7.0, 9)
            ledger.began(lease, 8.0)
    assert [(n.requests, n.prompt_bytes) for n in ledger.engines] == [(0, 0), (0, 0)]
    assert Counter(what for what, *_ in placement.told) == {"opened": 5, "began": 5, "closed": 5}


def test_excluded_engines_are_a_last_resort() -> None:
    ledger, placement = made(spec("x"), spec("x2"))
    placement.usual = whole()
    assert roles(ledger.place(ASK, split=True, without={"x"})) == [("x2", "aggregated")]
    assert names(placement) == ("x2", "x2", "x2")
    assert ledger.place(ASK, split=True, without={"x", "x2"}) is not None
    assert names(placement) == ("xx2", "xx2", "xx2")


def test_engines_to_avoid_come_before_excluded_ones() -> None:
    """First those that are neither, then those that are to be avoided, then all."""
    ledger, placement = made(spec("x"), spec("x2"), spec("x3"))
    placement.usual = whole()
    assert ledger.place(ASK, split=True, without={"x"}, avoid={"x2"}) is not None
    assert names(placement) == ("x3", "x3", "x3")
    assert ledger.place(ASK, split=True, without={"x"}, avoid={"x2", "x3"}) is not None
    assert names(placement) == ("x2x3", "x2x3", "x2x3")
    assert ledger.place(ASK, split=True, avoid={"x", "x2", "x3"}) is not None
    assert names(placement) == ("xx2x3", "xx2x3", "xx2x3")


def test_open_breakers_full_engines_and_other_models_are_left_out() -> None:
    """Full: for another engine's KV only."""
    ledger, placement = made(spec("x"), spec("x2", places=1), spec("x3"))
    placement.usual = whole()
    first = ledger.place(ASK, split=True)
    assert first is not None
    ledger.close(first.leases[0], Verdict.FAILED, 5.0)
    placement.usual = whole(0)
    assert roles(ledger.place(ASK, split=True)) == [("x2", "aggregated")]
    assert names(placement) == ("x2x3", "x2x3", "x2x3")
    ledger.place(ASK, split=True)
    assert names(placement) == ("x2x3", "x3", "x3")
    ledger.mark_up("x3", evidence("n"))
    ledger.place(Ask("n", 1, 5.0), split=True)
    assert names(placement) == ("x3", "x3", "x3")


def test_an_open_breaker_counts_beside_engines_of_other_roles() -> None:
    """The only aggregated engine is no candidate while its breaker is open and a decode engine's is
    not.
    """
    ledger, placement = made(spec("a"), spec("d"))
    placement.usual = whole()
    first = ledger.place(ASK, split=False)
    assert roles(first) == [("a", "aggregated")]
    assert first is not None
    ledger.close(first.leases[0], Verdict.FAILED, 5.0)
    assert roles(ledger.place(ASK, split=False)) == [("d", "aggregated")]
    assert names(placement) == ("d", "", "")


def test_nobody_and_refused_are_different() -> None:
    ledger, placement = made(spec("p"), spec("d"))
    placement.usual = late
    assert ledger.place(ASK, split=True) is None
    assert ledger.is_placeable(ASK, split=True)
    ledger.mark_down("d", "gone", 5.0)
    assert ledger.place(ASK, split=True) is None
    assert not ledger.is_placeable(ASK, split=True), "a prefill engine alone serves nothing"
    assert len(placement.asks) == 1
    ledger, placement = made(spec("p"), spec("d"), alone=(Role.AGGREGATED,))
    ledger.eject("p", "d")
    assert ledger.place(ASK, split=True) is None
    assert not ledger.is_placeable(ASK, split=True), "and so do two that must not be paired"


def test_the_candidates_are_the_same_object_until_an_engine_changes() -> None:
    """So that a placement can keep what it computes of them. Models that nobody serves are not
    kept.
    """
    ledger, placement = made(spec("x"), spec("x2"))
    placement.usual = whole()
    for _ in range(3):
        ledger.place(ASK, split=True)
    assert len(set(map(id, placement.candidates))) == 1
    ledger.mark_down("x2", "gone", 5.0)
    ledger.place(ASK, split=True)
    assert placement.candidates[-1] is not placement.candidates[0]
    for n in range(5):
        ledger.place(Ask(f"model {n}", 1, 5.0), split=True)
    assert len(ledger._choice._known) == 1


def test_without_a_placement_nothing_can_be_placed() -> None:
    ledger = Ledger([spec("x")], LedgerOptions(breaker_failures=1, breaker_cooldown=10))
    with pytest.raises(RuntimeError, match="no placement"):
        ledger.place(ASK, split=True)
    assert not ledger.needs_details


# -- engines for any role under policies


@pytest.mark.parametrize("count", [2, 3, 5])
def test_engines_for_any_role_take_turns(count: int) -> None:
    """In both parts. The best prefill engine is also the best decode engine, so that a ranking
    decides each time.
    """
    ledger = Ledger(
        [spec(f"x{n}") for n in range(count)],
        LedgerOptions(breaker_failures=1, breaker_cooldown=10),
    )
    for engine in ledger.engines:
        ledger.mark_up(engine.url, evidence())
    pairs = []
    for _ in range(6 * count):
        assignment = ledger.assign(SPLIT, ASK)
        assert assignment is not None
        pairs.append([lease.engine.url for lease in assignment.leases])
        for lease in assignment.leases:
            ledger.close(lease, Verdict.GOOD, 5.0)
    for part in (0, 1):
        assert set(Counter(pair[part] for pair in pairs).values()) == {6}
    assert all(prefill != decode for prefill, decode in pairs)


def test_engines_for_any_role_share_load() -> None:
    """The load of one part counts in the others: kept requests spread over all engines."""
    ledger = Ledger(
        [spec(f"x{n}") for n in range(4)], LedgerOptions(breaker_failures=1, breaker_cooldown=10)
    )
    for engine in ledger.engines:
        ledger.mark_up(engine.url, evidence())
    for n in range(40):
        assert (ledger.assign(SPLIT, ASK) if n % 2 else ledger.assign_alone(ASK)) is not None
    assert {engine.requests for engine in ledger.engines} <= {14, 15, 16}


RACK_A, RACK_B = ((("rack", name),) for name in "ab")


@pytest.mark.parametrize(
    ("specs", "left"),
    [
        (
            [spec("p", within=RACK_A), spec("d", within=RACK_A), spec("d2", within=RACK_B)],
            ["decode d2"],
        ),
        ([spec("p", within=RACK_A), spec("d", within=RACK_B)], ["prefill p", "decode d"]),
        ([spec("p"), spec("p2"), spec("d", sources=frozenset({"p"}))], ["prefill p2"]),
        (
            [spec("x", within=RACK_A), spec("x2", within=RACK_A), spec("x3", within=RACK_B)],
            ["any x3"],
        ),
        ([spec("x", within=RACK_A), spec("d", within=RACK_A), spec("p", within=RACK_A)], []),
        ([spec("p", within=RACK_A), spec("d", within=RACK_A), spec("a", within=RACK_B)], []),
        ([spec("x")], []),
        ([spec("d"), spec("d2")], []),
        (
            [spec("p"), spec("x", sources=frozenset({"p"})), spec("x2", sources=frozenset({"p"}))],
            [],
        ),
    ],
)
def test_engines_that_the_settings_leave_no_partner_are_named(
    specs: list[EngineSpec], left: list[str]
) -> None:
    """A label that was misspelled would leave an engine idle for ever. Also while it is down: that
    changes nothing.
    """
    ledger = Ledger(specs, LedgerOptions(breaker_failures=1, breaker_cooldown=10))
    for one in specs:
        ledger.mark_up(one.url, evidence())
    said = [
        f"{name} shares work with no engine: sources and pair_within leave it none" for name in left
    ]
    assert ledger.shortcomings(0.0) == said
    ledger.mark_down(specs[-1].url, "gone", 0.0)
    assert [text for text in ledger.shortcomings(0.0) if "shares work" in text] == said


# -- objectives


def test_an_objective_overrides_another_where_it_says_something() -> None:
    pool = Slo(ttft=1.0, gap=0.1)
    assert Slo(ttft=0.2, tpot=0.01).over(pool) == Slo(0.2, 0.01, 0.1)
    assert NO_SLO.over(pool) == pool
    assert [bool(one) for one in (NO_SLO, pool, Slo(gap=0.1), Slo(tpot=1.0))] == [
        False,
        True,
        True,
        True,
    ]
