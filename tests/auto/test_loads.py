"""What an engine has to do: no lease leaves anything behind, and its numbers follow a real
engine's.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.scheduling.auto.loads import PredictedLeg, PredictedLoad
from pdproxy.scheduling.auto.times import WorkTimes
from tests.auto.fleets import H200, node

WHOLE, PREFILL, DECODE = "whole", "prefill", "decode"


def opened(
    load: PredictedLoad, now: float, kind: str, tokens: int = 1000, pull_s: float = 0.01
) -> PredictedLeg:
    seconds = 0.0 if kind == DECODE else 0.03
    leg = PredictedLeg(now, tokens, 100.0, seconds, seconds, 1.0, pull_s if kind == DECODE else 0.0)
    load.opened(leg, arrives_at=now + 0.03, answers=kind != PREFILL, longer_s=0.01)
    return leg


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_nothing_is_left_of_leases_however_they_end(data: st.DataObject) -> None:
    load = PredictedLoad(node(), WorkTimes(H200, 2048))
    now, open_legs, decoding = 0.0, [], []
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.floats(0, 2))
        what = data.draw(st.sampled_from(("open", "begin", "fail", "end")))
        if what == "open":
            kind = data.draw(st.sampled_from((WHOLE, PREFILL, DECODE)))
            open_legs.append((kind, opened(load, now, kind, data.draw(st.integers(1, 30_000)))))
        elif open_legs and what in ("begin", "fail"):
            kind, leg = open_legs.pop(data.draw(st.integers(0, len(open_legs) - 1)))
            begins = what == "begin"
            if leg.seconds:
                load.computed(leg, leg.opened_at + 0.03, now if begins else 0.0, now)
            if kind != PREFILL:
                if begins:
                    load.began(leg, now)
                    decoding.append(leg)
                else:
                    load.never_began(leg)
        elif decoding and what == "end":
            leg = decoding.pop(data.draw(st.integers(0, len(decoding) - 1)))
            load.ended(leg, now, data.draw(st.sampled_from((None, 1, 100, 10_000))))
        assert math.isfinite(load.context())
        assert load.free_at <= now + load.pending_s + 40 * 0.06
    for kind, leg in open_legs:
        if leg.seconds:
            load.computed(leg, leg.opened_at, 0.0, now)
        if kind != PREFILL:
            load.never_began(leg)
    for leg in decoding:
        load.ended(leg, now, None)
    assert (load.expected, load.expected_tokens, load.pulls, load.decoding, load.prompts) == (
        0,
        0,
        0,
        0,
        0,
    )
    assert load.pending_s == 0.0
    assert load.context() == 0.0


@pytest.mark.parametrize("pull_s", [0.0, 0.01])
def test_pulls_that_take_no_time_end_too(pull_s: float) -> None:
    load = PredictedLoad(node(), WorkTimes(H200, 2048))
    legs = [opened(load, 0.0, DECODE, pull_s=pull_s) for _ in range(2)]
    assert load.pulls == 2
    load.began(legs[0], 0.1)
    load.never_began(legs[1])
    assert load.pulls == 0


def test_waiting_prompts_are_in_line() -> None:
    load = PredictedLoad(node(), WorkTimes(H200, 2048))
    legs = [opened(load, 0.0, WHOLE) for _ in range(3)]
    assert load.free_at == pytest.approx(0.03 + 3 * 0.03)
    load.computed(legs[0], 0.03, 0.08, 0.08)
    assert load.free_at == pytest.approx(0.08 + 2 * 0.03)


def test_delays_are_forgotten_within_seconds() -> None:
    load = PredictedLoad(node(), WorkTimes(H200, 2048))
    for tick in range(100):
        opened(load, tick / 10, PREFILL)
    assert load.delay_share(10.0) == pytest.approx(0.1, rel=0.2)
    assert load.delay_share(40.0) < 0.001


def test_sequences_get_a_token_per_step() -> None:
    times = WorkTimes(H200, 2048)
    load = PredictedLoad(node(), times)
    for _ in range(10):
        leg = opened(load, 0.0, DECODE, pull_s=1e-9)
        load.began(leg, 1.0)
    step = times.step_s(10, 10 * 1000)
    load.advance(1.0 + 50 * step)
    assert load.steps == pytest.approx(50, rel=0.01)
    assert load.context() == pytest.approx(10 * 1050, rel=0.01)


def test_a_pull_costs_the_sequences_steps() -> None:
    load = PredictedLoad(node(), WorkTimes(H200, 2048))
    load.began(opened(load, 0.0, DECODE), 1.0)
    load.advance(2.0)
    before = load.steps
    load.began(opened(load, 2.0, DECODE), 2.0)
    assert before - load.steps == pytest.approx(
        0.01 / load.times.step_s(1, 1000 + before), rel=0.01
    )


def test_answers_say_how_long_steps_take() -> None:
    load: Any = PredictedLoad(node(), WorkTimes(H200, 2048))
    now = 0.0
    for _ in range(200):
        leg = opened(load, now, DECODE, pull_s=1e-9)
        load.began(leg, now)
        now += 100 * H200.step_s(0, 1, 1050) * 1.3  # the engine is slower than its profile
        load.ended(leg, now, 101)
    assert load.times.step_factor == pytest.approx(1.3, rel=0.05)
