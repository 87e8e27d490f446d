"""Which engines are kept for prefill: none, or as many as the demand of the last seconds needs.
Decided slowly. Pure.

An engine that is kept gets no answers to decode, so prompts there delay nobody. How many it should
be is predicted from the demand, for each number, as a queue: the engines that prefill are servers
with a common line, and what they can't take is served whole by the others. One engine more or less
at a time, and only if that is clearly better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from pdproxy.scheduling.auto.demand import Demand
from pdproxy.scheduling.auto.loads import MEMORY_S, PredictedLoad
from pdproxy.scheduling.auto.times import WorkTimes
from pdproxy.scheduling.auto.weights import Weights
from pdproxy.scheduling.slo import Slo

REVIEW_S, SETTLED_S = 0.25, 1.0
"""Seconds between two reviews: behind a start, a step of the load or a change, and else."""
_BETTER = 0.06
"""By how much less a number must cost, in parts of the requests that miss the SLO."""
_SLIGHTLY, _PATIENCE_S = 0.005, 8.0
"""A number that costs less by so little is chosen if it does for so many seconds."""
_FULL = 0.97
"""The part of the time that prefill engines are expected to work at most: what is more is served
whole.
"""
_LEAST_LEFT = 0.05
"""The part of the time that an engine's steps need for reading its weights, at least."""
_ALMOST = 0.98
"""The part of the time that can be used before a queue grows without end."""
_OVER = 3.0
"""What the part of the time costs that is missing."""
_SPREAD = 0.03
"""How much the TPOT of answers differs by the number of sequences beside them, as a part of its
limit.
"""
_RATES = (0.95, 1.0, 1.05)
"""Parts of the measured rate that count alike: it is not exact, and it will not stay."""
_UNEVEN = 1.2
"""The variance of what sequences wait at one engine, against prompts that come by chance. With more
engines they come more evenly: it falls with the root of their number.
"""
_MEAN, _MEAN_FEW = 0.92, 0.11
"""The mean TPOT of answers, against that of an engine whose sequences always wait for the mean part
of the time; with few engines it is longer, by the same rule.
"""
_SMALL = 0.2
"""What latencies and seconds of engines weigh here, beside requests that miss the SLO."""
_NUMBERS = 16
"""How many numbers of engines are compared, evenly from 0 on; of a demand that is as before, only
the next ones are.
"""
_CHANGED = 0.15
"""By which part the work with prompts or the tokens of answers must change, to be another
demand.
"""
_COMPARE_S = 5.0
"""Seconds after which all are compared in any case."""
_MOST_SHARE = 0.9
_ASSUMED, _BUSY = 12.0, 0.75
"""So many requests are assumed to have come before the first ones, at this part of the highest rate
that the engines serve.
"""
_MISSES, _HALVINGS, _FEW = 0.5, 6, 4
"""How that rate is found, in half a millisecond: so many of the requests miss the SLO at it, in how
many halvings, and how many parts of the engines are tried for prefill.
"""
_OTHER = 0.3
"""By which part a mean request must change for that rate to be found anew."""


def expected_cost(
    count: int, engines: int, demand: Demand, times: WorkTimes, slo: Slo, weights: Weights
) -> float:
    """Return what a mean request costs, where `count` of the engines are kept for prefill."""
    costs = [
        _cost_at(demand.rate * part, count, engines, demand, times, slo, weights) for part in _RATES
    ]
    return sum(costs) / len(costs)


def _cost_at(
    rate: float,
    count: int,
    engines: int,
    demand: Demand,
    times: WorkTimes,
    slo: Slo,
    weights: Weights,
) -> float:
    hardware, output = times.hardware, max(demand.output, 1.0)
    work = rate * demand.alone_s
    split = min(_FULL * count / work, 1.0) if count and work > 0 else 0.0
    others = engines - count
    # The sequences at the others: a step takes longer with each of them, and they wait for pulls
    # and for prompts.
    context, decodes = demand.tokens + output / 2, rate * output / others
    prompts = rate * (1.0 - split) / others
    pulls = rate * split / others
    waiting = prompts * demand.delay_s + pulls * demand.pull_s
    left = 1.0 - waiting - decodes * times.per_sequence_s(context)
    base = times.step_s(0, 0)
    tpot = base / left if left > _LEAST_LEFT else base / _LEAST_LEFT
    longest = math.inf
    if prompts > 0:
        begun = min(times.chunk / demand.tokens, 1.0)
        sequences = decodes * min(tpot, times.full_step_s(demand.tokens, 0, 0, begun))
        longest = times.full_step_s(demand.tokens, sequences, sequences * context, begun)
        if not split:
            tpot = min(tpot, longest)
    sequences = decodes * tpot
    cost = 0.0
    if left < _LEAST_LEFT and tpot < longest:
        cost += _OVER * (_LEAST_LEFT - left)
    fixed = hardware.before_engine_s + hardware.to_client_s
    if split:
        fixed_split = fixed + demand.alone_s + demand.moves_s
        cost += split * _waiting(
            count, work * split / count, demand, demand.alone_s, fixed_split, slo, weights
        )
    if split < 1.0:
        steps = demand.new_tokens / max(times.chunk - sequences, 1.0)
        beside = demand.alone_s + steps * (times.step_s(sequences, sequences * context) - base)
        busy = prompts * beside + pulls * demand.pull_s
        cost += (1.0 - split) * _waiting(others, busy, demand, beside, fixed + beside, slo, weights)
    if slo.tpot is not None:
        cost += _SMALL * weights.tpot * tpot / slo.tpot
        mean = tpot * (_MEAN + _MEAN_FEW / math.sqrt(others))
        life = output * mean
        squares = prompts * demand.delay_s**2 * (1.0 + demand.variation) + pulls * demand.pull_s**2
        variance = _UNEVEN / math.sqrt(others) * squares * life + (_SPREAD * slo.tpot * output) ** 2
        cost += _beyond(waiting * life, variance, (slo.tpot - mean) * output)
    if slo.gap is not None and times.full_step_s(demand.tokens, 0, 0) > slo.gap:
        cost += 1.0 - math.exp(-prompts * output * tpot)
    used = split * (demand.alone_s + demand.pull_s) + (1.0 - split) * demand.delay_s
    return cost + _SMALL * weights.engine_s * used


def _beyond(mean: float, variance: float, more: float) -> float:
    """Return how likely a wait is to be longer than its mean by `more`, in seconds.

    It has a gamma distribution (by the approximation of Wilson and Hilferty), or a normal one where
    it varies more than that.
    """
    if mean + more <= 0.0:
        return 1.0
    shape, limit = mean * mean / variance, (mean + more) * mean / variance
    if shape < 1.0:
        z = -more / math.sqrt(variance)
    else:
        z = 3.0 * math.sqrt(limit) * ((shape / limit) ** (1 / 3) - 1.0 + 1.0 / (9.0 * limit))
    return 0.5 * math.erfc(-z * math.sqrt(0.5))


def _waiting(
    servers: int,
    busy: float,
    demand: Demand,
    service_s: float,
    fixed_s: float,
    slo: Slo,
    weights: Weights,
) -> float:
    """Return what the TTFT costs, if `servers` are busy for that part of the time. Sakasegawa's
    approximation of M/G/c.
    """
    over = max(busy - _ALMOST, 0.0)
    busy = min(busy, _ALMOST)
    waits = math.pow(busy, math.sqrt(2.0 * (servers + 1)) - 1.0)
    mean = (1.0 + demand.variation) / 2 * waits / (servers * (1.0 - busy)) * service_s
    cost = _OVER * over
    if slo.ttft is None:
        return cost + _SMALL * weights.ttft * (fixed_s + mean)
    left = slo.ttft - fixed_s
    late = 1.0 if left <= 0 else waits * math.exp(-left * waits / mean) if mean > 0 else 0.0
    return cost + late + _SMALL * weights.ttft * (fixed_s + mean) / slo.ttft


def typical(loads: Sequence[PredictedLoad]) -> WorkTimes:
    """Return the times of the first engine, with the middle corrections of those that measure:
    steps are corrected where answers are decoded, prefill where prompts are computed. An engine has
    old corrections of what it has not done for long.
    """
    kept = [load.times for load in loads if load.kept]
    others = [load.times for load in loads if not load.kept]
    found = WorkTimes(loads[0].times.hardware, loads[0].times.chunk)
    found.prefill_factor = sorted([times.prefill_factor for times in kept or others])[
        len(kept or others) // 2
    ]
    found.step_factor = sorted([times.step_factor for times in others or kept])[
        len(others or kept) // 2
    ]
    return found


class KeptEngines:
    """Keeps engines of role `any` for prefill. `changes`: how often it has kept or freed some."""

    def __init__(self, slo: Slo, weights: Weights) -> None:
        self._slo, self._weights = slo, weights
        self._work = self._tokens = 0.0
        self._compared = -math.inf
        self._busy, self._mean = 0.0, (0.0,) * 4
        self._slightly = math.inf
        self.count = 0
        """How many are kept."""
        self.changes = 0
        self.share = 0.0
        """The part of the time in which each of them is expected to work."""

    def review(
        self,
        now: float,
        loads: Sequence[PredictedLoad],
        demand: Demand,
        times: WorkTimes,
        prefill: int = 0,
        fixed: int = 0,
    ) -> None:
        """Keep some engines more or less. `loads`: the engines that may be kept, two or more;
        `times`: `typical` ones.

        `fixed`: how many other engines there are; `prefill`: how many of them are for prefill
        alone.
        """
        engines = len(loads) + (0 if fixed > prefill else -1)
        self.count = sum(load.kept for load in loads)
        if self.count > engines:  # others went down
            self._keep(engines, loads, now, at_once=True)
        demand = self._expected(demand, len(loads) + fixed, prefill, engines, times)
        work, tokens = demand.rate * demand.alone_s, demand.rate * demand.output
        numbers = {0, max(self.count - 1, 0), self.count, min(self.count + 1, engines)}
        changed = max(abs(work - self._work) / work, abs(tokens - self._tokens) / max(tokens, 1.0))
        if changed > _CHANGED or now - self._compared > _COMPARE_S:
            self._work, self._tokens, self._compared = work, tokens, now
            numbers.update(range(0, engines + 1, -(-(engines + 1) // _NUMBERS)))
        slo, weights = self._slo, self._weights
        everything = len(loads) + fixed
        costs = {
            number: expected_cost(number + prefill, everything, demand, times, slo, weights)
            for number in numbers
        }
        best = min(sorted(numbers), key=lambda number: (costs[number], abs(number - self.count)))
        gain = costs[self.count] - costs[best]
        if gain < _SLIGHTLY:
            self._slightly = now
        if gain > _BETTER or now - self._slightly > _PATIENCE_S:
            self._keep(best, loads, now)
        self.share = min(work / (self.count + prefill), _MOST_SHARE) if self.count else 0.0

    def _expected(
        self, demand: Demand, everything: int, prefill: int, most: int, times: WorkTimes
    ) -> Demand:
        """Return the demand with what is expected as long as little is known: that the engines are
        busy, and keep the SLO. Where few requests come, any number of engines does.
        """
        mean = (demand.alone_s, demand.output, float(everything), float(most))
        if any(abs(one - old) > _OTHER * old for one, old in zip(mean, self._mean, strict=True)):
            self._mean = mean
            self._busy = _BUSY * self._capacity(demand, everything, prefill, most, times)
        requests = demand.requests + _ASSUMED
        seconds = demand.requests / demand.rate + _ASSUMED / self._busy
        return msgspec.structs.replace(demand, rate=requests / seconds, requests=requests)

    def _capacity(
        self, demand: Demand, everything: int, prefill: int, most: int, times: WorkTimes
    ) -> float:
        """Return the requests per second beyond which `_MISSES` of them miss the SLO, with the best
        number of engines.
        """
        numbers = range(0, most + 1, -(-(most + 1) // _FEW))
        low, high = 0.0, everything / demand.alone_s
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            at = msgspec.structs.replace(demand, rate=middle)
            least = min(
                expected_cost(number + prefill, everything, at, times, self._slo, self._weights)
                for number in numbers
            )
            low, high = (middle, high) if least < _MISSES else (low, middle)
        return max(low, high / 2)

    def _keep(
        self, best: int, loads: Sequence[PredictedLoad], now: float, *, at_once: bool = False
    ) -> None:
        """Go most of the way to the best number, or all of it."""
        self.changes += 1
        self._compared = -math.inf
        more = best > self.count
        change = abs(best - self.count)
        if not at_once:
            change = max(2 * change // 3, 1)
        if more:  # those whose sequences are soonest gone
            chosen = sorted(
                (load for load in loads if not load.kept),
                key=lambda load: load.decoding + load.expected,
            )
        else:
            chosen = sorted((load for load in loads if load.kept), key=lambda load: load.free_at)
        for load in chosen[:change]:
            load.kept = more
            if (
                not more
                # what its sequences waited for was the prefill for others: only what is waiting now
                # is to come
            ):
                load.own.delay, load.own.delay_at = load.own.pending_s / MEMORY_S, now
        self.count += change if more else -change
