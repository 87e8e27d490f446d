"""Engines that fail much more often than their peers, or are much slower. Pure: time is passed in.

The breaker sees failures in a row. An engine that fails every second request, or one whose clocks are throttled, has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from pdproxy.scheduling.nodes import Role

WINDOW = 30.0
"""Seconds that are looked at, and at least half of them."""
LONGEST = 300.0
"""Seconds for which an engine is left out at most."""
GOOD_AFTER = 10
"""Times `exclude_for` after which an engine that was left out counts as one that never was."""


@dataclass(frozen=True, slots=True)
class OutlierLimits:
    """What an outlier is, and how many may be left out.

    `error_share`: of its requests fail, and at most half of that share of its peers'. `min_requests`: judged by no fewer.
    `slower_than`: times the median of its peers. `exclude_for`: seconds, times how often it was left out. `max_share`: of the
    engines of a role, but one in any case where there are two.
    """

    error_share: float = 0.5
    min_requests: int = 10
    slower_than: float = 3.0
    exclude_for: float = 30.0
    max_share: float = 0.34


@dataclass(frozen=True, slots=True)
class Exclusion:
    """An engine that is to be left out for some seconds. `reason`: "errors" or "latency"; `why`: in words."""

    url: str
    reason: str
    why: str
    seconds: float


class Counted(NamedTuple):
    """What another worker has counted of an engine, in the time that is looked at. `role`: the value of what the engine did."""

    url: str
    role: str
    good: int
    failed: int
    timed: int
    pace: float
    seconds: float


@dataclass(slots=True)
class _Counts:
    good: int = 0
    failed: int = 0
    timed: int = 0
    pace: float = 0.0
    seconds: float = 0.0

    def add(self, other: _Counts) -> None:
        self.good += other.good
        self.failed += other.failed
        self.timed += other.timed
        self.pace += other.pace
        self.seconds += other.seconds


@dataclass(slots=True)
class _Window:
    """Counts of the present half of the time, and of the one before."""

    half: int = 0
    ends: float = 0.0
    """When the present half of the time ends."""
    now: _Counts = field(default_factory=_Counts)
    before: _Counts = field(default_factory=_Counts)

    def turn(self, now: float) -> None:
        half = int(2 * now / WINDOW)
        if half != self.half:
            self.before = self.now if half == self.half + 1 else _Counts()
            self.now, self.half = _Counts(), half
        self.ends = (half + 1) * WINDOW / 2

    def all(self, now: float) -> _Counts:
        self.turn(now)
        found = _Counts()
        found.add(self.before)
        found.add(self.now)
        return found


class Outliers:
    """Counts how legs end, and judges engines against their peers."""

    def __init__(self, limits: OutlierLimits) -> None:
        self.limits = limits
        self._windows: dict[tuple[str, Role], _Window] = {}
        self._elsewhere: dict[tuple[str, Role], _Counts] = {}
        """What other workers have counted, while engines are judged."""
        self._times: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def ended(
        self, url: str, role: Role, now: float, *, failed: bool, pace: float | None = None, seconds: float | None = None
    ) -> None:
        """Count a leg that ended well, or failed. `role`: what the engine did for it.

        `pace`: its seconds per unit of work (a prompt byte, an event), None if it is not to be compared. `seconds`: of all its
        work, None if its length says nothing: an engine is slower only if it took longer, too, for an engine that gets the
        short prompts takes more time per byte.
        """
        window = self._windows.get((url, role))
        if window is None:
            window = self._windows[url, role] = _Window()
        if now >= window.ends:
            window.turn(now)
        counts = window.now
        if failed:
            counts.failed += 1
        else:
            counts.good += 1
        if pace is not None:
            counts.timed += 1
            counts.pace += pace
            counts.seconds += pace if seconds is None else seconds

    def forget(self, url: str) -> None:
        """Forget an engine: it was removed."""
        self._drop(url)
        self._times.pop(url, None)
        self._until.pop(url, None)

    def counted(self, now: float) -> list[Counted]:
        """Return what was counted of all engines, for another worker that judges them."""
        totals = [(key, window.all(now)) for key, window in self._windows.items()]
        return [
            Counted(url, role.value, one.good, one.failed, one.timed, one.pace, one.seconds)
            for (url, role), one in totals
            if one.good or one.failed
        ]

    def left_out(self, url: str) -> tuple[float, int] | None:
        """Return until when an engine is left out, or was at last, and how often it was; None: never."""
        return (self._until[url], self._times[url]) if url in self._until else None

    def follow(self, url: str, until: float, times: int) -> None:
        """Note that another worker has found an engine to be an outlier: what was counted before counts no more."""
        if self._until.get(url) != until:
            self._until[url], self._times[url] = until, times
            self._drop(url)

    def judge(
        self, now: float, groups: Iterable[Sequence[str]], elsewhere: Sequence[Sequence[Counted]] = ()
    ) -> list[Exclusion]:
        """Return the engines that are to be left out from now on.

        `groups`: the URLs of the engines of each role that could get requests, those that are left out now included.
        `elsewhere`: what each other worker has counted.
        """
        for one in (one for worker in elsewhere for one in worker):
            counts = _Counts(one.good, one.failed, one.timed, one.pace, one.seconds)
            self._elsewhere.setdefault((one.url, Role(one.role)), _Counts()).add(counts)
        try:
            return self._judge(now, groups)
        finally:
            self._elsewhere.clear()

    def _judge(self, now: float, groups: Iterable[Sequence[str]]) -> list[Exclusion]:
        found: list[Exclusion] = []
        for urls in groups:
            places = max(1, int(self.limits.max_share * len(urls))) if len(urls) > 1 else 0
            places -= sum(self._until.get(url, 0.0) > now for url in urls)
            for url, reason, why in self._outliers(now, [url for url in urls if self._until.get(url, 0.0) <= now]):
                if places <= 0:
                    break
                places -= 1
                found.append(Exclusion(url, reason, why, self._left_out(url, now)))
        return found

    def _outliers(self, now: float, urls: Sequence[str]) -> list[tuple[str, str, str]]:
        """Return those with their reasons, the worst first."""
        worst: list[tuple[float, str, str, str]] = []
        totals = {url: _Counts() for url in urls}
        for (url, _), window in self._windows.items():
            if url in totals:
                totals[url].add(window.all(now))
        for (url, _), counts in self._elsewhere.items():
            if url in totals:
                totals[url].add(counts)
        for url in urls:
            others = [other for other in urls if other != url]
            if (share := self._error_share(url, totals)) is not None:
                worst.append((share, url, "errors", f"{100 * share:.0f} % of its requests failed"))
                continue
            for role in Role:
                if (times := self._slower(url, others, role, now)) is not None:
                    what = f"it is {times:.1f} times as slow as its peers ({role.value})"
                    worst.append((-1.0 / times, url, "latency", what))
                    break
        return [(url, reason, why) for _, url, reason, why in sorted(worst, key=lambda one: -one[0])]

    def _error_share(self, url: str, totals: Mapping[str, _Counts]) -> float | None:
        own = totals[url]
        ended = own.good + own.failed
        if ended < self.limits.min_requests or own.failed < self.limits.error_share * ended:
            return None
        share = own.failed / ended
        others = [
            one.failed / (one.failed + one.good)
            for other, one in totals.items()
            if other != url and one.failed + one.good >= self.limits.min_requests
        ]
        # If its peers fail, too, the cause is none of it: a bad model, a bad client, our own network.
        return share if 2 * median(others or [0.0]) <= share else None

    def _slower(self, url: str, others: Sequence[str], role: Role, now: float) -> float | None:
        own = self._means(url, role, now)
        peers = [means for other in others if (means := self._means(other, role, now)) is not None]
        if own is None or not peers:
            return None
        usual, seconds = (median(of) for of in zip(*peers, strict=True))
        limit = self.limits.slower_than
        return own[0] / usual if usual > 0 and own[0] > limit * usual and own[1] > limit * seconds else None

    def _means(self, url: str, role: Role, now: float) -> tuple[float, float] | None:
        """Return an engine's seconds per unit of work, and per leg."""
        window = self._windows.get((url, role))
        counts = window.all(now) if window is not None else _Counts()
        if (elsewhere := self._elsewhere.get((url, role))) is not None:
            counts.add(elsewhere)
        if counts.timed < max(1, self.limits.min_requests):
            return None
        return counts.pace / counts.timed, counts.seconds / counts.timed

    def _left_out(self, url: str, now: float) -> float:
        if now - self._until.get(url, now) > GOOD_AFTER * self.limits.exclude_for:
            self._times[url] = 0
        times = self._times[url] = self._times.get(url, 0) + 1
        seconds = min(LONGEST, times * self.limits.exclude_for)
        self._until[url] = now + seconds
        self._drop(url)
        return seconds

    def _drop(self, url: str) -> None:
        for key in [key for key in self._windows if key[0] == url]:
            del self._windows[key]
