"""How many engines are kept for prefill, and that this does not change without a reason."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from msgspec import structs

from pdproxy.scheduling.auto.demand import Demand, DemandMeter
from pdproxy.scheduling.auto.loads import PredictedLoad
from pdproxy.scheduling.auto.roles import REVIEW_S, KeptEngines, typical
from pdproxy.scheduling.auto.times import WorkTimes
from pdproxy.scheduling.auto.weights import WEIGHTS
from pdproxy.scheduling.leases import Lease, Verdict
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.slo import Slo
from tests.auto.fleets import H200, B, ask, auto, ledger, node

A = Slo(ttft=0.5, tpot=0.015)
G = Slo(ttft=2.0, gap=0.05)


def demand(rate: float, tokens: int, output: int, times: WorkTimes) -> Demand:
    meter, found, number = DemandMeter(), None, 0
    for review in range(80):
        while number / rate < review * REVIEW_S:
            meter.add(number / rate, tokens, 0, output)
            number += 1
        found = meter.demand(review * REVIEW_S, times)
    assert found is not None
    assert found.rate == pytest.approx(rate, rel=0.1)
    return found


def settled(
    slo: Slo, engines: int, asked: Demand, times: WorkTimes, *, seconds: float = 20.0
) -> KeptEngines:
    kept = KeptEngines(slo, WEIGHTS)
    loads = [PredictedLoad(node(f"http://{number}:1"), times) for number in range(engines)]
    for review in range(int(seconds / REVIEW_S)):
        kept.review(review * REVIEW_S, loads, asked, times)
    assert kept.count == sum(load.kept for load in loads)
    return kept


@pytest.mark.parametrize(
    ("slo", "chunk", "engines", "rate", "tokens", "output", "least", "most"),
    [
        (B, 4096, 4, 4.2, 4000, 128, 2, 2),  # the best static arrangement has as many
        (B, 4096, 16, 5.0, 4000, 128, 8, 8),
        (A, 512, 4, 6.6, 4000, 128, 0, 0),
        (A, 512, 16, 7.2, 4000, 128, 0, 0),
        (G, 1024, 4, 8.3, 4000, 128, 0, 0),
        (A, 512, 4, 14.0, 1000, 500, 0, 0),
        (B, 512, 16, 8.8, 1000, 500, 0, 0),
        (B, 4096, 16, 0.2, 4000, 128, 0, 0),  # hardly anything to do
        (A, 512, 16, 100.0, 4000, 128, 0, 15),  # more than any arrangement can do
    ],
)
def test_as_many_as_the_best_arrangement_has(
    slo: Slo, chunk: int, engines: int, rate: float, tokens: int, output: int, least: int, most: int
) -> None:
    times = WorkTimes(H200, chunk)
    kept = settled(slo, engines, demand(rate * engines, tokens, output, times), times)
    assert least <= kept.count <= most


def test_the_demand_has_the_pull_of_its_mean_prompt() -> None:
    times = WorkTimes(
        structs.replace(H200, pull_s=0.001, further_pull_s=0.001, pull_token_s=1e-6), 4096
    )
    short, long = (demand(4.0, tokens, 128, times) for tokens in (1000, 4000))
    assert (short.pull_s, long.pull_s) == pytest.approx((0.002, 0.005))
    transfer = times.hardware.transfer_s(4000) - times.hardware.transfer_s(1000)
    context = 1.5 * (times.step_s(8, 32_000) - times.step_s(8, 8000))
    assert long.moves_s - short.moves_s == pytest.approx(0.003 + transfer + context)


def test_a_demand_that_stays_changes_nothing_more() -> None:
    times = WorkTimes(H200, 4096)
    asked = demand(5.8 * 16, 4000, 128, times)
    once = settled(B, 16, asked, times, seconds=20.0)
    again = settled(B, 16, asked, times, seconds=200.0)
    assert once.changes == again.changes <= 8


def test_one_engine_is_always_left_to_decode() -> None:
    times = WorkTimes(H200, 4096)
    kept = settled(Slo(ttft=0.5, tpot=0.005), 4, demand(40.0, 15_000, 2, times), times)
    assert kept.count <= 3


@pytest.mark.parametrize(
    ("kept", "prefill", "step"),
    [
        ((True, False, False, False), 1.1, 0.8),  # the middle one of those that do the work
        ((True, True, False, False), 1.2, 0.8),
        ((False, False, False, False), 1.1, 0.9),  # all do both
        ((True, True, True, True), 1.1, 0.9),
    ],
)
def test_corrections_are_those_of_engines_that_measure(
    kept: tuple[bool, ...], prefill: float, step: float
) -> None:
    loads = [
        PredictedLoad(node(f"http://{number}:1"), WorkTimes(H200, 4096)) for number in range(4)
    ]
    for load, is_kept, of_prefill, of_steps in zip(
        loads, kept, (1.1, 1.2, 0.8, 0.9), (1.3, 0.9, 0.7, 0.8), strict=True
    ):
        load.kept = is_kept
        load.times.prefill_factor, load.times.step_factor = of_prefill, of_steps
    found = typical(loads)
    assert (found.prefill_factor, found.step_factor) == (prefill, step)


def first_kept(old: int) -> float:
    """Return when the first of four engines is kept, in seconds. One of them has an old
    correction.
    """
    placement = auto(chunk=4096, corrects=False)
    fleet = ledger(placement, [Role.ANY] * 4)
    placement._load(fleet.engines[old]).times.step_factor = 0.6
    now, running = 0.0, deque[Lease]()
    while not any(load.kept for load in placement._loads.values()):
        now += 1 / 16.8
        assert now < 60.0
        placed = fleet.place(ask(now), split=True)
        assert placed is not None
        fleet.began(placed.leases[-1], now)
        running.append(placed.leases[-1])
        if len(running) > 16:
            fleet.close(running.popleft(), Verdict.GOOD, now, 128)
    return now


def test_an_old_correction_counts_the_same_at_each_engine() -> None:
    times = [first_kept(old) for old in range(4)]
    assert len(set(times)) == 1


def test_roles_are_reviewed_often_behind_a_start_and_behind_a_step_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reviews: list[float] = []
    review = KeptEngines.review

    def noted(self: KeptEngines, now: float, *rest: Any) -> None:
        reviews.append(now)
        review(self, now, *rest)

    monkeypatch.setattr(KeptEngines, "review", noted)
    made = ledger(auto(), [Role.ANY] * 4)
    now = 0.0
    while now < 60.0:
        now += 1.0 / (10.0 if now < 30.0 else 40.0)
        placed = made.place(ask(now, tokens=500), split=True)
        assert placed is not None
        for lease in placed.leases:
            made.close(lease, Verdict.GOOD, now, 10)

    def count(begin: float, end: float) -> int:
        return sum(begin <= at < end for at in reviews)

    assert count(0.0, 4.0) >= 12, "behind a start"
    assert count(20.0, 30.0) <= 12, "a load that stays"
    assert count(31.0, 34.0) >= 8, "behind a step"
    assert count(50.0, 60.0) <= 12
