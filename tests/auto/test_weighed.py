"""What a decision notes for those who ask why: the next best choice, and what made it lose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pdproxy.observe.weighed import Option, Weighed, tpot_of
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.slo import Slo
from tests.auto.fleets import Known, ask, auto, ledger

A, B = "http://0:1", "http://1:1"
FAR = Slo(ttft=2.0, tpot=0.03)


def weighed(
    *, before: int = 0, tokens: int = 4000, decoding: int = 0, known: Mapping[str, int] = {}
) -> tuple[str, Weighed]:
    """The engine that gets a prompt, of two, and what was weighed. `before`: tokens of a prompt
    that A computes already; `decoding`: streams at A; `known`: the prompt's tokens in caches.
    """
    index = Known()
    placement = auto(FAR, cached=index.cached)
    of = ledger(placement, [Role.ANY] * 2)
    for _ in range(decoding):
        placed = of.place(ask(0.0, 6000), split=False, without=[B])
        assert placed is not None
        of.began(placed.leases[-1], 0.5)
    if before:
        assert of.place(ask(1.0, before), split=False, without=[B]) is not None
    index.tokens = dict(known)
    found = of.place(ask(1.0, tokens), split=True)
    assert found is not None
    assert found.weighed is not None
    return found.leases[-1].engine.url, found.weighed


@pytest.mark.parametrize(
    ("case", "engine", "term"),
    [
        ({"before": 30_000}, B, "ttft"),
        ({"decoding": 120}, B, "tpot"),
        ({"known": {B: 3200}}, B, "cached"),
        ({"known": {A: 3200}, "before": 2000}, A, "cached"),
        ({"known": {B: 16}, "before": 30_000}, B, "ttft"),
    ],
)
def test_the_term_that_makes_the_difference_is_named(
    case: dict[str, Any], engine: str, term: str
) -> None:
    chosen, found = weighed(**case)
    assert found.other is not None
    assert (chosen, found.term()) == (engine, term), (found.chosen, found.other)
    assert found.engines == ((B if engine == A else A),)
    assert found.other.cost > found.chosen.cost
    for one in (found.chosen, found.other):
        parts = found.parts(one)
        assert sum(parts.values()) == pytest.approx(one.cost)
        assert min(parts.values()) > -1e-12
    assert (found.ttft, found.tpot) == (FAR.ttft, FAR.tpot)


def test_the_part_that_differs_most_for_the_worse_is_the_term() -> None:
    """Harm is what other parts leave of the cost."""
    option = Option(1.0, 1.0, 0.01, 0.2, 0.1, 0.7, 0.1, 0.0, 0)
    harmful = Option(1.6, 0.8, 0.01, 0.1, 0.1, 1.4, 0.1, 0.0, 0)
    pulled = Option(1.6, 0.8, 0.01, 0.1, 0.1, 0.7, 0.1, 0.1, 0)
    kept = Option(1.15, 1.0, 0.01, 0.2, 0.1, 0.7, 0.1, 0.0, 0)
    slow = Option(1.6, 1.8, 0.01, 0.8, 0.1, 0.7, 0.9, 0.0, 0)
    terms = [
        (harmful, "harm"),
        (pulled, "harm"),
        (kept, "kept"),
        (slow, "ttft"),  # the caches are not the cause
    ]
    for other, term in terms:
        assert Weighed(option, other, (A,), engine_s=0.1).term() == term
    assert Weighed(harmful, option, (A,), engine_s=0.1).term() == "ttft"
    assert Weighed(option).term() is None


def test_the_only_engine_is_no_choice() -> None:
    of = ledger(auto(), [Role.ANY])
    found = of.place(ask(0.0), split=True)
    assert found is not None
    assert found.weighed is not None
    assert (found.weighed.other, found.weighed.term()) == (None, None)


@pytest.mark.parametrize(
    ("bounds", "outcome", "ttft", "tpot", "good"),
    [
        ((1.0, 0.01), "ok", 1.0, 0.01, True),
        ((1.0, 0.01), "ok", 1.1, 0.01, False),
        ((1.0, 0.01), "ok", 1.0, 0.02, False),
        ((1.0, 0.01), "ok", 2.0, None, False),
        ((1.0, 0.01), "ok", 1.0, None, None),
        ((1.0, None), "ok", 1.0, None, True),
        ((None, 0.01), "ok", None, 0.01, True),
        ((None, None), "ok", 1.0, 0.01, None),
        ((1.0, 0.01), "engine", None, None, False),
        ((1.0, 0.01), "capacity", None, None, False),
        ((1.0, 0.01), "client_left", 2.0, None, None),
        ((1.0, 0.01), "client", None, None, None),
    ],
)
def test_a_request_is_good_by_its_own_slo(
    bounds: tuple[float | None, float | None],
    outcome: str,
    ttft: float | None,
    tpot: float | None,
    good: bool | None,
) -> None:
    found = Weighed(Option(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0), None, (), *bounds)
    assert found.good(outcome, ttft, tpot) is good


def test_tpot_is_the_mean_behind_the_first_token() -> None:
    assert tpot_of(1.0, 2.0, 11) == pytest.approx(0.1)
    assert [tpot_of(None, 2.0, 11), tpot_of(1.0, 2.0, None), tpot_of(1.0, 2.0, 1)] == [None] * 3
