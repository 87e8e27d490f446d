"""Corrections follow what was measured, and no single measurement leads them astray."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.scheduling.auto.correction import Error, Factor, Handoffs
from pdproxy.scheduling.outputs import Outputs
from pdproxy.wire.request import Parsed, limit_of
from pdproxy.wire.route import Route


def measured(
    factor: Factor, ratio: float, count: int, *, noise: float = 0.1, seed: int = 0
) -> None:
    chance = random.Random(seed)
    for _ in range(count):
        predicted = chance.uniform(0.01, 0.3)
        factor.add(predicted * ratio * chance.uniform(1 - noise, 1 + noise), predicted)


@pytest.mark.parametrize("ratio", [0.5, 0.8, 1.0, 1.2, 3.0])
def test_a_factor_finds_the_ratio_and_leans_to_late(ratio: float) -> None:
    factor = Factor()
    measured(factor, ratio, 400)
    assert factor.known
    assert ratio * 0.97 <= factor.value <= ratio * 1.08


def test_a_factor_forgets() -> None:
    factor = Factor()
    measured(factor, 2.0, 400)
    measured(factor, 1.0, 400)
    assert factor.value == pytest.approx(1.0, abs=0.08)


def test_one_measurement_out_of_line_moves_it_by_a_tenth_at_most() -> None:
    factor = Factor()
    measured(factor, 1.0, 400)
    before = factor.value
    factor.add(1000.0, 0.3)
    assert factor.value <= before * 1.2


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(1e-9, 1e6)), max_size=200))
def test_a_factor_stays_within_bounds(samples: list[tuple[float, float]]) -> None:
    factor = Factor()
    for one, predicted in samples:
        factor.add(one, predicted)
    assert 1 / 21 <= factor.value <= 21


def test_handoffs_of_each_length_have_a_ratio_that_is_found_at_once() -> None:
    handoffs = Handoffs()
    ratios = {900: 1.5, 4000: 0.8, 12_000: 2.0, 100_000: 1.0}
    for number in range(20):
        for tokens, ratio in ratios.items():
            noisy = ratio * (1.1 if number % 2 else 0.9)
            handoffs.by_bits[tokens.bit_length()].add(10.0, 0.05 * noisy, 0.05)
    for tokens, ratio in ratios.items():
        assert handoffs.by_bits[tokens.bit_length()].ratio == pytest.approx(ratio, rel=0.05)
    assert handoffs.by_bits[64] is handoffs.by_bits[17]


def test_a_ratio_of_handoffs_is_forgotten_while_none_is_measured() -> None:
    """A handoff behind a long line of others says nothing of later ones, and none would show it."""
    handoffs = Handoffs()
    one = handoffs.by_bits[12]
    for _ in range(50):
        one.add(100.0, 5.0, 0.05)
    late = one.ratio
    assert late > 10
    handoffs.forget(105.0, 5.0)
    assert one.ratio == late
    for now in range(120, 420, 5):
        handoffs.forget(float(now), 5.0)
    assert one.ratio == pytest.approx(1.0, abs=0.05)


def test_an_error_has_a_direction_and_a_size() -> None:
    error = Error()
    for number in range(500):
        error.add(1.5 if number % 2 else 0.7, 1.0)
    assert error.bias == pytest.approx(0.1, abs=0.05)
    assert error.size == pytest.approx(0.4, abs=0.05)
    before = error.both
    error.add(1.0, 0.0)
    assert error.both == before


def test_answers_are_as_long_as_those_to_such_prompts_but_not_longer_than_the_request_says() -> (
    None
):
    outputs = Outputs()
    for _ in range(100):
        outputs.add(4000, 50)
        outputs.add(900, 500)
    assert outputs.expected(4095) == pytest.approx(50)
    assert outputs.expected(1000) == pytest.approx(500)
    assert 150 < outputs.expected(1_000_000) == outputs.mean < 400
    assert outputs.expected(4000, 20) == 20
    assert outputs.expected(4000, 1000) == pytest.approx(50)
    assert outputs.expected(0, 0) == 1
    assert outputs.expected(1 << 60) == outputs.mean


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, 16),
        ({"max_tokens": b"7"}, 7),
        ({"max_completion_tokens": b"9"}, 16),
        ({"max_tokens": b"null"}, None),
        ({"max_tokens": b'"many"'}, None),
        ({"max_tokens": b"1e99"}, None),
        ({"max_tokens": b"123456789012345678901234567890"}, 123456789012345678901234567890),
    ],
)
def test_a_requests_own_limit_is_read(fields: dict[str, bytes], limit: int | None) -> None:
    raw = {name: msgspec.Raw(value) for name, value in fields.items()}
    assert limit_of(Parsed(Route.COMPLETIONS, raw, "m", True, False, False, (), None, 0)) == limit
