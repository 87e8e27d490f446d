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


class Error:
    """How wrong a prediction was lately: the mean of (measured - predicted) / predicted, and of its
    size.
    """

    __slots__ = ("bias", "count", "size")

    def __init__(self) -> None:
        self.bias = self.size = 0.0
        self.count = 0

    @property
    def both(self) -> tuple[float, float]:
        """Its bias and its size."""
        return self.bias, self.size

    def add(self, measured: float, predicted: float) -> None:
        """Note a measurement."""
        if predicted <= 0.0:
            return
        self.count += 1
        off = measured / predicted - 1.0
        if off > 10.0:
            off = 10.0
        gain = 0.02 if self.count > 50 else 1.0 / self.count
        self.bias += gain * (off - self.bias)
        self.size += gain * ((off if off > 0.0 else -off) - self.size)
