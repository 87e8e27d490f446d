"""Several workers with the placement `auto` in front of one virtual fleet, beside one process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean

import pytest

from pdproxy.scheduling.ledger_engine import Role
from pdproxy_lab.bench.slo import parse_slo
from pdproxy_lab.simulate import placements, workers
from pdproxy_lab.simulate.cluster import Call, Cluster
from pdproxy_lab.simulate.placements import bounds_of
from pdproxy_lab.simulate.replicas import Replicas, ReplicatedCluster
from pdproxy_lab.simulate.shape import Fleet, Shape
from pdproxy_lab.simulate.summary import summarise
from pdproxy_lab.simulate.workers import WorkersCluster
from tests.simulate.loads import H200, LEAST_LOAD, drawn

SHAPES = dict.fromkeys(Role, Shape(max_num_batched_tokens=2048))
SLO = parse_slo("ttft=500ms,tpot=8ms")


def imbalance(made: WorkersCluster | ReplicatedCluster) -> float:
    return fmean(most / mean for most, mean in made.samples[len(made.samples) // 4 :] if mean)


def served(calls: Sequence[Call], fleet: Fleet, count: int) -> WorkersCluster:
    made = WorkersCluster(
        fleet, H200, SHAPES, {}, workers.auto(bounds_of(SLO), count), workers=count
    )
    made.run(calls)
    assert all(engine.idle and not engine.requests for engine in made.engines.values())
    assert not any(
        ledger_engine.requests
        for ledger in made.ledgers
        for ledger_engine in ledger.engines
        if not ledger_engine.elsewhere[0]
    )
    return made


def alone(calls: Sequence[Call], fleet: Fleet) -> ReplicatedCluster:
    """One process."""
    made = ReplicatedCluster(
        fleet, H200, SHAPES, {}, placements.auto(bounds_of(SLO)), replicas=Replicas()
    )
    made.run(calls)
    return made


@pytest.mark.parametrize("fleet", [Fleet(aggregated=4), Fleet(prefill=2, decode=3)])
def test_one_worker_is_a_cluster(fleet: Fleet) -> None:
    plain = Cluster(fleet, H200, SHAPES, LEAST_LOAD)
    plain.run(drawn(1, 300, 30.0, 3000, 512))
    same = WorkersCluster(fleet, H200, SHAPES, LEAST_LOAD, workers=1)
    same.run(drawn(1, 300, 30.0, 3000, 512))
    assert same.records.first == plain.records.first
    assert same.records.last == plain.records.last


def test_the_choices_of_workers_are_as_good_as_one_processes() -> None:
    """Of 12 engines near capacity some are kept for prefill: as many requests are good, and first
    tokens come as soon.
    """
    fleet = Fleet(any=12)

    def found(made: Cluster) -> tuple[float, float]:
        summary = summarise(made, (SLO,))
        assert summary.ttft is not None
        return summary.good[SLO.name] / summary.requests, summary.ttft.mean

    one = found(alone(drawn(3, 1200, 38.0, 8000, 128), fleet))
    for count in (2, 8):
        good, ttft = found(served(drawn(3, 1200, 38.0, 8000, 128), fleet, count))
        assert good > one[0] - 0.02
        assert ttft < 1.05 * one[1]


def plain(seconds: float, rate: float) -> list[Call]:
    """Return requests that have nothing in common. `rate`: per second."""
    chance = random.Random(5)
    return [
        Call(number, number / rate, chance.randrange(500, 3500), chance.randrange(32, 480))
        for number in range(int(seconds * rate))
    ]


@pytest.mark.parametrize("count", [2, 8])
def test_workers_spread_load_as_one_process_does(count: int) -> None:
    """200 engines, 64 connections: the engine with the most requests has at most 1.1 times as
    many.
    """
    fleet = Fleet(any=200)
    several, one = served(plain(2.0, 1000.0), fleet, count), alone(plain(2.0, 1000.0), fleet)
    assert one.samples[-1][1] > 3  # requests of a mean engine
    assert imbalance(several) <= 1.1 * imbalance(one)
