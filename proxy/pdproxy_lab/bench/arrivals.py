"""When requests are due: seconds from the start of a run, from a seed. Pure: the same arguments
give the same times.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import takewhile
from typing import Literal

import msgspec

Kind = Literal["constant", "poisson", "burst", "ramp"]
KINDS: tuple[Kind, ...] = ("constant", "poisson", "burst", "ramp")
MAX_RATE = 100_000.0
"""Requests per second. A higher rate is a typing error."""
MAX_REQUESTS = 1_000_000
"""Of one run."""


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """An arrival process.

    `constant`: equal gaps. `poisson`: exponential gaps. `burst`: gaps from a gamma distribution
    with shape `burstiness`, as in vLLM's serving benchmark: 1 is Poisson, below 1 requests come in
    bursts. `ramp`: Poisson, with a rate that goes from `rate` to `end_rate` linearly over the run.
    """

    kind: Kind = "poisson"
    rate: float = 1.0
    """Requests per second, on average; `ramp`: at the start."""
    end_rate: float | None = None
    """`ramp`: requests per second at the end; otherwise None."""
    burstiness: float = 0.25
    """`burst`: the shape of the gamma distribution."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        for name, value in (("rate", self.rate), ("end rate", self.end_rate)):
            if value is not None and not 0 < value <= MAX_RATE:
                raise ValueError(
                    f"the {name} must be above 0 and at most {MAX_RATE:g} requests per second, "
                    f"got {value:g}"
                )
        if (self.kind == "ramp") != (self.end_rate is not None):
            raise ValueError("a ramp needs two rates, A:B, and all other arrivals one")
        if not 0.01 <= self.burstiness <= 100:
            raise ValueError(f"the burstiness must be 0.01 to 100, got {self.burstiness:g}")

    @property
    def mean_rate(self) -> float:
        """Requests per second over the whole run."""
        return self.rate if self.end_rate is None else (self.rate + self.end_rate) / 2

    def times(
        self, seed: int, *, duration: float | None = None, requests: int | None = None
    ) -> list[float]:
        """Return the times at which requests are due, in seconds, ascending.

        `duration`: all before that many seconds. `requests`: exactly so many; a ramp then lasts as
        long as they take on average.

        Raises:
            ValueError: both or none are given, or they are too many.
        """
        if (duration is None) == (requests is None):
            raise ValueError("either a duration or a number of requests is needed")
        expected = requests if requests is not None else self.mean_rate * (duration or 0.0)
        if expected > MAX_REQUESTS:
            raise ValueError(f"{expected:.0f} requests are more than {MAX_REQUESTS} in one run")
        length = duration if duration is not None else expected / self.mean_rate
        drawn = self._endless(random.Random(f"{seed}:arrivals"), length)
        if requests is not None:
            return [next(drawn) for _ in range(requests)]
        return list(takewhile(lambda time: time < length, drawn))

    def _endless(self, chance: random.Random, length: float) -> Iterator[float]:
        if self.kind == "constant":
            index = 0
            while True:
                yield index / self.rate
                index += 1
        if self.kind == "ramp":
            yield from self._ramp(chance, length)
        shape = self.burstiness if self.kind == "burst" else 1.0
        time = 0.0
        while True:
            time += chance.gammavariate(shape, 1.0 / (self.rate * shape))
            yield time

    def _ramp(self, chance: random.Random, length: float) -> Iterator[float]:
        """Yield the times at which `rate*t + (end_rate-rate)*t*t/(2*length)`, the expected number,
        reaches a Poisson one's.
        """
        end = self.end_rate if self.end_rate is not None else self.rate
        slope = (end - self.rate) / length if length else 0.0
        total = self.mean_rate * length
        expected = 0.0
        while True:
            expected += chance.expovariate(1.0)
            if expected > total:  # after the ramp the last rate stays
                yield length + (expected - total) / end
            else:
                yield (
                    2
                    * expected
                    / (self.rate + math.sqrt(max(self.rate**2 + 2 * slope * expected, 0.0)))
                )
