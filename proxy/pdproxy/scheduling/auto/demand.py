"""What requests ask of the engines lately, per second: averages that forget. Pure."""

from __future__ import annotations

import math

import msgspec

from pdproxy.scheduling.auto.times import Times

_MEMORY_S = 6.0
"""How long a request counts."""
_LEAST_S = 0.5
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
    """How long its KV's pull stops a decode engine."""
    moves_s: float
    """What passes until its first token from the end of its prefill elsewhere."""
    tokens: float
    """Of its prompt."""
    new_tokens: float
    """Those of them that no cache has."""
    output: float
    """Tokens of its answer."""


class Meter:
    """Measures the demand. A request costs a few additions; the rest is done when somebody asks."""

    __slots__ = ("_at", "_count", "_new", "_pairs", "_since", "_squares", "_sums", "_tokens")

    def __init__(self) -> None:
        self._sums: tuple[float, ...] = (0.0,) * 5
        self._at = 0.0
        self._since: float | None = None
        self._count = self._tokens = self._new = 0
        self._pairs = self._squares = 0.0

    def add(self, now: float, tokens: int, cached: int) -> None:
        """Note a request's prompt. `cached`: those of its tokens that its engine has."""
        if self._since is None:
            self._since = self._at = now
        new = tokens - cached
        self._count += 1
        self._tokens += tokens
        self._new += new
        self._pairs += new * (cached + 0.5 * new)
        self._squares += new * new

    def demand(self, now: float, times: Times, pull_s: float, output: float) -> Demand | None:
        """Return the demand, None if there was none. `times`: of an engine; `output`: tokens of an answer."""
        if self._since is None:
            return None
        kept = math.exp((self._at - now) / _MEMORY_S)
        self._at = now
        added = (self._count, self._tokens, self._new, self._pairs, self._squares)
        self._sums = tuple([old * kept + one for old, one in zip(self._sums, added, strict=True)])
        self._count = self._tokens = self._new = 0
        self._pairs = self._squares = 0.0
        count, tokens, new, pairs, squares = self._sums
        if count < 1e-3 or new <= 0.0:
            return None
        seconds = _MEMORY_S * (1.0 - math.exp(-max(now - self._since, _LEAST_S) / _MEMORY_S))
        mean, prompt = new / count, tokens / count
        alone, delay = times.queued_s(mean, pairs / count)
        hardware = times.hardware
        moves = hardware.between_engines_s + pull_s + hardware.transfer_s(int(mean)) + 1.5 * times.step_s(8, 8 * prompt)
        return Demand(
            rate=count / seconds,
            alone_s=alone,
            variation=max(squares / count / (mean * mean) - 1.0, 0.0),
            delay_s=delay,
            pull_s=pull_s,
            moves_s=moves,
            tokens=prompt,
            new_tokens=mean,
            output=output,
        )
