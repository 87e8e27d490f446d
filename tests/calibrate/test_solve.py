"""The robust fit by itself."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy_lab.calibrate.solve import fit, spread

ROWS = [(1.0, float(a), float(b)) for a in (1, 2, 5, 9) for b in (10, 300, 2000)]
_TERM = st.floats(min_value=0.1, max_value=10.0)


def values_of(found: tuple[float, float, float]) -> list[float]:
    return [sum(cell * x for cell, x in zip(row, found, strict=True)) for row in ROWS]


@given(st.tuples(_TERM, _TERM, _TERM))
def test_exact_data_give_the_exact_terms(terms: tuple[float, float, float]) -> None:
    values = values_of(terms)
    assert fit(ROWS, values, values) == pytest.approx(terms, rel=1e-4)


def test_outliers_move_nothing() -> None:
    values = values_of((5.0, 0.3, 0.01))
    sizes = list(values)
    values[2] *= 4
    values[7] *= 3
    assert fit(ROWS, values, sizes) == pytest.approx((5.0, 0.3, 0.01), rel=1e-2)


def test_a_term_that_would_be_below_0_is_0() -> None:
    values = [5.0 - 0.1 * row[1] for row in ROWS]
    found = fit(ROWS, values, values)
    assert found[1] == 0
    assert found[0] > 3
    assert min(found) >= 0


def test_two_columns_that_are_one_share_their_effect() -> None:
    rows = [(row[0], row[1], row[1]) for row in ROWS]
    values = [2 + 3 * row[1] for row in ROWS]
    found = fit(rows, values, values)
    assert found[1] + found[2] == pytest.approx(3, rel=1e-4)
    assert found[0] == pytest.approx(2, rel=1e-4)


def test_the_spread_grows_with_the_noise_and_holds_the_truth() -> None:
    chance = random.Random(1)
    rows = ROWS * 4
    exact = values_of((5.0, 0.3, 0.01)) * 4
    widths = []
    for noise in (0.01, 0.1):
        values = [value * chance.uniform(1 - noise, 1 + noise) for value in exact]
        found = spread(rows, values, values)
        assert all(one.low <= one.value <= one.high for one in found)
        widths.append(found[0].relative)
        assert found[0].value == pytest.approx(5.0, rel=2 * noise)
    assert widths[0] < widths[1]


@pytest.mark.parametrize(
    ("rows", "values", "sizes"),
    [([], [], []), ([(1.0,)], [1.0, 2.0], [1.0, 2.0]), ([(1.0,)], [1.0], [0.0])],
)
def test_what_is_no_data_is_refused(
    rows: list[tuple[float, ...]], values: list[float], sizes: list[float]
) -> None:
    with pytest.raises(ValueError, match="a fit needs rows"):
        fit(rows, values, sizes)
