"""How long answers are: running means, since nobody knows before. Pure.

Prompts of a size often ask for answers of a size, such as summaries and chats. So each class of
prompts, by powers of 2, has a mean of its own, once enough of its answers have ended.
"""

from __future__ import annotations

_GAIN = 0.02
_FIRST = 200.0
"""Tokens, as long as nothing is known."""
_MANY = 50
"""Answers from which the newest counts by `_GAIN`, and no more as one of all."""
_CLASSES = 32
"""Classes of prompts: those with at most so many bits in their number of tokens, the longest in the
last one.
"""
_ENOUGH = 8


class Outputs:
    """The mean length of answers, in tokens."""

    __slots__ = ("_count", "_counts", "_means", "mean")

    def __init__(self) -> None:
        self.mean = _FIRST
        """Of all answers."""
        self._count = 0
        self._means = [0.0] * _CLASSES
        self._counts = [0] * _CLASSES

    @property
    def counts(self) -> tuple[int, ...]:
        """How many answers there were, by the bits of the number of their prompt's tokens."""
        return tuple(self._counts)

    def add(self, prompt: int, tokens: int) -> None:
        """Note the length of an answer. `prompt`: its prompt's tokens."""
        self._count = count = self._count + 1
        self.mean += (_GAIN if count >= _MANY else 1.0 / (count + 1)) * (tokens - self.mean)
        size = prompt.bit_length()
        if size >= _CLASSES:
            size = _CLASSES - 1
        self._counts[size] = count = self._counts[size] + 1
        mean = self._means[size]
        self._means[size] = mean + (_GAIN if count >= _MANY else 1.0 / count) * (tokens - mean)

    def expected(self, prompt: int, limit: int | None = None) -> float:
        """Return how long an answer will be. `limit`: the request's own, None if it has none."""
        size = prompt.bit_length()
        if size >= _CLASSES:
            size = _CLASSES - 1
        mean = self._means[size] if self._counts[size] >= _ENOUGH else self.mean
        return mean if limit is None or limit > mean else float(max(limit, 1))
