"""How long a request would wait for a place, and how long it would be served then: by requests that
have ended. Pure.

Owns these estimates. A wait is the cost of the requests ahead, divided by the cost of those that
end per second. Times of being served are known by the size of prompts: the shortest of the last
seconds, by which a request is refused that can't be done, and the one that nearly all need, by
which it is known how long a request may wait. What was not answered in time counts as if it had
needed longer. Nothing is said before enough requests have ended, nor of a shortest time where none
has been answered lately: so what is refused by a time is tried again.
"""

from __future__ import annotations

import math

from pdproxy.scheduling.concurrency_limit import GIVEN_UP

MEAN_OVER = 10.0
"""Seconds over which ended requests are averaged."""
_CLASSES = 32
_ENOUGH = 8
_GAIN = 0.02
_SERVED_GAIN = 0.05
_DEVIATIONS = 2.0
"""Mean deviations above the mean, in logarithms, of the time that nearly all need."""
_REMEMBERED = 5.0
"""Seconds for which a shortest time is remembered at least, and twice that at most; longer where
requests take longer.
"""
_APART = 0.1
"""Seconds between two requests that are learned from, and between two additions to the rate."""


class _Times:
    """The times of being served of requests with prompts of one size."""

    __slots__ = ("_before", "_began", "_now", "count", "deviation", "mean")

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.deviation = 0.0
        """Of the logarithms of seconds."""
        self._began = -math.inf
        self._now = self._before = math.inf
        """The shortest time since `_began`, and the shortest one of as many seconds before."""

    def add(self, now: float, seconds: float, weight: int, *, late: bool) -> float:
        """Learn from a request that stands for `weight`. Return the logarithm of its time, as a
        part of what others took.
        """
        found = math.log(max(seconds, 1e-3) * (GIVEN_UP if late else 1.0))
        off = found - self.mean if self.count else 0.0
        if late:
            if off <= 0:
                return 0.0  # it may have needed any time
        elif now - self._began > self._span():
            self._before = self._now if now - self._began <= 2 * self._span() else math.inf
            self._now, self._began = seconds, now
        elif seconds < self._now:
            self._now = seconds
        self.count += 1
        if self.count == 1:
            self.mean = found
        else:
            gain = max(1 - (1 - _SERVED_GAIN) ** weight, 1 / self.count)
            self.mean += gain * off
            self.deviation += gain * (abs(off) - self.deviation)
        return off

    def shortest(self, now: float) -> float:
        return 0.0 if now - self._began > 2 * self._span() else min(self._now, self._before)

    def _span(self) -> float:
        return max(_REMEMBERED, 2 * math.exp(self.mean))


class Waits:
    """Estimates for all requests. `now` is monotonic seconds, costs are as in `kit.fair_queue`."""

    __slots__ = (
        "_began",
        "_cost",
        "_counted",
        "_ended",
        "_learned",
        "_rate",
        "_times",
        "_unlearned",
        "seconds",
    )

    def __init__(self) -> None:
        self._rate = 0.0
        """Cost per second, as of `_ended`: each request's cost, less and less as time goes on."""
        self._counted = 0.0
        """The cost of requests that have ended since."""
        self._cost = 0.0
        """Of a request, as a mean of the last ones."""
        self.seconds = 0.0
        """For which a request has its place, as a mean of the last ones."""
        self._began: float | None = None
        self._ended = 0.0
        self._learned = -math.inf
        """When a request was learned from."""
        self._unlearned = 0
        """Requests that were answered since."""
        self._times: dict[int, _Times] = {}
        """By the class of a prompt (powers of 2)."""

    def ended(self, now: float, cost: float, seconds: float) -> None:
        """Note a request that was answered, `seconds` after it got its place."""
        self._counted += cost
        if self._began is None:
            self._began = now - max(seconds, 0.1)
            self._cost, self.seconds = cost, seconds
            self._fold(now)
        else:
            self._cost += _GAIN * (cost - self._cost)
            self.seconds += _GAIN * (seconds - self.seconds)
            if now >= self._ended + _APART:
                self._fold(now)

    def learns(self, now: float) -> int:
        """Return for how many requests one that is answered now stands, 0 if it is not to be
        learned from.

        One in a tenth of a second is, for all that were answered since the one before: more of them
        are not worth their cost at a high load. Requests that are late are all learned from, each
        for itself: it had a place for nothing.
        """
        self._unlearned += 1
        if now < self._learned + _APART:
            return 0
        weight, self._learned, self._unlearned = self._unlearned, now, 0
        return weight

    def served(
        self, now: float, prompt: int, seconds: float, weight: int = 1, *, late: bool = False
    ) -> float:
        """Learn from a request that was answered, or that was not in so many seconds (`late`).

        `prompt`: its prompts' tokens; `weight`: the number of requests for which it stands.

        Return the logarithm of its time, as a part of the time that such requests took lately.
        """
        size = min(prompt.bit_length(), _CLASSES - 1)
        times = self._times.get(size)
        if times is None:
            times = self._times[size] = _Times()
        return times.add(now, seconds, weight, late=late)

    def wait(self, now: float, ahead: float, served: int = 0) -> float | None:
        """Return the seconds until requests of the cost `ahead` have ended; None if none has ended
        in the last minutes.

        `served`: the requests that are served at once, where they have been as many for a short
        time only. What has ended before says little then: there was less to do. So the wait is not
        longer than these would take.
        """
        if self._began is None:
            return None
        self._fold(now)
        seen = 1 - math.exp(-(now - self._began) / MEAN_OVER)
        rate = self._rate / max(seen, 0.01)
        if served:
            rate = max(rate, served * self._cost / max(self.seconds, 1e-3))
        return ahead / rate if rate > 1e-6 else None

    def service(self, now: float, prompt: int, part: float = 1.0) -> tuple[float, float]:
        """Return the seconds in which a request with a place is answered at best, and nearly
        surely; (0, 0) if they aren't known.

        `part`: how much of the usual answer it wants at most, 1 for all of it.
        """
        times = self._times.get(min(prompt.bit_length(), _CLASSES - 1))
        if times is None or times.count < _ENOUGH:
            return 0.0, 0.0
        return times.shortest(now) * part, math.exp(
            times.mean + _DEVIATIONS * times.deviation
        ) * part

    def _fold(self, now: float) -> None:
        self._rate = (
            self._rate * math.exp((self._ended - now) / MEAN_OVER) + self._counted / MEAN_OVER
        )
        self._ended, self._counted = now, 0.0
