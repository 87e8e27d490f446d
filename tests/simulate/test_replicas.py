"""Several proxies in front of one virtual fleet."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import pytest

from pdproxy.scheduling.ledger_engine import Role
from pdproxy_lab.bench.slo import parse_slo
from pdproxy_lab.simulate.cluster import Call, Cluster
from pdproxy_lab.simulate.placements import auto, bounds_of
from pdproxy_lab.simulate.replicas import Replicas, ReplicatedCluster
from pdproxy_lab.simulate.shape import Fleet, Shape
from tests.simulate.loads import H200, LEAST_LOAD, drawn

SHAPE = Shape(max_num_batched_tokens=2048)


def replicated(
    calls: Sequence[Call], replicas: Replicas, fleet: Fleet, policy: str = "least_load"
) -> ReplicatedCluster:
    """Run them."""
    policies = dict.fromkeys((Role.PREFILL, Role.DECODE), policy)
    made = ReplicatedCluster(fleet, H200, dict.fromkeys(Role, SHAPE), policies, replicas=replicas)
    made.run(calls)
    return made


def imbalance(made: ReplicatedCluster) -> float:
    return fmean(most / mean for most, mean in made.samples[len(made.samples) // 4 :] if mean)


@pytest.mark.parametrize("fleet", [Fleet(aggregated=4), Fleet(prefill=2, decode=3)])
def test_one_proxy_alone_is_a_cluster(fleet: Fleet) -> None:
    plain = Cluster(fleet, H200, dict.fromkeys(Role, SHAPE), LEAST_LOAD)
    plain.run(drawn(1, 300, 30.0, 3000, 512))
    same = replicated(drawn(1, 300, 30.0, 3000, 512), Replicas(), fleet)
    assert same.records.first == plain.records.first
    assert same.records.last == plain.records.last


@pytest.mark.parametrize("policy", ["least_load", "power_of_two", "session", "prefix"])
@pytest.mark.parametrize("told", [1, 3])
def test_all_requests_end_and_nothing_is_left(policy: str, told: int) -> None:
    replicas = Replicas(count=3, told=told, scrape_s=0.5, events=False, by_session=True)
    calls = [
        Call(one.number, one.due, one.prompt, one.output, one.keys, str(one.number % 7))
        for one in drawn(2, 400, 60.0, 3000, 512)
    ]
    made = replicated(calls, replicas, Fleet(prefill=2, decode=3), policy)
    assert not any(value != value for value in made.records.last)
    assert all(engine.idle and not engine.requests for engine in made.engines.values())
    for ledger in made.ledgers:
        assert all(
            ledger_engine.requests == ledger_engine.of_replicas[0]
            for ledger_engine in ledger.engines
        )
    by_session = {
        call.session: {id(one.ledger) for one in calls if one.session == call.session}
        for call in calls
    }
    assert all(len(ledgers) == 1 for ledgers in by_session.values())
    assert len(set.union(*by_session.values())) > 1


def test_reports_show_what_others_send() -> None:
    """A seventh of the requests comes to two of the engines past the proxies."""

    def of(told: int) -> float:
        replicas = Replicas(count=4, told=told, scrape_s=1.0, direct=1 / 7, direct_to=2)
        calls = [
            Call(one.number, one.due, one.prompt, 200) for one in drawn(3, 2000, 60.0, 1500, 512)
        ]
        return imbalance(replicated(calls, replicas, Fleet(aggregated=16)))

    assert of(4) < 0.8 * of(1)


def test_auto_of_many_replicas_knows_of_the_others() -> None:
    """Without, each takes its part of the requests for all, and its own few sequences for all that
    engines have.
    """

    def of(told: int) -> float:
        limits = bounds_of(parse_slo("ttft=2s,tpot=30ms"))
        made = ReplicatedCluster(
            Fleet(any=16),
            H200,
            dict.fromkeys(Role, SHAPE),
            {},
            auto(limits, replicas=None if told == 1 else told),
            replicas=Replicas(count=8, told=told, scrape_s=1.0),
        )
        made.run(drawn(4, 3000, 80.0, 3000, 512))
        return imbalance(made)

    assert of(8) < of(1)


def test_requests_that_wait_do_so_at_their_own_proxy() -> None:
    """More come than the engines serve in time. All are served in the end."""
    limits = bounds_of(parse_slo("ttft=500ms,tpot=30ms"))
    made = ReplicatedCluster(
        Fleet(any=1),
        H200,
        dict.fromkeys(Role, SHAPE),
        {},
        auto(limits, replicas=3),
        replicas=Replicas(count=3, told=3, scrape_s=1.0),
    )
    made.run(drawn(4, 300, 400.0, 3000, 200))
    assert not any(value != value for value in made.records.last)
    assert set(made._late) == set(made.ledgers)
    assert not any(made._late.values())
