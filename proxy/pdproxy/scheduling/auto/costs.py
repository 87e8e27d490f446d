"""What each choice costs: predicted latencies against the SLO, harm to the sequences there, and
seconds of engines. Pure.
"""

from __future__ import annotations

import math

import msgspec

from pdproxy.observe.weighed import Option, Weighed
from pdproxy.scheduling.auto.correction import Handoff
from pdproxy.scheduling.auto.loads import MEMORY_S, MOST_BUSY, PredictedLeg, PredictedLoad
from pdproxy.scheduling.auto.weights import Weights
from pdproxy.scheduling.slo import Slo

_LINE = 0.5
"""How much of the transfers that are to come a transfer waits for."""
_LATE = 1.25
"""How much later than its limit a first token is predicted, where waiting for it is hopeless."""
_LEAST_LEFT = 0.25
"""Of an answer that is longer than answers are on average, so much of the mean is expected to
come.
"""
_DELAY = 0.05
"""Without a limit of TPOT: what a second costs by which sequences wait, in seconds."""


def chance(distance: float) -> float:
    """Return the chance that a limit is missed: 0.5 at a distance of 0, in widths; the logistic
    function.
    """
    return 0.5 + 0.5 * math.tanh(0.5 * distance)


class Look:
    """What one prompt would mean for one engine. Seconds; `cost`, `tpot_cost`, `before`: costs."""

    __slots__ = (
        "before",
        "busy",
        "cached",
        "cost",
        "distance",
        "first_s",
        "full_s",
        "kept_share",
        "late",
        "load",
        "longer_s",
        "per_s",
        "rise",
        "seconds",
        "slow",
        "step_s",
        "steps",
        "tpot_cost",
        "tpot_s",
    )
    load: PredictedLoad
    cached: int
    """The prompt's tokens in its cache."""
    busy: float
    """Until the prompts before it are done."""
    kept_share: float
    """The part of the time that the engine works, if it is kept for prefill."""
    seconds: float
    """Its prefill there."""
    steps: float
    """In so many steps of the engine."""
    longer_s: float
    """How much longer its sequences would wait."""
    first_s: float
    """From the client until the prefill is done."""
    step_s: float
    """A step with the request's sequence."""
    full_s: float
    """A step that is full of prompts."""
    tpot_s: float
    """The mean time between its tokens, 0 while it is unknown."""
    cost: float
    """Of the prefill: the harm to the sequences there, and the engine's time."""
    tpot_cost: float
    """Of decoding there."""
    late: float
    """Of a first token that may be late, if the request is served whole there."""
    slow: float
    """How likely the tokens after it are slow there. Both together is one miss."""
    distance: float
    """How far the sequences there are beyond their limit of TPOT, in widths."""
    per_s: float
    """How much nearer to it a second brings them."""
    rise: float
    """What a second costs by which they wait, whether they miss the limit or not."""
    before: float
    """How likely one of them is to miss the limit as it is."""


class Choice(msgspec.Struct, eq=False):
    """What may be done with a request: what is predicted of it, and its engines. `decode` is None
    where it is not split; else `handoff` is that of its prompt's length, and `leg` its prefill's,
    once that was opened.
    """

    option: Option
    prefill: Look
    decode: Look | None = None
    handoff: Handoff | None = None
    leg: PredictedLeg | None = None


class Costs:
    """Costs are numbers of requests that miss the SLO; without one, seconds of a request that
    waits. `weight`: what this request's own miss counts, and its latencies.
    """

    def __init__(self, slo: Slo, weights: Weights, weight: float = 1.0) -> None:
        self.longest_s = math.inf if slo.ttft is None else slo.ttft
        """The TTFT beyond which a request is late."""
        self._miss = weight
        self._ttft, self._tpot, self._gap = slo.ttft, slo.tpot, slo.gap
        limited = bool(slo)
        self._engine_s = weights.engine_s if limited else 1.0
        self._ttft_s = weight * (
            weights.ttft / slo.ttft if slo.ttft is not None else weights.ttft if limited else 1.0
        )
        self._ttft_width = 1.0 / (weights.ttft_width * slo.ttft) if slo.ttft is not None else 0.0
        self._tpot_s = weight * weights.tpot / slo.tpot if slo.tpot is not None else 0.0
        self._tpot_width = 1.0 / (weights.tpot_width * slo.tpot) if slo.tpot is not None else 0.0
        self._rise = weights.delay / slo.tpot if slo.tpot is not None else 0.0
        self._kept = weights.kept

    def hopeless(self, ttft_s: float) -> bool:
        """Return whether a request with this predicted TTFT is not worth to be begun."""
        return ttft_s > _LATE * self.longest_s

    def look(
        self,
        load: PredictedLoad,
        now: float,
        tokens: int,
        cached: int,
        output: float,
        kept_share: float,
    ) -> Look:
        """Return what a prompt would mean for an engine. Where no sequence decodes there, `answer`
        has to note the rest.

        `cached`: its tokens in the cache; `output`: the answer, in tokens; `kept_share`: the part
        of the time that an engine works that is kept for prefill.
        """
        one = Look()
        one.load = load
        load.advance(now)
        times, decoding = load.times, load.decoding
        before_s, busy = times.before_s, 0.0
        if load.pending_s:
            busy = load.free_at - now
            if busy < 0.0:
                busy = 0.0
        one.cached, one.busy, one.kept_share = cached, busy, kept_share
        if not decoding:
            seconds, one.longer_s, one.steps = times.prefill_s(
                tokens - cached, cached, 0, 0.0, busy > before_s
            )
            one.seconds, one.cost = seconds, self._engine_s * seconds
            first = before_s + seconds
            one.first_s = first + (busy - before_s) if busy > before_s else first
            one.tpot_s = one.tpot_cost = one.slow = 0.0
            return one
        context = load.prompts + decoding * load.steps - load.began_steps
        seconds, longer, steps = times.prefill_s(
            tokens - cached, cached, decoding, context, busy > before_s
        )
        one.seconds, one.longer_s, one.steps = seconds, longer, steps
        self.answer(one, now, tokens, output, context)
        first = before_s + seconds
        one.first_s = first + (busy - before_s if busy > before_s else 0.5 * one.step_s)
        harm, count, limit = 0.0, load.weight, self._tpot
        if limit is not None:
            # The sequences there, as if all had the mean age and the mean length.
            made = load.steps - load.began_steps / decoding + 1.0
            mean = load.outputs / decoding
            left = mean - made
            if left < _LEAST_LEFT * mean:
                left = _LEAST_LEFT * mean
            length = made + left
            ends = (now - load.began_sum / decoding + left * one.tpot_s + busy) / length
            one.distance = distance = (ends - limit) * self._tpot_width
            one.per_s = per_s = self._tpot_width / length
            one.rise = rise = self._rise / length
            one.before = before = chance(distance)
            harm = count * (chance(distance + longer * per_s) - before + longer * rise)
        elif self._gap is None:
            harm = _DELAY * count * longer
        if self._gap is not None and one.full_s > self._gap:
            harm += count
        one.cost = harm + self._engine_s * longer
        return one

    def answer(
        self, one: Look, now: float, tokens: int, output: float, context: float = 0.0
    ) -> None:
        """Note what the tokens after the first would take, where `tpot_s` is not known yet.
        `context`: the tokens of the sequences that decode there.
        """
        load = one.load
        times, decoding, expected = load.times, load.decoding, load.expected
        share = load.delay * math.exp((load.delay_at - now) / MEMORY_S)
        if load.kept and share < one.kept_share:
            share = one.kept_share
        if share > MOST_BUSY:
            share = MOST_BUSY
        # Until those that are to come are there, some of the sequences have ended.
        still = 1.0
        if decoding and expected:
            life = load.outputs / decoding * times.step_s(decoding, context)
            still = 1.0 - load.wait_s / life if load.wait_s < life else 0.0
        step = times.step_s(
            still * decoding + expected + 1,
            still * context + load.expected_tokens + tokens + 0.5 * output,
        )
        full = times.full_step_s(
            times.chunk if one.busy else tokens - one.cached, decoding, context
        )
        tpot = step / (1.0 - share)
        if tpot > full:  # no step takes longer than a full one
            begun = times.chunk / tokens
            most = times.full_step_s(times.chunk, decoding + expected, context, min(1.0, begun))
            if tpot > most:
                tpot = max(most, step)
        one.step_s, one.tpot_s, one.full_s = step, tpot, full
        limit, gap = self._tpot, self._gap
        one.slow = cost = 0.0
        if limit is not None:
            one.slow = slow = chance((tpot - limit) * self._tpot_width)
            cost = slow * self._miss + self._tpot_s * tpot
        if gap is not None and full > gap:
            cost += load.delay_share(now) * self._miss
        one.tpot_cost = cost

    def whole(self, look: Look) -> tuple[float, float, float]:
        """Return what it costs that an engine serves the request whole, but for its `tpot_cost`
        where it is not late, the TTFT, and the part of the cost that is for this.
        """
        load = look.load
        ttft = look.first_s + load.times.to_client_s
        ttft_cost = self._ttft_s * ttft
        look.late = 0.0
        if self._ttft is not None:
            look.late = late = chance((ttft - self._ttft) * self._ttft_width) * self._miss
            ttft_cost += late
        cost = look.cost + ttft_cost
        return (cost + self._kept if load.kept else cost), ttft, ttft_cost

    def split(self, prefill: Look, decode: Look, tokens: int, handoff: float) -> Option:
        """Return what it costs that two engines share the work. `handoff`: by how much longer
        handoffs take than is predicted without it.
        """
        load = decode.load
        times = load.times
        moved = tokens - decode.cached
        pull = times.pull_base_s + moved * times.pull_token_s
        transfer = times.transfer_base_s + moved * times.transfer_token_s
        ttft = prefill.first_s + handoff * (
            times.between_s
            + pull
            + 1.5 * decode.step_s
            + times.to_client_s
            + transfer * (1.0 + _LINE * load.pulls)
        )
        ttft_cost = self._ttft_s * ttft
        if self._ttft is not None:
            late = chance((ttft - self._ttft) * self._ttft_width) * self._miss
            ttft_cost += late * (1.0 - decode.slow)
        cost = prefill.cost + decode.tpot_cost + self._engine_s * pull + ttft_cost
        if load.decoding:
            count = load.weight
            if self._tpot is not None:
                cost += count * (
                    chance(decode.distance + pull * decode.per_s)
                    - decode.before
                    + pull * decode.rise
                )
            elif self._gap is None:
                cost += _DELAY * count * pull
        return Option(
            cost,
            ttft,
            decode.tpot_s,
            ttft_cost,
            decode.tpot_cost,
            prefill.cost,
            prefill.longer_s,
            pull,
            prefill.cached,
        )

    def weighed(self, choice: Choice, other: Choice | None) -> Weighed:
        """Return a choice and the next best one as operators are shown them."""
        if other is None:
            return Weighed(choice.option, None, (), self._ttft, self._tpot, self._engine_s)
        url = other.prefill.load.url
        engines = (url,) if other.decode is None else (url, other.decode.load.url)
        return Weighed(choice.option, other.option, engines, self._ttft, self._tpot, self._engine_s)
