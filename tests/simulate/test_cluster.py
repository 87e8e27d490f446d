"""Fleets: what holds for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdproxy.scheduling.ledger_engine import EngineSpec, Role
from pdproxy.scheduling.policy import Ask
from pdproxy_lab.bench.arrivals import Arrivals
from pdproxy_lab.bench.slo import parse_slo
from pdproxy_lab.bench.workload import Lengths
from pdproxy_lab.simulate.cluster import Call, Cluster
from pdproxy_lab.simulate.load import Synthetic
from pdproxy_lab.simulate.run import Simulation, run
from pdproxy_lab.simulate.shape import Fleet, Shape
from pdproxy_lab.simulate.summary import summarise
from tests.simulate.loads import H200, LEAST_LOAD, cluster, drawn

FLEETS = st.sampled_from(
    [
        Fleet(aggregated=1),
        Fleet(aggregated=4),
        Fleet(prefill=1, decode=2),
        Fleet(prefill=3, decode=1),
        Fleet(prefill=1, decode=1, aggregated=2),
        Fleet(decode=2),
    ]
)


class _Watched(Cluster):
    """Checks that no event lies in the past."""

    def _at(self, time: float, what: Callable[[Any, float], None], argument: Any) -> None:
        assert time >= self.now
        super()._at(time, what, argument)


@settings(max_examples=60, deadline=None)
@given(
    fleet=FLEETS,
    seed=st.integers(0, 2**32),
    rate=st.sampled_from((1.0, 30.0, 300.0)),
    kv=st.sampled_from((1024, 4096, 64_000)),
    chunk=st.sampled_from((64, 512, 8192)),
)
@example(
    fleet=Fleet(prefill=3, decode=1), seed=555559, rate=300.0, kv=1024, chunk=64
)  # once two waited for each other's blocks
def test_no_request_and_no_token_is_lost(
    fleet: Fleet, seed: int, rate: float, kv: int, chunk: int
) -> None:
    calls = drawn(seed, 60, rate, 1000, 512)
    shape = Shape(max_num_batched_tokens=chunk, kv_tokens=kv)
    made = _Watched(fleet, H200, dict.fromkeys(Role, shape), LEAST_LOAD)
    made.run(calls)
    fitting = [call for call in calls if shape.fits(call.prompt, call.output)]
    records = made.records
    assert len(records) == 60
    assert records.refusals == 60 - len(fitting)
    assert made.itl.total == sum(call.output - 1 for call in fitting)
    for call in fitting:
        assert records.due[call.number] < records.first[call.number] <= records.last[call.number]
        longest = records.last[call.number] - records.first[call.number]
        assert records.worst_gap[call.number] <= longest + 1e-9
        assert records.worst_gap[call.number] * (call.output - 1) >= longest - 1e-6
    for engine in made.engines.values():
        assert engine.idle
        assert engine.memory.available == engine.memory.blocks
    for ledger_engine in made.ledger.engines:
        assert (ledger_engine.requests, ledger_engine.prompt_bytes) == (0, 0)


@pytest.mark.parametrize("load", [(4000, 128, 20.0), (300, 300, 60.0)])
@pytest.mark.parametrize("split", [False, True])
def test_more_engines_never_serve_less(load: tuple[int, int, float], split: bool) -> None:
    before = 0.0
    for size in (1, 2, 4, 8):
        fleet = Fleet(prefill=size, decode=size) if split else Fleet(aggregated=size)
        summary = run(_simulation(fleet, *load), 0)
        throughput = summary.per_s(summary.completed)
        assert throughput >= 0.98 * before
        before = throughput


def test_a_seed_gives_the_same_result() -> None:
    simulation = _simulation(Fleet(prefill=2, decode=2), 2000, 100, 10.0)
    first, again, other = (run(simulation, seed) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_without_prefill_engines_aggregated_ones_serve() -> None:
    made = cluster(Fleet(decode=2), Shape())
    made.run([Call(0, 0.0, 100, 3), Call(1, 0.0, 100, 3)])
    assert [engine.busy_s > 0 for engine in made.engines.values()] == [True, True]


def test_a_prompt_shorter_than_a_block_is_served_alone() -> None:
    made = cluster(Fleet(prefill=1, decode=1), Shape())
    made.run([Call(0, 0.0, 15, 3)])
    assert made.engines["prefill-0"].busy_s == 0.0
    assert made.engines["decode-0"].busy_s > 0.0


def test_an_slo_counts_refused_requests_as_misses() -> None:
    made = cluster(Fleet(aggregated=1), Shape(kv_tokens=1024))
    made.run([Call(0, 0.0, 100, 3), Call(1, 0.0, 2000, 3)])
    summary = summarise(made, [parse_slo("all:ttft=100s"), parse_slo("none:ttft=1ms")])
    assert (summary.requests, summary.completed) == (2, 1)
    assert summary.good == {"all": 1, "none": 0}


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ("ttft=59ms", 0),
        ("ttft=61ms", 1),
        ("tpot=9ms", 0),
        ("gap=9ms", 0),
        ("e2e=79ms", 0),
        ("tpot=11ms,e2e=81ms", 1),
    ],
)
def test_what_an_slo_limits(limits: str, good: int) -> None:
    from tests.simulate.loads import SIMPLE

    made = cluster(Fleet(aggregated=1), Shape(), SIMPLE)
    made.run([Call(0, 0.0, 60, 3)])  # a first token after 60 ms, two more after 10 ms each
    assert summarise(made, [parse_slo(limits)]).good == {limits: good}


def _simulation(fleet: Fleet, prompt: int, answer: int, rate: float) -> Simulation:
    return Simulation(
        fleet=fleet,
        hardware=H200,
        shapes=dict.fromkeys(Role, Shape()),
        policies=LEAST_LOAD,
        load=Synthetic(
            arrivals=Arrivals(rate=rate),
            inputs=Lengths(prompt, prompt),
            outputs=Lengths(answer, answer),
            requests=400,
        ),
    )


def test_engines_that_make_no_progress_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """No load is known that causes it. Requests that only preempt each other would go on for
    ever.
    """
    monkeypatch.setattr("pdproxy_lab.simulate.cluster._NO_PROGRESS", 20)
    made = cluster(Fleet(aggregated=1), Shape(max_num_batched_tokens=64, kv_tokens=64_000))
    with pytest.raises(ValueError, match="no request came or ended in 20 steps"):
        made.run([Call(0, 0.0, 4000, 2)])


def test_an_engine_that_joins_gets_its_part() -> None:
    """Not before it is there, and with what it has in its cache known to the policies."""
    made = cluster(Fleet(aggregated=1), Shape())
    made._at(10.0, lambda spec, _: made.join(spec), EngineSpec("late", Role.AGGREGATED))
    calls = [Call(number, number / 10, 1200, 20, (1, 2)) for number in range(200)]
    made.run(calls)
    first, late = made.engines["aggregated-0"], made.engines["late"]
    assert late.decode_tokens == pytest.approx(first.decode_tokens / 3, rel=0.1)
    assert made.memories.cached(Ask(None, 4800, 20.0, 1200, keys=(1, 2))) == {
        "aggregated-0": 1024,
        "late": 1024,
    }
