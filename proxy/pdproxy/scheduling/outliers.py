"""Engines that fail much more often than their peers, or are much slower. Pure: time is passed in.

The breaker sees failures in a row. An engine that fails every second request, or one whose clocks
are throttled, has none.

Like is compared with like. A step takes the longer the more streams are in it, so that an engine
whose peer waits for KV most of the time has larger batches, and is no slower for that: each leg
counts with the size of its batch. The time that KV takes counts by pairs, and is an engine's own if
it takes long with each of its partners.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, Protocol, TypeVar

from pdproxy.scheduling.ledger_engine import Role

WINDOW = 30.0
"""Seconds that are looked at, and at least half of them."""
LONGEST = 300.0
"""Seconds for which an engine is left out at most."""
GOOD_AFTER = 10
"""Times `exclude_for` after which an engine that was left out counts as one that never was."""


_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""Work in steps, and what it returns."""
AT_ONCE = 128
"""Counts that are looked at in one step."""


class OutlierLimits(Protocol):
    """What an outlier is, and how many may be left out. It is read whenever engines are judged: it
    may change.
    """

    @property
    def error_share(self) -> float:
        """So many of its requests fail, and at most half of that share of its peers'."""

    @property
    def min_requests(self) -> int:
        """It is judged by no fewer."""

    @property
    def slower_than(self) -> float:
        """Times the median of its peers."""

    @property
    def exclude_for(self) -> float:
        """Seconds, times how often it was left out."""

    @property
    def max_share(self) -> float:
        """Of the engines of a role, but one in any case where there are two."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """An engine that is to be left out for some seconds. `reason`: "errors" or "latency"; `why`: in
    words.
    """

    url: str
    reason: str
    why: str
    seconds: float


class _Key(NamedTuple):
    """What is counted apart: an engine, what it did, and how much it had to do beside it, as a
    number of bits.

    `partner`: the prefill engine whose KV a decode engine waited for; "" where the times are of its
    own work.
    """

    url: str
    role: Role
    bits: int
    partner: str = ""


@dataclass(slots=True)
class _Counts:
    """Of legs: `timed` of them took so long for a unit of work each, and in all. `beside`: the sum
    of their batches' sizes.
    """

    good: int = 0
    failed: int = 0
    timed: int = 0
    pace: float = 0.0
    seconds: float = 0.0
    beside: int = 0

    def add(self, other: _Counts) -> None:
        self.good += other.good
        self.failed += other.failed
        self.timed += other.timed
        self.pace += other.pace
        self.seconds += other.seconds
        self.beside += other.beside


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
        if half > self.half:  # who judges looks at it from the moment in which it has begun
            self.before = self.now if half == self.half + 1 else _Counts()
            self.now, self.half = _Counts(), half
        self.ends = (self.half + 1) * WINDOW / 2

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
        self._windows: dict[_Key, _Window] = {}
        self._times: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def ended(
        self,
        url: str,
        role: Role,
        now: float,
        *,
        failed: bool,
        pace: float | None = None,
        seconds: float | None = None,
        beside: int = 0,
    ) -> None:
        """Count a leg that ended well, or failed. `role`: what the engine did for it.

        `beside`: how many requests it worked on at the same time, this one included. A step of a
        batch takes the longer the more are in it: only legs of batches of about the same size are
        compared.

        `pace`: its seconds per unit of work (a prompt byte, an event), None if it is not to be
        compared. `seconds`: of all its work, None if its length says nothing: an engine is slower
        only if it took longer, too, for an engine that gets the short prompts takes more time per
        byte.
        """
        counts = self._counts(_Key(url, role, beside.bit_length()), now)
        if failed:
            counts.failed += 1
        else:
            counts.good += 1
        if pace is not None:
            counts.timed += 1
            counts.beside += beside
            counts.pace += pace
            counts.seconds += pace if seconds is None else seconds

    def loaded(self, prefill: str, decode: str, now: float, seconds: float) -> None:
        """Count the time in which a decode engine got a prompt's KV from a prefill engine, and made
        its first token.
        """
        counts = self._counts(_Key(decode, Role.DECODE, 0, prefill), now)
        counts.timed += 1
        counts.seconds += seconds

    def _counts(self, key: _Key, now: float) -> _Counts:
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = _Window()
        if now >= window.ends:
            window.turn(now)
        return window.now

    def forget(self, url: str) -> None:
        """Forget an engine: it was removed."""
        self._drop(url)
        self._times.pop(url, None)
        self._until.pop(url, None)

    def left_out(self, url: str) -> tuple[float, int] | None:
        """Return until when an engine is left out, or was at last, and how often it was; None:
        never.
        """
        return (self._until[url], self._times[url]) if url in self._until else None

    def follow(self, url: str, until: float, times: int) -> None:
        """Note that another process has found an engine to be an outlier: what was counted before
        counts no more.
        """
        if self._until.get(url) != until:
            self._until[url], self._times[url] = until, times
            self._drop(url)

    def judge(self, now: float, groups: Iterable[Sequence[str]]) -> list[Exclusion]:
        """Return the engines that are to be left out from now on. See `judging`."""
        steps = self.judging(now, groups)
        while True:
            try:
                next(steps)
            except StopIteration as over:
                return list(over.value)

    def judging(self, now: float, groups: Iterable[Sequence[str]]) -> Steps[list[Exclusion]]:
        """Find the engines that are to be left out from now on, in steps of a millisecond or so,
        between which legs may end: 100 engines of each role have 10,000 pairs.

        `groups`: the URLs of the engines of each role that could get requests, those that are left
        out now included.
        """
        found: list[Exclusion] = []
        for urls in groups:
            places = max(1, int(self.limits.max_share * len(urls))) if len(urls) > 1 else 0
            places -= sum(self._until.get(url, 0.0) > now for url in urls)
            counted = yield from self._all(now)
            worst = yield from self._outliers(
                [url for url in urls if self._until.get(url, 0.0) <= now], counted
            )
            for url, reason, why in worst[: max(0, places)]:
                found.append(Exclusion(url, reason, why, self._left_out(url, now)))
        return found

    def _outliers(
        self, urls: Sequence[str], counted: Mapping[_Key, _Counts]
    ) -> Steps[list[tuple[str, str, str]]]:
        """Return those with their reasons, the worst first."""
        worst: list[tuple[float, str, str, str]] = []
        totals = {url: _Counts() for url in urls}
        peers = {role: _Peers(self.limits) for role in Role}
        waits: dict[str, dict[str, _Counts]] = {}
        """The times of KV by each engine, and by its partners."""
        for number, (key, counts) in enumerate(counted.items()):
            if key.url in totals:
                totals[key.url].add(counts)
                if not key.partner and counts.timed:
                    peers[key.role].add(key.url, key.bits, counts)
            if key.partner and counts.timed:
                waits.setdefault(key.url, {})[key.partner] = counts
                waits.setdefault(key.partner, {})[key.url] = counts
            if number % AT_ONCE == 0:
                yield
        means: dict[str, float] = {}
        for url in urls:
            mean = _mean(waits.get(url, {}).values(), max(1, self.limits.min_requests))
            if mean is not None:
                means[url] = mean
            yield
        for url in urls:
            yield
            if (share := self._error_share(url, totals)) is not None:
                worst.append((share, url, "errors", f"{100 * share:.0f} % of its requests failed"))
                continue
            for role, of_role in peers.items():
                if (times := (yield from of_role.slower(url))) is not None:
                    what = f"it is {times:.1f} times as slow as its peers ({role.value})"
                    worst.append((-1.0 / times, url, "latency", what))
                    break
            else:
                if (times := self._waits_longer(url, means, waits)) is not None:
                    what = (
                        f"KV takes {times:.1f} times as long with it as with its peers, "
                        f"whichever the other engine is"
                    )
                    worst.append((-1.0 / times, url, "latency", what))
        return [
            (url, reason, why) for _, url, reason, why in sorted(worst, key=lambda one: -one[0])
        ]

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
        # If its peers fail, too, the cause is none of it: a bad model, a bad client, our own
        # network.
        return share if 2 * median(others or [0.0]) <= share else None

    def _all(self, now: float) -> Steps[dict[_Key, _Counts]]:
        """Return what was counted. Forget what is too old to be counted."""
        found: dict[_Key, _Counts] = {}
        for number, (key, window) in enumerate([*self._windows.items()]):
            counts = window.all(now)
            if counts.good or counts.failed or counts.timed:
                found[key] = counts
            elif self._windows.get(key) is window:
                del self._windows[key]
            if number % AT_ONCE == 0:
                yield
        return found

    def _waits_longer(
        self,
        url: str,
        means: Mapping[str, float],
        waits: Mapping[str, Mapping[str, _Counts]],
    ) -> float | None:
        """Return how many times as long as with its peers KV takes with an engine; None: not too
        long, or not with each partner. `means`: how long it takes with each.

        With one partner alone it is the link between the two, or the partner.
        """
        own = means.get(url)
        others = [mean for one, mean in means.items() if one != url]
        if own is None or not others:
            return None
        usual, limit = median(others), self.limits.slower_than
        with_each = [one.seconds / one.timed for one in waits[url].values()]
        return own / usual if usual > 0 and min(with_each) > limit * usual else None

    def _left_out(self, url: str, now: float) -> float:
        if now - self._until.get(url, now) > GOOD_AFTER * self.limits.exclude_for:
            self._times[url] = 0
        times = self._times[url] = self._times.get(url, 0) + 1
        seconds = min(LONGEST, times * self.limits.exclude_for)
        self._until[url] = now + seconds
        self._drop(url)
        return seconds

    def _drop(self, url: str) -> None:
        for key in [key for key in self._windows if url in (key.url, key.partner)]:
            del self._windows[key]


class _Peers:
    """The times of all engines that do the same."""

    def __init__(self, limits: OutlierLimits) -> None:
        self._enough = max(1, limits.min_requests)
        self._limit = limits.slower_than
        self._own: dict[str, list[tuple[int, _Counts]]] = {}
        """By engine: its counts, with the bits of their batches' sizes."""
        self._comparable: dict[str, list[_Counts]] = {}
        """By engine: those with which others are compared."""
        self._least: dict[int, float] = {}
        """By those bits: the least of the sizes."""
        self._paces: dict[int, list[float]] = {}
        """By those bits: what each engine that is comparable would take for a unit in a batch of
        the least size, in order.
        """

    def add(self, url: str, bits: int, counts: _Counts) -> None:
        """Add times of an engine."""
        self._own.setdefault(url, []).append((bits, counts))
        if 2 * counts.timed >= self._enough:
            self._comparable.setdefault(url, []).append(counts)
        size = counts.beside / counts.timed
        self._least[bits] = min(size, self._least.get(bits, size))

    def slower(self, url: str) -> Steps[float | None]:
        """Return how many times as slow as its peers an engine is, for batches of its sizes; None:
        not too slow.

        What a peer would take at most for a batch of another size follows from its own: a step of a
        larger one takes as long at least, and one of twice as many requests twice as long at most.
        """
        mine = self._own.get(url, ())
        timed = sum(counts.timed for _, counts in mine)
        count = len(self._comparable) - (url in self._comparable)
        if timed < self._enough or not count:
            return None
        own = sum(counts.pace for _, counts in mine)
        least = 0.0
        for bits, counts in mine:
            if bits not in self._paces:
                self._paces[bits] = sorted(
                    _at_most(self._least[bits], one)[0] for one in self._comparable.values()
                )
                yield
            # without its own, which is one of them, the median is no less
            least += counts.timed * self._paces[bits][(count - 1) // 2]
        if own <= self._limit * least:
            return None  # as nearly all are: what follows takes long
        peers = [sizes for one, sizes in self._comparable.items() if one != url]
        usual, seconds = 0.0, 0.0
        for _, counts in mine:
            bounds = [_at_most(counts.beside / counts.timed, of_peer) for of_peer in peers]
            usual += counts.timed * median(pace for pace, _ in bounds)
            seconds += counts.timed * median(taken for _, taken in bounds)
            yield
        taken = sum(counts.seconds for _, counts in mine)
        is_slower = usual > 0 and own > self._limit * usual and taken > self._limit * seconds
        return own / usual if is_slower else None


def _mean(counts: Iterable[_Counts], enough: int) -> float | None:
    timed, seconds = 0, 0.0
    for one in counts:
        timed += one.timed
        seconds += one.seconds
    return seconds / timed if timed >= enough else None


def _at_most(beside: float, sizes: Sequence[_Counts]) -> tuple[float, float]:
    """Return what an engine would take at most in a batch of this size: per unit, and per leg."""
    found = [(max(1.0, beside * one.timed / max(1, one.beside)), one) for one in sizes]
    return (
        min(times * one.pace / one.timed for times, one in found),
        min(times * one.seconds / one.timed for times, one in found),
    )
