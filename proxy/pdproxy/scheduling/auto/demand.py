"""What requests ask of the engines lately, per second: averages that forget. Pure."""

from __future__ import annotations

import math

import msgspec

from pdproxy.scheduling.auto.times import WorkTimes

_REQUESTS = 200
"""How many requests make an average: the requests of the last seconds, as the bounds say."""
_LEAST_S, _MOST_S = 2.0, 6.0
_KNOWN_S = 0.5
"""Seconds from which a rate is known."""


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

    def of_all(self, replicas: int) -> Demand:
        """Return the demand of so many replicas with as much demand each."""
        return msgspec.structs.replace(self, rate=self.rate * replicas)


class DemandMeter:
    """Measures the demand. A request costs a few additions; the rest is done when somebody asks."""

    __slots__ = (
        "_at",
        "_begun",
        "_count",
        "_memory_s",
        "_new",
        "_outputs",
        "_pairs",
        "_seconds",
        "_squares",
        "_sums",
        "_tokens",
    )

    def __init__(self) -> None:
        self._sums: tuple[float, ...] = (0.0,) * 6
        self._at = self._seconds = 0.0
        self._memory_s = _LEAST_S
        self._begun = False
        self._count = self._tokens = self._new = 0
        self._pairs = self._squares = self._outputs = 0.0

    def add(self, now: float, tokens: int, cached: int, output: float) -> None:
        """Note a request. `cached`: how many of its prompt's tokens its engine has; `output`: the
        answer's expected tokens.
        """
        if not self._begun:
            self._begun, self._at = True, now
        new = tokens - cached
        self._count += 1
        self._tokens += tokens
        self._new += new
        self._pairs += new * (cached + 0.5 * new)
        self._squares += new * new
        self._outputs += output

    def demand(self, now: float, times: WorkTimes) -> Demand | None:
        """Return the demand, None if there was none. `times`: of an engine."""
        if not self._begun:
            return None
        passed = now - self._at
        kept = math.exp(-passed / self._memory_s)
        self._seconds = self._seconds * kept + passed
        self._at = now
        added = (self._count, self._tokens, self._new, self._pairs, self._squares, self._outputs)
        self._sums = tuple([old * kept + one for old, one in zip(self._sums, added, strict=True)])
        self._count = self._tokens = self._new = 0
        self._pairs = self._squares = self._outputs = 0.0
        count, tokens, new, pairs, squares, outputs = self._sums
        if count < 1e-3 or new <= 0.0:
            return None
        rate = count / max(self._seconds, _KNOWN_S)
        self._memory_s = min(max(_REQUESTS / rate, _LEAST_S), _MOST_S)
        mean, prompt = new / count, tokens / count
        alone, delay = times.queued_s(mean, pairs / count)
        hardware, pull = times.hardware, times.pull_s(mean)
        moves = (
            hardware.between_engines_s
            + pull
            + hardware.transfer_s(int(mean))
            + 1.5 * times.step_s(8, 8 * prompt)
        )
        return Demand(
            rate=rate,
            alone_s=alone,
            variation=max(squares / count / (mean * mean) - 1.0, 0.0),
            delay_s=delay,
            pull_s=pull,
            moves_s=moves,
            tokens=prompt,
            new_tokens=mean,
            output=outputs / count,
        )
