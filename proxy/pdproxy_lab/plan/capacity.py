"""The highest rate at which an arrangement keeps the SLO, by simulation. The same question gives
the same answer.

Rates are those of a grid whose steps are 1 %. All arrangements get the same requests at a rate, and
the same ones at another rate, further apart (common random numbers): so differences are those of
the arrangements. It is taken for granted that what keeps the SLO at a rate keeps it at any lower
one. A run ends as soon as it is known whether the share is reached.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from pdproxy.scheduling.ledger_engine import Role
from pdproxy_lab.bench.slo import BenchSlo
from pdproxy_lab.plan.arrangement import AUTO, Arrangement
from pdproxy_lab.plan.bounds import Work, bound
from pdproxy_lab.plan.question import Question
from pdproxy_lab.simulate.cluster import Cluster, NoProgressError
from pdproxy_lab.simulate.placements import MakePlacement, auto, bounds_of
from pdproxy_lab.simulate.records import RequestTimes
from pdproxy_lab.simulate.summary import Summary, kept, summarise

GRID = 1.01
_NONE: Mapping[str, MakePlacement] = MappingProxyType({})
_LEAST = 1 / 300
"""Below this part of its bound, an arrangement counts as one that can't keep the SLO at all."""
_ABOVE = 1.25
"""How far above its bound a run that is not endless may seem to keep up."""


class Level(msgspec.Struct, frozen=True):
    """How exact capacities are: requests per run, runs with different seeds, the distance of rates,
    in steps of the grid, and the first seed.
    """

    requests: int
    seeds: int
    step: int
    first: int = 0

    @property
    def all_seeds(self) -> range:
        """The seeds of its runs."""
        return range(self.first, self.first + self.seeds)


def rate_at(place: int) -> float:
    """Return a rate of the grid, in requests per second."""
    return math.pow(GRID, place)


def place_of(rate: float) -> int:
    """Return the place of the highest rate of the grid that is not above `rate`."""
    return math.floor(math.log(rate) / math.log(GRID) + 1e-9)


class CapacitySearch:
    """Simulates arrangements, and remembers what it found. `placements`: what an arrangement's
    policy may name beside `auto`.
    """

    def __init__(
        self, question: Question, work: Work, placements: Mapping[str, MakePlacement] = _NONE
    ) -> None:
        self.question, self.work = question, work
        self._placements = {AUTO: auto(bounds_of(question.objective or question.slo)), **placements}
        self.runs = 0
        """Simulations so far."""
        self._passed: dict[tuple[Arrangement, Level, int], bool] = {}

    def passes(self, one: Arrangement, level: Level, place: int) -> bool:
        """Return whether an arrangement keeps the SLO at a rate of the grid."""
        key = (one, level, place)
        found = self._passed.get(key)
        if found is None:
            found = self._passed[key] = self._simulate(one, level, rate_at(place))
        return found

    def capacity(self, one: Arrangement, level: Level, guess: int | None = None) -> int | None:
        """Return the place in the grid of the highest rate that it serves; None: it can't keep the
        SLO.

        `guess`: a place near it, which saves runs.
        """
        limit = bound(one, self.work)
        low, high = place_of(self.least(one)), place_of(limit * _ABOVE) + 1
        place, width = (
            min(max(place_of(limit * 0.6) if guess is None else guess, low), high - 1),
            level.step,
        )
        if self.passes(one, level, place):
            while (upper := min(place + width, high)) < high and self.passes(one, level, upper):
                place, width = upper, 2 * width
        else:
            upper = place
            while not self.passes(one, level, place := max(upper - width, low)):
                if place == low:
                    return None
                upper, width = place, 2 * width
        while upper - place > level.step:
            middle = (place + upper) // 2
            if self.passes(one, level, middle):
                place = middle
            else:
                upper = middle
        return place

    def least(self, one: Arrangement) -> float:
        """Return the lowest rate at which it is simulated."""
        return bound(one, self.work) * _LEAST

    def at(self, one: Arrangement, level: Level, rate: float) -> list[Summary]:
        """Return what the runs at a rate amount to: good requests by `all`, and by each limit of
        the SLO alone.
        """
        question, slo = self.question, self.question.slo
        limits = {name: getattr(slo, name) for name in ("ttft", "tpot", "gap", "e2e")}
        slos = [BenchSlo(name="all", **limits)]
        slos += [
            BenchSlo(name=name, **{name: value})
            for name, value in limits.items()
            if value is not None
        ]
        found = []
        for seed in level.all_seeds:
            cluster = self._cluster(one)
            with contextlib.suppress(NoProgressError):  # what has not ended by then is not good
                cluster.run(question.demand.calls(rate, level.requests, seed))
            self.runs += 1
            found.append(summarise(cluster, slos))
        return found

    def _simulate(self, one: Arrangement, level: Level, rate: float) -> bool:
        total = level.requests * level.seeds
        count = _Count(
            self.question.slo, needed=math.ceil(total * self.question.share - 1e-9), total=total
        )
        for seed in level.all_seeds:
            cluster = self._cluster(one)
            cluster.records = _Watched(count)
            self.runs += 1
            try:
                cluster.run(self.question.demand.calls(rate, level.requests, seed))
            except (_DecidedError, NoProgressError):
                break
        return count.good >= count.needed

    def _cluster(self, one: Arrangement) -> Cluster:
        placement = self._placements.get(one.policy)
        policies = (
            {} if placement is not None else {Role.PREFILL: one.policy, Role.DECODE: one.policy}
        )
        return Cluster(
            one.fleet, self.question.hardware, one.shapes(self.question.shape), policies, placement
        )


class _DecidedError(Exception):
    """Whether the share is reached is known."""


class _Count:
    """Good and bad requests of all seeds."""

    def __init__(self, slo: BenchSlo, *, needed: int, total: int) -> None:
        self.slo, self.needed = slo, needed
        self.good, self.may_miss = 0, total - needed

    def add(self, good: bool) -> None:
        """Count a request; raise if the rest does not matter."""
        if good:
            self.good += 1
        else:
            self.may_miss -= 1
        if self.good >= self.needed or self.may_miss < 0:
            raise _DecidedError


class _Watched(RequestTimes):
    """Records that count good requests as they end."""

    def __init__(self, count: _Count) -> None:
        super().__init__()
        self._count = count

    def refused(self, number: int) -> None:
        """See `RequestTimes`."""
        super().refused(number)
        self._count.add(False)

    def ended(self, number: int, first: float, last: float, worst_gap: float) -> None:
        """See `RequestTimes`."""
        super().ended(number, first, last, worst_gap)
        self._count.add(kept(self._count.slo, self, number))
