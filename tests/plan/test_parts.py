"""Arrangements, bounds and the grid of rates."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy_lab.bench.trace import TraceEntry
from pdproxy_lab.plan.arrangement import Arrangement, any_role, everything, neighbours, plain, split
from pdproxy_lab.plan.bounds import bound, work_of
from pdproxy_lab.plan.capacity import CapacitySearch, Level, place_of, rate_at
from pdproxy_lab.plan.question import Traced, steady
from tests.plan.questions import CHUNKS, question

P = ("least_load",)


@pytest.mark.parametrize("engines", [1, 2, 5])
def test_everything_is_each_arrangement_once(engines: int) -> None:
    found = list(everything(engines, CHUNKS, P))
    several = engines > 1
    assert len(found) == len(set(found)) == 3 + 9 * (engines - 1) + 3 * several
    assert all(one.engines == one.fleet.engines == engines for one in found)


@given(st.sampled_from(list(everything(4, CHUNKS, ("a", "b")))))
def test_neighbours_differ_and_are_mutual(one: Arrangement) -> None:
    found = list(neighbours(one, CHUNKS, ("a", "b")))
    assert one not in found
    assert len(found) == len(set(found))
    assert all(one in list(neighbours(other, CHUNKS, ("a", "b"))) for other in found)
    assert set(found) <= set(everything(4, CHUNKS, ("a", "b")))


def test_all_arrangements_of_a_kind_are_reached_by_neighbours() -> None:
    for start in (plain(4, 2048, "a"), split(1, 3, 512, 512, "a"), any_role(4, 8192)):
        seen, left = {start}, [start]
        while left:
            for one in neighbours(left.pop(), CHUNKS, ("a", "b")):
                if one not in seen:
                    seen.add(one)
                    left.append(one)
        assert seen == {one for one in everything(4, CHUNKS, ("a", "b")) if one.kind == start.kind}


@given(st.floats(1e-3, 1e5))
def test_a_rate_is_in_its_place_of_the_grid(rate: float) -> None:
    place = place_of(rate)
    assert rate_at(place) <= rate * (1 + 1e-9)
    assert rate < rate_at(place + 1) * (1 + 1e-9)


@given(st.integers(-600, 1100))
def test_a_place_of_the_grid_is_its_own(place: int) -> None:
    assert place_of(rate_at(place)) == place


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(list(everything(3, (512, 8192), P))),
    st.sampled_from([(4000, 16), (500, 60), (2000, 2)]),
)
def test_no_simulation_serves_more_than_the_bound(
    one: Arrangement, lengths: tuple[int, int]
) -> None:
    asked = question("ttft=300ms", *lengths)
    work = work_of(asked)
    limit = bound(one, work)
    run = CapacitySearch(asked, work).at(one, Level(600, 1, 1), 4 * limit)[0]
    assert run.per_s(run.completed) <= limit * 1.01


def test_a_bound_by_hand() -> None:
    work = work_of(question("ttft=1s"))
    tokens = 4000 / 47619 + 0.97e-9 * 4000 * 2000 + 0.0033
    assert work.prefill_s(8192) == pytest.approx(tokens + 0.0021 * 4000 / 8192)
    assert work.decode_s == pytest.approx(127 * (7e-6 + 34.5e-9 * 4064))
    assert bound(split(1, 7, 8192, 512, "least_load"), work) == pytest.approx(
        1 / work.prefill_s(8192)
    )
    assert bound(plain(2, 512, "least_load"), work) == pytest.approx(
        2 / (work.prefill_s(512) + work.decode_s)
    )
    line = 0.0035 + 4000 * 131072 / 43.984e9
    decode = max(work.decode_s + 4000 * 4.8e-6, line)
    assert bound(split(7, 1, 8192, 512, "least_load"), work) == pytest.approx(1 / decode)


def test_shared_prefixes_raise_the_bound() -> None:
    shared = [TraceEntry(float(n), 1100, 10, (1, 2, 3 + n)) for n in range(50)]
    alone = [TraceEntry(float(n), 1100, 10, (3 * n, 3 * n + 1, 3 * n + 2)) for n in range(50)]
    rates = [
        bound(plain(1, 512, "a"), work_of(question("ttft=1s", demand=Traced(entries=e))))
        for e in (shared, alone)
    ]
    assert rates[0] > 2 * rates[1]


def test_a_question_without_an_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="share"):
        question("ttft=1s", share=0.0)
    with pytest.raises(ValueError, match="same time"):
        Traced(entries=[TraceEntry(1.0, 5, 5), TraceEntry(1.0, 5, 5)])


@pytest.mark.parametrize(
    ("slo", "inputs", "ttft"),
    [
        ("tpot=9ms", 4000, 2.0),
        ("gap=9ms", 100_000, 14.0),
        ("tpot=9ms,ttft=5s", 4000, 5.0),
        ("e2e=9s", 4000, None),
    ],
)
def test_a_queue_that_grows_never_keeps_the_slo(slo: str, inputs: int, ttft: float | None) -> None:
    asked = question(slo, inputs)
    found = steady(asked)
    assert found.slo.ttft == ttft
    assert (found.objective or found.slo) == asked.slo
    assert (found.slo.gap, found.slo.tpot) == (asked.slo.gap, asked.slo.tpot)
    assert (found.slo.name == slo) is (asked.slo.ttft == ttft)


def test_a_trace_is_stretched_to_a_rate() -> None:
    demand = Traced(entries=[TraceEntry(float(n), 100, 10) for n in range(101)])
    assert demand.rate == 1.0
    times = [call.due for call in demand.calls(4.0, 41, 0)]
    assert times == pytest.approx([n / 4 for n in range(41)])
    poisson = Traced(entries=demand.entries, kind="poisson")
    assert poisson.random
    assert [one.due for one in poisson.calls(4.0, 20, 0)] != [
        one.due for one in poisson.calls(4.0, 20, 1)
    ]
    slow, fast = ([one.due for one in poisson.calls(rate, 20, 0)] for rate in (1.0, 10.0))
    assert slow == pytest.approx([10 * time for time in fast])


def test_each_seed_begins_elsewhere_in_a_trace_at_the_asked_rate() -> None:
    entries = [TraceEntry(10.0 + number, 600 + number, 5) for number in range(90)]
    demand = Traced(entries=entries)
    for seed, first in ((0, 600), (1, 630), (2, 660), (3, 615), (4, 645)):
        calls = list(demand.calls(5.0, 60, seed))
        assert [calls[0].prompt, len(calls)] == [first, 60]
        assert calls[-1].due == pytest.approx(59 / 5.0)
        assert all(one.due <= other.due for one, other in pairwise(calls))
