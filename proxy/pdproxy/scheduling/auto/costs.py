"""What each choice costs: predicted latencies against the SLO, harm to the sequences there, and seconds of engines. Pure."""

from __future__ import annotations

import math

from pdproxy.scheduling.auto.goal import Goal, Weights
from pdproxy.scheduling.auto.loads import Look

_LINE = 0.5
"""How much of the transfers that are to come a transfer waits for."""
_FAR = 30.0
_LATE = 1.25
"""How much later than its limit a first token is predicted, where waiting for it is hopeless."""
_LEAST_LEFT = 0.25
"""Of an answer that is longer than answers are on average, so much of the mean is expected to come."""
_DELAY = 0.05
"""Without a limit of TPOT: what a second costs by which sequences wait, in seconds."""


def chance(distance: float) -> float:
    """Return the chance that a limit is missed: 0.5 at a distance of 0, in widths; the logistic function."""
    if distance < -_FAR:
        return 0.0
    if distance > _FAR:
        return 1.0
    return 1.0 / (1.0 + math.exp(-distance))


class Costs:
    """Costs are numbers of requests that miss the SLO; without one, seconds of a request that waits."""

    def __init__(self, goal: Goal, weights: Weights) -> None:
        self._ttft, self._tpot, self._gap = goal.ttft, goal.tpot, goal.gap
        limited = goal.any
        self._engine_s = weights.engine_s if limited else 1.0
        self._ttft_s = weights.ttft / goal.ttft if goal.ttft is not None else weights.ttft if limited else 1.0
        self._ttft_width = 1.0 / (weights.ttft_width * goal.ttft) if goal.ttft is not None else 0.0
        self._tpot_s = weights.tpot / goal.tpot if goal.tpot is not None else 0.0
        self._tpot_width = 1.0 / (weights.tpot_width * goal.tpot) if goal.tpot is not None else 0.0
        self._rise = weights.delay / goal.tpot if goal.tpot is not None else 0.0
        self._kept = weights.kept

    def hopeless(self, ttft_s: float) -> bool:
        """Return whether a request with this predicted TTFT is not worth to be begun."""
        return self._ttft is not None and ttft_s > _LATE * self._ttft

    def judge(self, look: Look, now: float, output: float) -> None:
        """Set what a prompt at an engine costs, by whatever choice. `output`: the mean length of answers."""
        load = look.load
        decoding, used = load.decoding, look.seconds
        before = load.times.before_s
        first = before + look.seconds
        if look.busy_s > before:
            first += look.busy_s - before
        harm = 0.0
        if decoding:
            used = look.longer_s
            if not look.busy_s:
                first += 0.5 * look.step_s
            count = decoding + load.expected
            limit = self._tpot
            if limit is not None:
                # The sequences there, as if all had the mean age and the mean length.
                made = load.mean_made()
                left = output - made
                if left < _LEAST_LEFT * output:
                    left = _LEAST_LEFT * output
                length = made + left
                ends = (load.mean_age_s(now) + left * look.tpot_s + look.busy_s) / length
                look.distance = distance = (ends - limit) * self._tpot_width
                look.per_s = per_s = self._tpot_width / length
                look.rise = rise = self._rise / length
                look.before = chance(distance)
                more = look.longer_s
                harm = count * (chance(distance + more * per_s) - look.before + more * rise)
            elif self._gap is None:
                harm = _DELAY * count * look.longer_s
            if self._gap is not None and look.full_s > self._gap:
                harm += count
        look.first_s = first
        look.cost = harm + self._engine_s * used
        tpot = look.tpot_s
        if self._tpot is not None:
            look.tpot_cost = chance((tpot - self._tpot) * self._tpot_width) + self._tpot_s * tpot
        if self._gap is not None and look.full_s > self._gap:
            look.tpot_cost += load.delay_share(now)

    def _ttft_cost(self, ttft: float) -> float:
        cost = self._ttft_s * ttft
        if self._ttft is not None:
            cost += chance((ttft - self._ttft) * self._ttft_width)
        return cost

    def whole(self, look: Look) -> tuple[float, float]:
        """Return what it costs that an engine serves the request whole, and its TTFT."""
        load = look.load
        ttft = look.first_s + load.times.to_client_s
        cost = look.cost + look.tpot_cost + self._ttft_cost(ttft)
        return (cost + self._kept if load.kept else cost), ttft

    def split(self, prefill: Look, decode: Look, tokens: int) -> tuple[float, float]:
        """Return what it costs that two engines share the work, and the TTFT."""
        load = decode.load
        times = load.times
        pull = times.pull_s
        ttft = prefill.first_s + times.between_s + pull + 1.5 * decode.step_s + times.to_client_s
        transfer = times.transfer_base_s + (tokens - decode.cached) * times.transfer_token_s
        ttft += transfer * (1.0 + _LINE * load.pulls)
        cost = prefill.cost + decode.tpot_cost + self._engine_s * pull + self._ttft_s * ttft
        if self._ttft is not None:
            cost += chance((ttft - self._ttft) * self._ttft_width)
        if load.decoding:
            count = load.decoding + load.expected
            if self._tpot is not None:
                cost += count * (chance(decode.distance + pull * decode.per_s) - decode.before + pull * decode.rise)
            elif self._gap is None:
                cost += _DELAY * count * pull
        return cost, ttft
