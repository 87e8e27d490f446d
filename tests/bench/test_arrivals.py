"""When requests are due: mean rates, shapes, and that a seed gives the same times."""

import math
from itertools import pairwise
from statistics import mean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy_lab.bench.arrivals import MAX_REQUESTS, Arrivals

RATES = st.floats(0.5, 200)
ALL = [
    Arrivals(kind="constant", rate=8),
    Arrivals(kind="poisson", rate=8),
    Arrivals(kind="burst", rate=8, burstiness=0.25),
    Arrivals(kind="ramp", rate=2, end_rate=14),
    Arrivals(kind="ramp", rate=14, end_rate=2),
]


@pytest.mark.parametrize("arrivals", ALL, ids=lambda one: f"{one.kind} {one.rate:g}")
@given(seed=st.integers(0, 10_000))
def test_times_ascend_within_the_duration_with_the_mean_rate(arrivals: Arrivals, seed: int) -> None:
    times = arrivals.times(seed, duration=60)
    assert times == arrivals.times(seed, duration=60)
    assert all(0 <= time < 60 for time in times)
    assert all(before <= after for before, after in pairwise(times))
    spread = math.sqrt(480 / (arrivals.burstiness if arrivals.kind == "burst" else 1))
    assert abs(len(times) - 480) < 8 * spread


@given(rate=RATES, count=st.integers(1, 300), seed=st.integers(0, 100))
def test_a_number_of_requests_is_exact(rate: float, count: int, seed: int) -> None:
    for kind in ("constant", "poisson", "burst"):
        assert len(Arrivals(kind=kind, rate=rate).times(seed, requests=count)) == count
    assert (
        len(Arrivals(kind="ramp", rate=rate, end_rate=2 * rate).times(seed, requests=count))
        == count
    )


def test_constant_arrivals_have_equal_gaps() -> None:
    assert Arrivals(kind="constant", rate=4).times(0, duration=1) == [0, 0.25, 0.5, 0.75]


def variation(arrivals: Arrivals) -> float:
    """Return the standard deviation of the gaps as a share of their mean: 1 for Poisson."""
    times = arrivals.times(3, requests=20_000)
    gaps = [after - before for before, after in pairwise(times)]
    return pstdev(gaps) / mean(gaps)


def test_bursts_vary_more_than_poisson_arrivals() -> None:
    assert variation(Arrivals(kind="poisson", rate=5)) == pytest.approx(1, abs=0.05)
    assert variation(Arrivals(kind="burst", rate=5, burstiness=0.25)) == pytest.approx(2, abs=0.15)
    assert variation(Arrivals(kind="burst", rate=5, burstiness=1)) == pytest.approx(1, abs=0.05)


def test_a_ramp_has_its_rates_at_its_ends() -> None:
    times = Arrivals(kind="ramp", rate=10, end_rate=90).times(1, duration=200)
    first, last = sum(time < 20 for time in times), sum(time >= 180 for time in times)
    assert first == pytest.approx(20 * 14, rel=0.25)
    assert last == pytest.approx(20 * 86, rel=0.1)


def test_seeds_differ() -> None:
    poisson = Arrivals(kind="poisson", rate=8)
    assert poisson.times(0, requests=5) != poisson.times(1, requests=5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rate": 0.0}, "rate must be above 0"),
        ({"rate": math.nan}, "rate must be above 0"),
        ({"rate": 1e9}, "at most 100000"),
        ({"rate": 1.0, "end_rate": 2.0}, "a ramp needs two rates"),
        ({"rate": 1.0, "kind": "ramp"}, "a ramp needs two rates"),
        ({"rate": 1.0, "kind": "ramp", "end_rate": -1.0}, "end rate must be above 0"),
        ({"rate": 1.0, "kind": "burst", "burstiness": 0.0}, "burstiness must be"),
    ],
)
def test_what_has_no_meaning_is_refused(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Arrivals(**options)


def test_too_many_requests_are_refused_before_they_are_made() -> None:
    arrivals = Arrivals(rate=100_000)
    with pytest.raises(ValueError, match="more than 1000000 in one run"):
        arrivals.times(0, duration=86_400)
    with pytest.raises(ValueError, match="more than"):
        arrivals.times(0, requests=MAX_REQUESTS + 1)
    with pytest.raises(ValueError, match="either a duration or a number"):
        arrivals.times(0)
