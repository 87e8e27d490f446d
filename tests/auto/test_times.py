"""Predicted times are those of the engine model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pdproxy.engine_model.hardware import Hardware, attended
from pdproxy.scheduling.auto.times import WorkTimes
from tests.auto.fleets import H200

HARDWARE = st.sampled_from(
    (H200, Hardware(), Hardware(speed=2.0, chunk_base_s=0.001, attention_s=1e-9))
)


def steps(
    hardware: Hardware, chunk: int, tokens: int, cached: int, decoding: int, context: int
) -> tuple[float, float]:
    """Return how long the prompt's steps take, and how much longer than steps that only decode."""
    seconds, decoding_only, begun = 0.0, 0.0, 1
    while tokens:
        now = min(tokens, chunk - decoding)
        seconds += hardware.step_s(now, decoding, context, attended(now, cached), begun=begun)
        begun = 0
        decoding_only += hardware.step_s(0, decoding, context) if decoding else 0.0
        tokens, cached = tokens - now, cached + now
    return seconds, seconds - decoding_only


@given(
    hardware=HARDWARE,
    tokens=st.integers(1, 30_000),
    cached=st.integers(0, 30_000),
    decoding=st.integers(0, 100),
    chunk=st.sampled_from((512, 2048, 8192)),
)
def test_a_prompt_takes_the_steps_of_the_engine(
    hardware: Hardware, tokens: int, cached: int, decoding: int, chunk: int
) -> None:
    context = decoding * 1000
    expected, delay = steps(hardware, chunk, tokens, cached, decoding, context)
    seconds, longer, _ = WorkTimes(hardware, chunk).prefill_s(
        tokens, cached, decoding, context, False
    )
    # The last chunk may be so small that reading the weights takes longer.
    assert seconds == pytest.approx(expected, rel=0.01)
    if decoding and hardware.weights_read_once:
        assert longer == pytest.approx(delay, rel=0.01, abs=1e-9)
    assert 0 <= longer <= seconds


@given(hardware=HARDWARE, decoding=st.integers(1, 500), context=st.integers(0, 1_000_000))
def test_a_step_takes_what_it_takes_at_the_engine(
    hardware: Hardware, decoding: int, context: int
) -> None:
    assert WorkTimes(hardware, 2048).step_s(decoding, context) == pytest.approx(
        hardware.step_s(0, decoding, context)
    )


def test_prompts_in_line_share_their_last_chunk() -> None:
    times = WorkTimes(H200, 2048)
    alone, _, one = times.prefill_s(100, 0, 0, 0, False)
    in_line, _, part = times.prefill_s(100, 0, 0, 0, True)
    assert in_line < alone
    assert (one, part) == (1, 100 / 2048)


@given(tokens=st.integers(0, 30_000), speed=st.sampled_from((1.0, 4.0)))
def test_a_pull_takes_as_long_as_its_tokens_say(tokens: int, speed: float) -> None:
    hardware = Hardware(speed=speed, pull_s=0.002, further_pull_s=0.001, pull_token_s=5e-6)
    # What a step takes longer with one; that two begin in one step makes none longer here.
    expected = hardware.step_s(0, 4, 4000, 0.0, 1, 0, tokens) - hardware.step_s(0, 4, 4000)
    assert WorkTimes(hardware, 2048).pull_s(tokens) == pytest.approx(expected)
    without = WorkTimes(structs.replace(hardware, pull_token_s=0.0), 2048)
    assert without.pull_s(tokens) == without.pull_base_s == 0.002 / speed


def test_a_pull_that_meets_another_one_takes_longer_on_average() -> None:
    times = WorkTimes(Hardware(pull_s=0.010, further_pull_s=0.020, pull_token_s=1e-6), 2048)
    assert times.pull_s(4000) == pytest.approx(0.010 + 0.3 * 0.010 + 0.004)


def test_factors_scale_what_they_are_for() -> None:
    times = WorkTimes(H200, 2048)
    *prefill, steps = times.prefill_s(4000, 0, 8, 8000, False)
    step = times.step_s(8, 8000)
    times.prefill_factor, times.step_factor = 1.5, 2.0
    assert times.prefill_s(4000, 0, 8, 8000, False) == pytest.approx(
        [*(1.5 * one for one in prefill), steps]
    )
    assert times.step_s(8, 8000) == pytest.approx(2.0 * step)
