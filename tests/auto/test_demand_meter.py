"""Averages of the demand: right whenever somebody asks, also behind a long silence, and by a clock
that stands still.
"""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import pytest

from pdproxy.scheduling.auto.correction import Handoffs
from pdproxy.scheduling.auto.demand import DemandMeter
from pdproxy.scheduling.auto.times import WorkTimes
from tests.auto.fleets import H200


def come(meter: DemandMeter, begin: float, rate: float, seconds: float) -> float:
    """Have requests come. Return when the last one came."""
    for number in range(round(rate * seconds)):
        meter.add(begin + number / rate, 1000, 200, 100.0)
    return begin + seconds


@pytest.mark.parametrize("asked_every", [0.5, 15.0, 1000.0])
@pytest.mark.parametrize("silence", [0.0, 3600.0])
def test_a_rate_is_known_however_seldom_it_is_asked_for(asked_every: float, silence: float) -> None:
    meter = DemandMeter(60.0, 60.0)
    now, end = come(meter, 0.0, 6.0, 10.0) + silence, 0.0
    begin = now
    while end < begin + 300.0:
        end = come(meter, end or begin, 6.0, min(asked_every, 300.0))
        meter.mean(end)
    found = meter.mean(end)
    assert found is not None
    assert found.rate == pytest.approx(6.0, rel=0.03)
    assert (found.tokens, found.new_tokens, found.output) == pytest.approx((1000, 800, 100))
    assert found.pairs == pytest.approx(800 * (200 + 400))


def test_a_short_memory_is_right_soon_behind_a_long_silence() -> None:
    """`auto` looks every half second, only while requests come."""
    meter = DemandMeter()
    meter.mean(come(meter, 0.0, 5.0, 10.0))
    come(meter, 3600.0, 20.0, 8.0)
    found = meter.mean(3608.0)
    assert found is not None
    assert found.rate == pytest.approx(20.0, rel=0.3)


def test_the_demand_falls_smoothly_to_nothing() -> None:
    meter, rates = DemandMeter(60.0, 60.0), []
    end = come(meter, 0.0, 5.0, 300.0)
    for later in range(0, 1200, 15):
        mean = meter.mean(end + later)
        rates.append(0.0 if mean is None else mean.rate)
    assert rates[0] == pytest.approx(5.0, rel=0.03)
    assert all(0.7 * before <= after < before for before, after in pairwise(rates[:30]))
    assert rates[-1] == 0.0


@pytest.mark.parametrize("factor", [0.25, 3.0])
def test_a_step_of_the_load_is_known_within_seconds(factor: float) -> None:
    chance, meter, now = random.Random(7), DemandMeter(steps=True), 0.0
    looks = 0.0
    rates: list[tuple[float, float]] = []
    while now < 80.0:
        now += chance.expovariate(8.0 if now < 60.0 else 8.0 * factor)
        meter.add(now, 1000, 0, 100.0)
        while looks < now:
            looks += 0.25
            found = meter.mean(looks)
            assert found is not None
            rates.append((looks, found.rate))
    before = [rate for at, rate in rates if 20.0 < at < 60.0]
    assert sum(5.0 < rate < 12.0 for rate in before) >= 0.85 * len(before), "chance is no step"
    after = [rate for at, rate in rates if at > 63.0]
    assert all(0.6 * 8.0 * factor < rate < 1.6 * 8.0 * factor for rate in after)


def test_a_clock_that_stands_still_or_goes_back() -> None:
    meter = DemandMeter(60.0, 60.0)
    end = come(meter, 0.0, 5.0, 300.0)
    for now in (end, end, end - 100.0, float("nan")):
        meter.add(now, 1000, 0, 0.0)
        mean = meter.mean(now)
        assert mean is not None
        assert 4.5 < mean.rate < 5.5


def test_many_requests_at_once_are_as_good_as_one_after_the_other() -> None:
    one, other = DemandMeter(60.0, 60.0), DemandMeter(60.0, 60.0)
    other.begin(0.0)
    for part in range(100):
        for number in range(30):
            one.add(part * 5.0 + number / 6, 1000, 0, 0.0)
        other.add_all((part + 1) * 5.0, 30, 30 * 1000, 30 * 1000**2)
    found, wanted = other.mean(500.0), one.mean(500.0)
    assert found is not None
    assert wanted is not None
    assert msgspec.structs.asdict(found) == pytest.approx(msgspec.structs.asdict(wanted), rel=0.02)


def test_what_was_measured_of_handoffs_is_part_of_the_demand() -> None:
    meter, handoffs, times = DemandMeter(), Handoffs(), WorkTimes(H200, 2048)
    end = come(meter, 0.0, 6.0, 3.0)
    plain = meter.demand(end, times, handoffs)
    for _ in range(20):
        handoffs.by_bits[(1000).bit_length()].add(end, 0.1, 0.05)
    late = meter.demand(end, times, handoffs)
    assert plain is not None
    assert late is not None
    assert late.moves_s == pytest.approx(2 * plain.moves_s)
    assert msgspec.structs.replace(late, moves_s=plain.moves_s) == plain
