"""A row's predicted cells: medians over seeds, and the spread of single runs. Pure but for the
virtual engines' own draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from pdproxy.engine_model.profile import Profile
from tests.fit.load import Request, served
from tests.fit.measured import COLUMNS, Load, Row

_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Predicted:
    """A cell: the median over seeds, and the least and the greatest value of one seed."""

    median: float
    low: float
    high: float


def cells(requests: Sequence[Request], seconds: float, load: Load) -> dict[str, float]:
    """Return one run's value of each column, computed as vLLM's serving benchmark does:
    milliseconds, requests per second.
    """
    ttft = [(one.tokens[0] - one.sent) * _MS for one in requests]
    tpot = [
        (one.tokens[-1] - one.tokens[0]) / max(len(one.tokens) - 1, 1) * _MS for one in requests
    ]
    itl = [(later - earlier) * _MS for one in requests for earlier, later in pairwise(one.tokens)]
    good = sum(
        a <= load.ttft_slo_ms and b <= load.tpot_slo_ms for a, b in zip(ttft, tpot, strict=True)
    )
    found = {f"ttft_p{share}": percentile(ttft, share) for share in (50, 95, 99)}
    found |= {f"tpot_p{share}": percentile(tpot, share) for share in (50, 95)}
    found |= {f"itl_p{share}": percentile(itl, share) for share in (50, 99)}
    return found | {"goodput": good / seconds, "throughput": len(requests) / seconds}


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile, 0 to 100, linear between two values as numpy's; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def predict(row: Row, load: Load, profile: Profile, seeds: Sequence[int]) -> dict[str, Predicted]:
    """Return the prediction of each column."""
    runs = [cells(*served(row, load, profile, seed), load) for seed in seeds]
    found = {}
    for column in COLUMNS:
        values = [run[column] for run in runs]
        found[column] = Predicted(median(values), min(values), max(values))
    return found
