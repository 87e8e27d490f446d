"""What requests ask of the engines lately, per second: averages that forget. Pure."""

from __future__ import annotations

import math

import msgspec

_MEMORY_S = 6.0
"""How long a request counts."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second, and what a mean one takes, in seconds or tokens."""

    rate: float
    alone_s: float
    """Its prefill at an engine that does nothing else."""
    variation: float
    """The variance of that, as a part of its square."""
    beside_s: float
    """Its prefill at an engine that decodes, too."""
    delay_s: float
    """How much longer sequences at that engine wait because of it."""
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
    """Measures the demand."""

    __slots__ = ("_at", "_since", "_sums")

    def __init__(self) -> None:
        self._sums = (0.0,) * 10
        self._at = 0.0
        self._since: float | None = None

    def add(
        self,
        now: float,
        alone_s: float,
        beside_s: float,
        delay_s: float,
        pull_s: float,
        moves_s: float,
        tokens: float,
        new_tokens: float,
        output: float,
    ) -> None:
        """Note a request."""
        if self._since is None:
            self._since = self._at = now
        kept = math.exp((self._at - now) / _MEMORY_S)
        self._at = now
        new = (1.0, alone_s, alone_s * alone_s, beside_s, delay_s, pull_s, moves_s, tokens, new_tokens, output)
        self._sums = tuple([old * kept + one for old, one in zip(self._sums, new, strict=True)])

    def demand(self, now: float) -> Demand | None:
        """Return the demand, None if there was none."""
        if self._since is None:
            return None
        passed = max(now - self._since, 0.5)
        kept = math.exp((self._at - now) / _MEMORY_S)
        seconds = _MEMORY_S * (1.0 - math.exp(-passed / _MEMORY_S))
        count, alone, squares, beside, delay, pull, moves, tokens, new, output = self._sums
        if count < 1e-9 or alone <= 0.0:
            return None
        mean = alone / count
        return Demand(
            rate=count * kept / seconds,
            alone_s=mean,
            variation=max(squares / count / (mean * mean) - 1.0, 0.0),
            beside_s=beside / count,
            delay_s=delay / count,
            pull_s=pull / count,
            moves_s=moves / count,
            tokens=tokens / count,
            new_tokens=new / count,
            output=output / count,
        )
