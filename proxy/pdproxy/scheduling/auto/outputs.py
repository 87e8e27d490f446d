"""How long answers are: a running mean, since nobody knows before. Pure."""

from __future__ import annotations

_GAIN = 0.02
_FIRST = 200.0
"""Tokens, as long as nothing is known."""


class Outputs:
    """The mean length of answers, in tokens."""

    __slots__ = ("_count", "mean")

    def __init__(self) -> None:
        self.mean = _FIRST
        self._count = 0

    def add(self, tokens: int) -> None:
        """Note the length of an answer."""
        self._count += 1
        self.mean += max(_GAIN, 1.0 / (self._count + 1)) * (tokens - self.mean)

    def expected(self, limit: int | None) -> float:
        """Return how long an answer will be. `limit`: the request's own, None if it has none."""
        return self.mean if limit is None or limit > self.mean else float(limit)
