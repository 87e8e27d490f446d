"""The search for the shortest schedule: it finds what is guilty, in few runs, and never claims what
it has not seen.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.shrink import shrink


class _Runs:
    def __init__(self, guilty: set[int]) -> None:
        self.guilty = guilty
        self.count = 0

    def fails(self, only: frozenset[int]) -> bool:
        self.count += 1
        return self.guilty <= only


@pytest.mark.parametrize("seed", range(20))
def test_two_guilty_items_among_sixty_are_found_in_a_hundred_runs(seed: int) -> None:
    runs = _Runs(set(random.Random(seed).sample(range(60), 2)))
    left, count = shrink(range(60), runs.fails, 100)
    assert set(left) == runs.guilty
    assert count == runs.count <= 100


@given(st.sets(st.integers(0, 39), max_size=5))
def test_whatever_is_guilty_is_found_with_enough_runs(guilty: set[int]) -> None:
    runs = _Runs(guilty)
    left, _ = shrink(range(40), runs.fails, 10_000)
    assert set(left) == guilty


def test_what_fails_without_any_item_is_said_to_need_none() -> None:
    left, count = shrink(range(60), lambda only: True, 100)
    assert (left, count) == ([], 1)


def test_the_budget_is_kept_and_what_is_left_still_fails() -> None:
    runs = _Runs(set(range(0, 600, 60)))
    left, count = shrink(range(600), runs.fails, 30)
    assert runs.count == count == 30
    assert runs.guilty <= set(left)
    assert len(left) < 600
