"""The proxy and simulated engines in virtual time, under many times their load: goodput, deadlines
and shares hold.
"""

# No sockets. PDPROXY_TEST_SEEDS: how many seeds, 3 in `.ci/full`.

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import overload

SEEDS = range(1, 1 + int(os.environ.get("PDPROXY_TEST_SEEDS", "1")))
TICKS = 0.3
"""Seconds by which answers may be past their deadlines: ticks of the proxy's clock, and the end of
a leg.
"""


def measured(*words: str) -> dict[str, Any]:
    options = overload.parser().parse_args(["--virtual", "--tokens", "64", "--batch", "8", *words])
    return overload.measure(options)


@pytest.mark.parametrize("seed", SEEDS)
def test_goodput_under_ten_times_the_load(seed: int) -> None:
    """Nine tenths of its peak, three to one between two tenants, nobody past its deadline, and all
    well afterwards.
    """
    found = measured("--seed", str(seed), "--seconds", "20")
    load = found["loads"][10.0]
    assert load["part_of_peak"] >= 0.9, load
    assert load["shares"] == pytest.approx(3.0, rel=0.12), load
    assert load["most_over_s"] < TICKS
    assert set(load["refused"]) <= {"deadline", "504"}
    assert load["refused"].get("504", 0) + load["late"] < 0.1 * load["good"]
    assert not load["failed"]
    assert not found["loads"][0.5]["refused"]
    assert not found["afterwards"]["failed"]


def test_places_are_learned() -> None:
    """Of more places than engines can use: by what engines report, and by answers that came too
    late.
    """
    found = measured("--windows", "--seconds", "20")
    assert found["loads"][10.0]["part_of_peak"] >= 0.85, found["loads"][10.0]
    assert found["loads"][10.0]["most_over_s"] < TICKS


def test_equal_seeds_give_equal_runs() -> None:
    """Of short and long requests, streams and lists."""
    words = ("--mixed", "--seconds", "1.5", "--times", "4")
    assert measured(*words) == measured(*words)
