"""The ledger where engines have windows: those with room come first, and one without is better than
none.
"""

from __future__ import annotations

from collections import Counter

import pytest

from pdproxy.scheduling.leases import Verdict
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.placements import PlacementContext
from pdproxy.scheduling.policies import POLICIES
from pdproxy.scheduling.policy import Ask
from tests.fakes.placement import Scripted, whole
from tests.unit.test_ledger_place import SPLIT, evidence, names, spec

ASK = Ask("m", 100, 5.0)


def made(
    *urls: str, placement: Scripted | None = None, policy: str = "round_robin", **windows: float
) -> Ledger:
    """A ledger of engines that are up."""
    ledger = Ledger(
        [spec(url, **({"sources": frozenset({"p2"})} if url == "d2" else {})) for url in urls],
        LedgerOptions(
            breaker_failures=1,
            breaker_cooldown=10,
            policies=dict.fromkeys((Role.PREFILL, Role.DECODE), POLICIES[policy]),
            placement=placement,
            windows=True,
        ),
    )
    for engine in ledger.engines:
        ledger.mark_up(engine.url, evidence())
        engine.window = windows.get(engine.url)
    return ledger


def pairs(ledger: Ledger, count: int) -> Counter[str]:
    """Lease so many pairs; return how many leases each engine got."""
    found: Counter[str] = Counter()
    for _ in range(count):
        assignment = ledger.assign(SPLIT, ASK)
        assert assignment is not None
        found.update(lease.engine.url for lease in assignment.leases)
    return found


def test_a_full_engine_gets_no_more_while_another_has_room() -> None:
    """Whatever the policy ranks by. One without a window always has room."""
    assert pairs(made("p1", "d1", "d3", d1=3.0), 10) == {"p1": 10, "d1": 3, "d3": 7}
    assert pairs(made("p1", "p3", "d1", p1=2.5), 10) == {"p1": 3, "p3": 7, "d1": 10}


def test_where_none_has_room_the_policy_chooses() -> None:
    """How many requests there may be is not decided here, but before (`Admission`)."""
    assert pairs(made("p1", "d1", "d3", d1=1.0, d3=3.0), 12)["d1"] in (5, 6)


def test_room_is_no_reason_for_a_pair_that_does_not_fit() -> None:
    """The decode engine with room takes KV from one prefill engine only, and that one comes before
    it.
    """
    ledger = made("p1", "d1", "d2", d1=1.0)
    assert pairs(ledger, 4) == {"p1": 4, "d1": 4}, "there is no p2"


@pytest.mark.parametrize("policy", ["round_robin", "least_load"])
def test_one_engine_that_serves_alone(policy: str) -> None:
    """Also one of another role, if that has room."""
    ledger = made("a1", "a3", "d1", policy=policy, a1=2.0, a3=3.0)
    found = Counter(
        lease.engine.url
        for lease in (ledger.assign_alone(ASK) for _ in range(9))
        if lease is not None
    )
    assert (found["a1"], found["a3"], found["d1"]) == (2, 3, 4)
    assert ledger.assign_alone(ASK, without=["d1"]) is not None


def test_a_placement_chooses_among_those_with_room() -> None:
    """All are candidates again where none has room, and where only they can serve the request."""
    placement = Scripted(PlacementContext())
    ledger = made("p1", "d1", "d3", placement=placement, d1=1.0, d3=1.0)
    for left in ("d1d3", "d3", "d1d3"):
        placement.choices.append(whole())
        ledger.place(ASK, split=True)
        assert names(placement) == (left, "p1", left)
    assert ledger.is_placeable(ASK, split=True)


def test_room_comes_back_with_the_end_of_a_request() -> None:
    ledger = made("p1", "d1", "d3", d1=1.0)
    first = ledger.assign(SPLIT, ASK)
    assert first is not None
    while first[Role.DECODE].engine.url != "d1":
        first = ledger.assign(SPLIT, ASK)
        assert first is not None
    assert pairs(ledger, 4)["d1"] == 0
    ledger.close(first[Role.DECODE], Verdict.GOOD, 6.0)
    assert pairs(ledger, 4)["d1"] == 1
