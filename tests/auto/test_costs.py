"""What a choice costs: a request is missed once, whatever it misses."""

from __future__ import annotations

import math

import pytest
from msgspec import structs

from pdproxy.scheduling.auto.costs import Costs, chance
from pdproxy.scheduling.auto.loads import PredictedLoad
from pdproxy.scheduling.auto.times import WorkTimes
from pdproxy.scheduling.auto.weights import WEIGHTS
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.slo import Slo
from tests.auto.fleets import H200, ask, auto, ledger, node

MISSES_ALONE = structs.replace(WEIGHTS, ttft=0.0, tpot=0.0, engine_s=0.0)
"""Latencies and seconds of engines cost nothing."""
MISSES = pytest.mark.parametrize(
    ("slo", "misses"),
    [
        (Slo(ttft=0.001, tpot=0.0001), 1.0),
        (Slo(ttft=0.001, tpot=1.0), 1.0),
        (Slo(ttft=9.0, tpot=0.0001), 1.0),
        (Slo(ttft=9.0, tpot=1.0), 0.0),
    ],
)


@MISSES
def test_a_whole_request_that_misses_both_limits_is_one_miss(slo: Slo, misses: float) -> None:
    of = ledger(auto(slo, weights=MISSES_ALONE), [Role.AGGREGATED])
    assignment = of.place(ask(1.0), split=False)
    assert assignment is not None
    assert assignment.weighed is not None
    chosen = assignment.weighed.chosen
    parts = assignment.weighed.parts(chosen)
    assert parts["ttft"] + parts["tpot"] == pytest.approx(misses, abs=1e-3)
    assert chosen.cost == pytest.approx(misses, abs=1e-3)


@MISSES
def test_a_split_request_that_misses_both_limits_is_one_miss(slo: Slo, misses: float) -> None:
    costs = Costs(slo, MISSES_ALONE)
    prefill, decode = (
        costs.look(PredictedLoad(node(url), WorkTimes(H200, 2048)), 1.0, 4000, 0, 128.0, 0.0)
        for url in ("http://0:1", "http://1:1")
    )
    for look in (prefill, decode):
        costs.answer(look, 1.0, 4000, 128.0)
    assert costs.split(prefill, decode, 4000, 1.0).cost == pytest.approx(misses, abs=1e-3)


@pytest.mark.parametrize(("tokens", "misses"), [(7999, 1.0), (8000, 3.0)])
@pytest.mark.parametrize("own", [None, Slo(ttft=0.0015)])
def test_the_miss_of_a_long_prompt_counts_as_many(
    tokens: int, misses: float, own: Slo | None
) -> None:
    """Also where the client names a limit of its own."""
    slo = Slo(ttft=0.001, tpot=0.0001, long_prompt=8000, long_weight=3.0)
    of = ledger(auto(slo, weights=MISSES_ALONE), [Role.AGGREGATED])
    assignment = of.place(ask(1.0, tokens, slo=own), split=False)
    assert assignment is not None
    assert assignment.weighed is not None
    assert assignment.weighed.chosen.cost == pytest.approx(misses, abs=1e-3)


def test_answers_to_long_prompts_are_worth_as_many_as_they_count() -> None:
    """A prompt delays either an engine's three short requests or another's long one."""

    def chosen(long_weight: float) -> str:
        slo = Slo(ttft=2.0, tpot=0.01, long_prompt=8000, long_weight=long_weight)
        of = ledger(auto(slo), [Role.AGGREGATED] * 2)
        places = []
        for tokens in (8000, 500, 500, 500):
            assignment = of.place(ask(1.0, tokens), split=False)
            assert assignment is not None
            places.append(assignment.leases[0])
        long, *short = places
        assert all(lease.engine is not long.engine for lease in short)
        for lease in places:
            of.began(lease, 2.0)
        assignment = of.place(ask(2.0, 6000), split=False)
        assert assignment is not None
        return "long" if assignment.leases[0].engine is long.engine else "short"

    assert (chosen(1.0), chosen(9.0)) == ("long", "short")


@pytest.mark.parametrize(
    ("distance", "found"), [(-1e9, 0.0), (-math.inf, 0.0), (0.0, 0.5), (1e9, 1.0), (math.inf, 1.0)]
)
def test_a_chance_is_one_however_far_the_limit_is(distance: float, found: float) -> None:
    assert chance(distance) == found
