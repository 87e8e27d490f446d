"""Engines that fail much more often than their peers, or are much slower. Pure: time is passed in.

The breaker sees failures in a row. An engine that fails every second request, or one whose clocks are throttled, has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from pdproxy.scheduling.nodes import Role

WINDOW = 30.0
"""Seconds that are looked at, and at least half of them."""
LONGEST = 300.0
"""Seconds for which an engine is left out at most."""
GOOD_AFTER = 10
"""Times `eject_for` after which an engine that was left out counts as one that never was."""


@dataclass(frozen=True, slots=True)
class OutlierLimits:
    """What an outlier is, and how many may be left out.

    `error_share`: of its requests fail, and at most half of that share of its peers'. `min_requests`: judged by no fewer.
    `slower_than`: times the median of its peers. `eject_for`: seconds, times how often it was left out. `max_share`: of the
    engines of a role, but one in any case where there are two.
    """

    error_share: float = 0.5
    min_requests: int = 10
    slower_than: float = 3.0
    eject_for: float = 30.0
    max_share: float = 0.34


@dataclass(frozen=True, slots=True)
class Ejection:
    """An engine that is to be left out for some seconds. `reason`: "errors" or "latency"; `why`: in words."""

    url: str
    reason: str
    why: str
    seconds: float


@dataclass(slots=True)
class _Counts:
    good: int = 0
    failed: int = 0
    timed: int = 0
    pace: float = 0.0

    def add(self, other: _Counts) -> None:
        self.good += other.good
        self.failed += other.failed
        self.timed += other.timed
        self.pace += other.pace


@dataclass(slots=True)
class _Window:
    """Counts of the present half of the time, and of the one before."""

    half: int = 0
    now: _Counts = field(default_factory=_Counts)
    before: _Counts = field(default_factory=_Counts)

    def turn(self, now: float) -> _Counts:
        half = int(2 * now / WINDOW)
        if half != self.half:
            self.before = self.now if half == self.half + 1 else _Counts()
            self.now, self.half = _Counts(), half
        return self.now

    def all(self, now: float) -> _Counts:
        self.turn(now)
        found = _Counts()
        found.add(self.before)
        found.add(self.now)
        return found


class Outliers:
    """Counts how legs end, and judges engines against their peers."""

    def __init__(self, limits: OutlierLimits) -> None:
        self._limits = limits
        self._windows: dict[tuple[str, Role], _Window] = {}
        self._times: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def ended(self, url: str, role: Role, now: float, *, failed: bool, pace: float | None = None) -> None:
        """Count a leg that ended well, or failed. `role`: what the engine did for it.

        `pace`: its seconds per unit of work (a prompt byte, an event), None if it is not to be compared.
        """
        window = self._windows.get((url, role))
        if window is None:
            window = self._windows[url, role] = _Window()
        counts = window.turn(now)
        if failed:
            counts.failed += 1
        else:
            counts.good += 1
        if pace is not None:
            counts.timed += 1
            counts.pace += pace

    def forget(self, url: str) -> None:
        """Forget an engine: it was removed."""
        for key in [key for key in self._windows if key[0] == url]:
            del self._windows[key]
        self._times.pop(url, None)
        self._until.pop(url, None)

    def judge(self, now: float, groups: Iterable[Sequence[str]]) -> list[Ejection]:
        """Return the engines that are to be left out from now on.

        `groups`: the URLs of the engines of each role that could get requests, those that are left out now included.
        """
        found: list[Ejection] = []
        for urls in groups:
            places = max(1, int(self._limits.max_share * len(urls))) if len(urls) > 1 else 0
            places -= sum(self._until.get(url, 0.0) > now for url in urls)
            for url, reason, why in self._outliers(now, [url for url in urls if self._until.get(url, 0.0) <= now]):
                if places <= 0:
                    break
                places -= 1
                found.append(Ejection(url, reason, why, self._left_out(url, now)))
        return found

    def _outliers(self, now: float, urls: Sequence[str]) -> list[tuple[str, str, str]]:
        """Return those with their reasons, the worst first."""
        worst: list[tuple[float, str, str, str]] = []
        totals = {url: self._total(url, now) for url in urls}
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

    def _total(self, url: str, now: float) -> _Counts:
        total = _Counts()
        for (whose, _), window in self._windows.items():
            if whose == url:
                total.add(window.all(now))
        return total

    def _error_share(self, url: str, totals: Mapping[str, _Counts]) -> float | None:
        own = totals[url]
        ended = own.good + own.failed
        if ended < self._limits.min_requests or own.failed < self._limits.error_share * ended:
            return None
        share = own.failed / ended
        others = [
            one.failed / (one.failed + one.good)
            for other, one in totals.items()
            if other != url and one.failed + one.good >= self._limits.min_requests
        ]
        # If its peers fail, too, the cause is none of it: a bad model, a bad client, our own network.
        return share if 2 * median(others or [0.0]) <= share else None

    def _slower(self, url: str, others: Sequence[str], role: Role, now: float) -> float | None:
        own = self._pace(url, role, now)
        paces = [pace for other in others if (pace := self._pace(other, role, now)) is not None]
        if own is None or not paces:
            return None
        usual = median(paces)
        return own / usual if usual > 0 and own > self._limits.slower_than * usual else None

    def _pace(self, url: str, role: Role, now: float) -> float | None:
        window = self._windows.get((url, role))
        counts = window.all(now) if window is not None else None
        return counts.pace / counts.timed if counts is not None and counts.timed >= self._limits.min_requests else None

    def _left_out(self, url: str, now: float) -> float:
        if now - self._until.get(url, now) > GOOD_AFTER * self._limits.eject_for:
            self._times[url] = 0
        times = self._times[url] = self._times.get(url, 0) + 1
        seconds = min(LONGEST, times * self._limits.eject_for)
        self._until[url] = now + seconds
        for key in [key for key in self._windows if key[0] == url]:
            del self._windows[key]
        return seconds
