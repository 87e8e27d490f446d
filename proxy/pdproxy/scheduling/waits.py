"""How long a request would wait for a place, and how long it would be served then: by requests that have ended. Pure.

Owns these estimates. A wait is the cost of the requests ahead, divided by the cost of those that end per second. Two times of
being served are known by the size of prompts: the one in which a quarter of the requests is answered, by which a request is
refused while there are places; and the one in which nine of ten are, by which requests leave the queue: otherwise, under
overload, places would go to the oldest requests, which just miss their deadlines. Nothing is said before enough requests have
ended, and less and less once none end any more: what is refused by a time teaches nothing about it.
"""

from __future__ import annotations

import math

MEAN_OVER = 10.0
"""Seconds over which ended requests are averaged."""
_CLASSES = 32
_ENOUGH = 8
_QUANTILES = (0.25, 0.9)
_GAIN = 0.02
_HALF_LIFE = 5.0
"""Seconds without a request of a size after which its times count half."""
_APART = 0.1
"""Seconds between two requests that are learned from."""


class Waits:
    """Estimates for all requests. `now` is monotonic seconds, costs are those of `kit.fair_queue`."""

    __slots__ = ("_began", "_cost", "_counted", "_counts", "_ended", "_logs", "_rate", "_seconds", "_seen")

    def __init__(self) -> None:
        self._rate = 0.0
        """Cost per second, as of `_ended`: each request's cost, less and less as time goes on."""
        self._counted = 0.0
        """The cost of requests that have ended since."""
        self._cost = self._seconds = 0.0
        """Of a request, as means of the last ones."""
        self._began: float | None = None
        self._ended = 0.0
        self._logs = tuple([0.0] * _CLASSES for _ in _QUANTILES)
        """By the class of a prompt (powers of 2): the logarithm of the seconds in which that part of the requests is served."""
        self._counts = [0] * _CLASSES
        self._seen = [0.0] * _CLASSES
        """When the last request of a class was learned from."""

    def ended(self, now: float, cost: float, seconds: float) -> bool:
        """Note a request that was answered, `seconds` after it got its place. Return whether `served` is to be called for it.

        That is not more often than each tenth of a second: what it does costs more than a request at a high load is worth.
        """
        self._counted += cost
        if self._began is None:
            self._cost, self._seconds = cost, seconds
        else:
            self._cost += _GAIN * (cost - self._cost)
            self._seconds += _GAIN * (seconds - self._seconds)
        if now < self._ended + _APART and self._began is not None:
            return False
        if self._began is None:
            self._began = now - max(seconds, 0.1)
        self._fold(now)
        return True

    def served(self, now: float, prompt: int, seconds: float, *, late: bool = False) -> None:
        """Learn from a request that was answered, or that was not in so many seconds (`late`). `prompt`: its prompts' tokens."""
        size = min(prompt.bit_length(), _CLASSES - 1)
        self._seen[size] = now
        self._counts[size] = count = self._counts[size] + 1
        found = math.log(max(seconds, 1e-3))
        gain = max(_GAIN, 1 / count)
        for part, logs in zip(_QUANTILES, self._logs, strict=True):
            if count == 1:
                logs[size] = found
            elif not late or (
                logs is self._logs[-1] and found > logs[size]
            ):  # it would have taken longer, nobody knows how long
                logs[size] += gain * (part if found > logs[size] else part - 1)

    def wait(self, now: float, ahead: float, served: int = 0) -> float | None:
        """Return the seconds until requests of the cost `ahead` have ended; None if none has ended in the last minutes.

        `served`: the requests that are served at once, where they have been as many for a short time only. What has ended
        before says little then: there was less to do. So the wait is not longer than these would take.
        """
        if self._began is None:
            return None
        self._fold(now)
        seen = 1 - math.exp(-(now - self._began) / MEAN_OVER)
        rate = self._rate / max(seen, 0.01)
        if served:
            rate = max(rate, served * self._cost / max(self._seconds, 1e-3))
        return ahead / rate if rate > 1e-6 else None

    def service(self, now: float, prompt: int, part: float = 1.0) -> tuple[float, float]:
        """Return the seconds in which a request with a place is answered at best, and almost surely; (0, 0) if they aren't known.

        `part`: how much of the usual answer it wants at most, 1 for all of it.
        """
        size = min(prompt.bit_length(), _CLASSES - 1)
        if self._counts[size] < _ENOUGH:
            return 0.0, 0.0
        part *= 0.5 ** ((now - self._seen[size]) / _HALF_LIFE)
        best, surely = (math.exp(logs[size]) * part for logs in self._logs)
        return best, surely

    def _fold(self, now: float) -> None:
        self._rate = self._rate * math.exp((self._ended - now) / MEAN_OVER) + self._counted / MEAN_OVER
        self._ended, self._counted = now, 0.0
