"""Gaps between tokens, without work per token: the worst gap of each request, and a histogram of
all gaps. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from pdproxy_lab.bench.measures import PERCENTILES, Spread, needed

_LOG_STEP = math.log(1.01)
_LEAST_S = 1e-7
_MAX_SIZE = 1024


class WorstGaps:
    """The longest step since any step. Holds only steps after which no step was as long: their
    durations descend.
    """

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._seconds: list[float] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, seconds: float) -> None:
        """Add the last step, by its number, or several steps of which the last one was the
        longest.
        """
        durations, steps = self._seconds, self._steps
        while durations and durations[-1] <= seconds:
            durations.pop()
            steps.pop()
        durations.append(seconds)
        steps.append(step)

    def worst_after(self, step: int) -> float:
        """Return how long the longest step was whose number is above `step`; 0 if there was
        none.
        """
        place = bisect_right(self._steps, step)
        return self._seconds[place] if place < len(self._steps) else 0.0

    def forget(self, step: int) -> None:
        """Forget steps up to `step`: nobody will ask for them. Only where there are many."""
        if len(self._steps) > _MAX_SIZE:
            place = bisect_right(self._steps, step)
            del self._steps[:place]
            del self._seconds[:place]


class Histogram:
    """Counts durations, in seconds, in classes that are 1 % wide."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    @property
    def total(self) -> int:
        """How many durations were counted."""
        return sum(self.counts.values())

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a duration, `count` times."""
        index = _class_of(seconds)
        self.counts[index] = self.counts.get(index, 0) + count

    def add_rising(self, first: float, increment: float, steps: int, count: int) -> None:
        """Count `steps` durations, `count` times each: the first, and each further one longer by
        `increment`.
        """
        counts, done = self.counts, 0
        last = _class_of(first + increment * (steps - 1))
        while done < steps:
            index = _class_of(first + increment * done)
            if index >= last:
                upto = steps
            else:
                upto = min(
                    steps,
                    max(done, int((math.exp((index + 1) * _LOG_STEP) - first) / increment)) + 1,
                )
            counts[index] = counts.get(index, 0) + (upto - done) * count
            done = upto

    def merge(self, other: Histogram) -> None:
        """Add all that another one has counted."""
        for index, count in other.counts.items():
            self.counts[index] = self.counts.get(index, 0) + count

    def spread(self) -> Spread | None:
        """Return what all durations amount to, each within 1 %; None: nothing was counted."""
        total = self.total
        if not total:
            return None
        found = [
            (math.exp((index + 0.5) * _LOG_STEP), count)
            for index, count in sorted(self.counts.items())
        ]
        mean = math.fsum(seconds * count for seconds, count in found) / total
        variance = math.fsum((seconds - mean) ** 2 * count for seconds, count in found) / total
        percentiles: dict[int, float | None] = {}
        for percent in PERCENTILES:
            left = total * percent / 100
            value = found[-1][0]
            for seconds, count in found:
                left -= count
                if left <= 0:
                    value = seconds
                    break
            percentiles[percent] = value if total >= needed(percent) else None
        return Spread(
            count=total,
            mean=mean,
            std=math.sqrt(variance),
            largest=found[-1][0],
            percentiles=percentiles,
        )


def _class_of(seconds: float) -> int:
    return math.floor(math.log(max(seconds, _LEAST_S)) / _LOG_STEP)
