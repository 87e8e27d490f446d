"""Behind a start and behind a step of the load `auto` soon serves as well as later: a part of
benchmarks/first_seconds.py.
"""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import first_seconds


@pytest.mark.parametrize(
    ("name", "first", "next_"),
    [
        ("start, 4 engines, B, 12 req/s", 0.90, 0.95),
        ("step, 2 engines, B, 1 to 8 req/s", 0.75, 0.80),
        ("step, 8 engines, B, 8 to 30 req/s", 0.80, 0.95),
    ],
)
def test_it_soon_serves_as_well_as_later(name: str, first: float, next_: float) -> None:
    asked, times = first_seconds.LOADS[name]
    shares = first_seconds.mean_good(asked, times, seeds=6)
    later = shares[-1]
    assert shares[0] >= first * later
    assert shares[1] >= next_ * later
