"""What legs that ended say of the predictions: factors that forget, and how wrong predictions are.
Pure.
"""

from __future__ import annotations

_ENOUGH = 16
"""Measurements from which a factor counts as measured."""
_GAIN = 0.1
"""The share of a measured deviation that a factor takes over."""
_MOST = 2.0
"""A batch of measurements counts as at most so many times slower, or faster, than was predicted."""
_LIMIT = 20.0
"""A factor is at most this, and at least its inverse."""
_BATCH_S = 0.25
"""Predicted seconds in a batch: a prompt alone may be early, since prompts share steps."""
_LEAN = 0.25
"""The share of the deviation that is added to a factor: being late costs more than being early."""
_MOST_LEAN = 0.05
_LEAST_GAIN = 0.02
"""The part of a mean error that the last measurement makes."""
_HANDOFF_S = 0.15
"""Predicted seconds in a batch of handoffs."""
_LENGTHS = (10, 12, 14)
"""Handoffs of prompts whose number of tokens has at most so many bits share a ratio; longer ones
have one of their own.
"""
_BITS = 65
_OLD_S = 10.0
"""A ratio that was not measured for so many seconds is forgotten."""
_FORGETS = 0.02
"""The part of the ratio that is forgotten in a second."""


class Factor:
    """The ratio of measured to predicted seconds. Predictions must not contain it."""

    __slots__ = ("_measured", "_predicted", "_ratio", "count", "deviation")

    def __init__(self) -> None:
        self._ratio = 1.0
        self.deviation = 0.0
        """The mean deviation of a batch from the ratio, as a part of it."""
        self.count = 0
        """Measurements so far."""
        self._measured = self._predicted = 0.0

    @property
    def known(self) -> bool:
        """Whether there were enough measurements."""
        return self.count >= _ENOUGH

    @property
    def value(self) -> float:
        """The factor for predictions."""
        return self._ratio * (1.0 + min(_LEAN * self.deviation, _MOST_LEAN))

    def add(self, measured: float, predicted: float) -> bool:
        """Note seconds that were measured, and what was predicted of them without a factor. Return
        whether the factor changed.
        """
        self.count += 1
        self._measured += measured
        self._predicted = predicted = self._predicted + predicted
        if predicted < _BATCH_S:
            return False
        off = self._measured / (predicted * self._ratio)
        self._measured = self._predicted = 0.0
        off = min(max(off, 1 / _MOST), _MOST)
        # Until there are enough, each batch weighs as much as those before it.
        gain = max(_GAIN, 1.0 / self.count) if self.count < _ENOUGH else _GAIN
        self._ratio = min(max(self._ratio * (1.0 + gain * (off - 1.0)), 1 / _LIMIT), _LIMIT)
        self.deviation += _GAIN * (abs(off - 1.0) - self.deviation)
        return True


class Handoff:
    """What passes from the end of a prefill until the first token at the decode engine, for prompts
    of similar lengths: the ratio of measured to predicted seconds. Predictions must not contain it.
    """

    __slots__ = ("_batches", "_measured", "_measured_at", "_predicted", "ratio")

    def __init__(self) -> None:
        self.ratio = 1.0
        self._measured = self._predicted = self._measured_at = 0.0
        self._batches = 0

    def add(self, now: float, measured: float, predicted: float) -> None:
        """Note seconds that were measured, and what was predicted of them without the ratio."""
        self._measured += measured
        self._predicted = predicted = self._predicted + predicted
        if predicted < _HANDOFF_S:
            return
        off = min(max(self._measured / (predicted * self.ratio), 1 / _MOST), _MOST)
        self._measured = self._predicted = 0.0
        self._measured_at = now
        # Few prompts may be split: the first batches weigh as much as those before them.
        self._batches += 1
        gain = max(_GAIN, 1.0 / self._batches)
        self.ratio = min(max(self.ratio * (1.0 + gain * (off - 1.0)), 1 / _LIMIT), _LIMIT)

    def forget(self, now: float, seconds: float) -> None:
        """Come nearer to 1, if nothing was measured lately: where the ratio is too high, no prompt
        is split that would show it. `seconds`: since the last call.
        """
        if now - self._measured_at > _OLD_S:
            self.ratio += min(_FORGETS * seconds, 1.0) * (1.0 - self.ratio)


class Handoffs:
    """The handoffs by the length of the prompt: what passes does not only grow with it."""

    __slots__ = ("_lengths", "by_bits")

    def __init__(self) -> None:
        self._lengths = [Handoff() for _ in range(len(_LENGTHS) + 1)]
        self.by_bits = [
            self._lengths[sum(bits > limit for limit in _LENGTHS)] for bits in range(_BITS)
        ]
        """By the bits of the number of the prompt's tokens."""

    def forget(self, now: float, seconds: float) -> None:
        """See `Handoff`."""
        for one in self._lengths:
            one.forget(now, seconds)


class Error:
    """How wrong a prediction was lately: the mean of (measured - predicted) / predicted, and of its
    size.
    """

    __slots__ = ("_gain", "bias", "size")

    def __init__(self) -> None:
        self.bias = self.size = 0.0
        self._gain = 1.0

    @property
    def both(self) -> tuple[float, float]:
        """Its bias and its size."""
        return self.bias, self.size

    def add(self, measured: float, predicted: float) -> None:
        """Note a measurement."""
        if predicted <= 0.0:
            return
        off = measured / predicted - 1.0
        if off > 10.0:
            off = 10.0
        gain = self._gain
        if gain > _LEAST_GAIN:
            self._gain = gain / (1.0 + gain)
        self.bias += gain * (off - self.bias)
        self.size += gain * ((off if off > 0.0 else -off) - self.size)
