"""What requests ask of the engines lately, per second: averages that forget. Pure."""

from __future__ import annotations

import math

import msgspec

from pdproxy.scheduling.auto.correction import Handoffs
from pdproxy.scheduling.auto.times import WorkTimes

_REQUESTS = 200
"""How many requests make an average: the requests of the last seconds, as the bounds say."""
_LEAST_S, _MOST_S = 2.0, 6.0
_KNOWN_S = 0.5
"""Seconds from which a rate is known."""
_PART = 0.25
"""The part of its memory for which an average takes what came as one sum."""
_SETTLED = 0.8
"""The part of its memory that an average knows: 1.6 times the memory behind a start or a step."""
_STEP = math.log(2.0)
"""Of twice and half the rate it is tested whether they are likelier than the rate."""
_CERTAIN = 4.5
"""The logarithm of how much likelier, to be taken for a step of the load."""
_NOTHING = (0.0,) * 6


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second, and what a mean one takes, in seconds or tokens."""

    rate: float
    alone_s: float
    """Its prefill at an engine that does nothing else."""
    variation: float
    """The variance of that, as a part of its square."""
    delay_s: float
    """How much longer sequences wait that decode beside it."""
    pull_s: float
    """How long the pull of its KV stops a decode engine."""
    moves_s: float
    """What passes until its first token from the end of its prefill elsewhere."""
    tokens: float
    """Of its prompt."""
    new_tokens: float
    """Those of them that no cache has."""
    output: float
    """Tokens of its answer."""
    requests: float
    """How many requests this is known from."""

    def of_all(self, replicas: int) -> Demand:
        """Return the demand of so many replicas with as much demand each."""
        return msgspec.structs.replace(self, rate=self.rate * replicas)


class MeanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second, and a mean one of them, in tokens; fields of the same names as those of
    `Demand` are the same.

    `pairs`: of tokens that its prefill compares (`engine_model.hardware.attended`); `squares`: of
    its new tokens.
    """

    rate: float
    tokens: float
    new_tokens: float
    pairs: float
    squares: float
    output: float
    requests: float


class DemandMeter:
    """Measures the demand. A request costs a few additions; the rest is done when somebody asks,
    and a few times in a memory's length.

    The average has a memory of 200 requests: of `least_s` to `most_s` seconds. `steps`: whether
    what was before a step in the load is forgotten at once.
    """

    __slots__ = (
        "_at",
        "_begun",
        "_count",
        "_due",
        "_least_s",
        "_less",
        "_memory_s",
        "_more",
        "_most_s",
        "_new",
        "_outputs",
        "_pairs",
        "_seconds",
        "_squares",
        "_steps",
        "_sums",
        "_tokens",
    )

    def __init__(
        self, least_s: float = _LEAST_S, most_s: float = _MOST_S, *, steps: bool = False
    ) -> None:
        self._least_s, self._most_s, self._steps = least_s, most_s, steps
        self._sums: tuple[float, ...] = _NOTHING
        self._more, self._less = _Step(_STEP), _Step(-_STEP)
        self._at = self._due = self._seconds = 0.0
        self._memory_s = least_s
        self._begun = False
        self._count = self._tokens = self._new = 0
        self._pairs = self._squares = self._outputs = 0.0

    def begin(self, now: float) -> None:
        """Begin to measure, if it was not begun: else the first request begins it."""
        if not self._begun:
            self._turn(now)

    def add(self, now: float, tokens: int, cached: int, output: float) -> None:
        """Note a request. `cached`: how many of its prompt's tokens its engine has; `output`: the
        answer's expected tokens.
        """
        if now >= self._due or not self._begun:
            self._turn(now)
        new = tokens - cached
        self._count += 1
        self._tokens += tokens
        self._new += new
        self._pairs += new * (cached + 0.5 * new)
        self._squares += new * new
        self._outputs += output

    def add_all(self, now: float, count: int, tokens: int, squares: int) -> None:
        """Note all requests that have come since the last call, and of whose prompts no cache has
        anything. `tokens`, `squares`: the sums over their prompts.
        """
        self.begin(now)
        self._count += count
        self._tokens += tokens
        self._new += tokens
        self._pairs += 0.5 * squares
        self._squares += squares
        self._turn(now)

    def _turn(self, now: float) -> None:
        """Forget a part of what there is, and take over what has come since the last turn."""
        if not self._begun:
            self._begun, self._at = True, now
        passed, memory = now - self._at, self._memory_s
        if 0.0 < passed < math.inf:
            self._at = now
        else:
            passed = 0.0  # a clock that stands still, or goes back
        self._due = self._at + _PART * memory
        added = (self._count, self._tokens, self._new, self._pairs, self._squares, self._outputs)
        before = self._sums[0] / self._seconds if self._seconds > _KNOWN_S else 0.0
        kept = math.exp(-passed / memory)
        # What came since then came evenly: its beginning is forgotten in part already.
        weight = (1.0 - kept) * memory / passed if passed else 1.0
        self._seconds = self._seconds * kept + passed * weight
        self._sums = tuple(
            [old * kept + one * weight for old, one in zip(self._sums, added, strict=True)]
        )
        if self._steps and before:
            for step in (self._more, self._less):
                if step.seen(added, passed, before):
                    self._sums, self._seconds = step.sums, step.seconds
                    self._more, self._less = _Step(_STEP), _Step(-_STEP)
                    break
        self._count = self._tokens = self._new = 0
        self._pairs = self._squares = self._outputs = 0.0

    def settled(self, now: float) -> bool:
        """Return whether the average has most of its memory: not behind a start, nor behind a step
        of the load.
        """
        if not self._begun:
            return False
        self._turn(now)
        return self._seconds > _SETTLED * self._memory_s

    def mean(self, now: float) -> MeanRequest | None:
        """Return the mean request, None if there was none lately."""
        if not self._begun:
            return None
        self._turn(now)
        count, tokens, new, pairs, squares, outputs = self._sums
        if count < 1e-3:
            return None
        rate = count / max(self._seconds, _KNOWN_S)
        self._memory_s = min(max(_REQUESTS / rate, self._least_s), self._most_s)
        return MeanRequest(
            rate=rate,
            tokens=tokens / count,
            new_tokens=new / count,
            pairs=pairs / count,
            squares=squares / count,
            output=outputs / count,
            requests=count,
        )

    def demand(
        self, now: float, times: WorkTimes, handoffs: Handoffs | None = None
    ) -> Demand | None:
        """Return the demand, None if there was none. `times`: of an engine; `handoffs`: what was
        measured of them.
        """
        found = self.mean(now)
        if found is None or found.new_tokens <= 0.0:
            return None
        mean, prompt = found.new_tokens, found.tokens
        alone, delay = times.queued_s(mean, found.pairs)
        hardware, pull = times.hardware, times.pull_s(mean)
        moves = (
            hardware.between_engines_s
            + pull
            + hardware.transfer_s(int(mean))
            + 1.5 * times.step_s(8, 8 * prompt)
        )
        if handoffs is not None:
            moves *= handoffs.by_bits[int(prompt).bit_length()].ratio
        return Demand(
            rate=found.rate,
            alone_s=alone,
            variation=max(found.squares / (mean * mean) - 1.0, 0.0),
            delay_s=delay,
            pull_s=pull,
            moves_s=moves,
            tokens=prompt,
            new_tokens=mean,
            output=found.output,
            requests=found.requests,
        )


class _Step:
    """Looks for a step of the load by the cumulative sum of Page: of the logarithm of how much
    likelier what has come is at `exp(step)` times the rate. Where that is less than nothing, the
    step has not begun.
    """

    __slots__ = ("_likelier", "_step", "seconds", "sums")

    def __init__(self, step: float) -> None:
        self._step = step
        self._begin()

    def _begin(self) -> None:
        self._likelier = self.seconds = 0.0
        self.sums: tuple[float, ...] = _NOTHING
        """What has come since the step."""

    def seen(self, added: tuple[float, ...], passed: float, rate: float) -> bool:
        """Return whether there was a step. `added` has come in the seconds that have passed."""
        self._likelier += added[0] * self._step - rate * passed * math.expm1(self._step)
        if self._likelier <= 0.0:
            self._begin()
            return False
        self.sums = tuple([old + one for old, one in zip(self.sums, added, strict=True)])
        self.seconds += passed
        return self._likelier > _CERTAIN and self.seconds >= _KNOWN_S
