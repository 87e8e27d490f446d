"""What the clients of a fleet have seen lately. Pure.

Times are the engines' own: those that were measured, by the speed at which time runs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from pdproxy.kit.errors import RefusalReason
from pdproxy_lab.bench.outcome import Outcome
from pdproxy_lab.bench.slo import BenchSlo

WINDOW = 5.0
"""Seconds of engine time over which a score is taken: some 80 requests."""
POINTS = 240
"""Scores that a curve has at most."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median and the 99th percentile, in seconds; None: nothing was measured."""

    p50: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """The requests that ended within `WINDOW`. `share`: of those, 0 to 1, that were in
    time; `good_per_s`: how many of them per second; `worst_gap`: seconds.
    """

    ended: int = 0
    share: float | None = None
    good_per_s: float = 0.0
    ttft: Spread = Spread()
    tpot: Spread = Spread()
    itl: Spread = Spread()
    worst_gap: float | None = None


class Scores:
    """One fleet's requests and its curve."""

    def __init__(self, speed: float) -> None:
        """Begin with nothing; `speed`: how fast time runs, 1 being real."""
        self.answered = 0
        self.failures: Counter[str] = Counter()
        """Failed requests by kind, since the start."""
        self.guarded = 0
        """How many of these got 503 since they may have ended an engine, and only one of its role
        was left.
        """
        self.curve: deque[Score] = deque(maxlen=POINTS)
        self._speed = speed
        self._begun: float | None = None
        self._recent: deque[tuple[float, Outcome]] = deque()

    def add(self, at: float, outcome: Outcome) -> None:
        """Add a request that has ended at `at`, in seconds of any steady clock."""
        self._begun = at if self._begun is None else self._begun
        if outcome.error is not None:
            self.failures[outcome.error] += 1
            self.guarded += RefusalReason.ENGINES_LOST.value in outcome.text
        else:
            self.answered += 1
        self._recent.append((at, self._in_engine_time(outcome)))

    def forget(self) -> None:
        """Leave out of later scores what has ended so far: load or limits are other ones."""
        self._recent.clear()
        self._begun = None

    def score(self, now: float, limits: BenchSlo) -> Score:
        """Return the score at a time, and add it to the curve."""
        while self._recent and self._recent[0][0] < now - WINDOW / self._speed:
            self._recent.popleft()
        found = self._score(now, limits)
        self.curve.append(found)
        return found

    def _score(self, now: float, limits: BenchSlo) -> Score:
        if not self._recent or self._begun is None:
            return Score()
        ended = [outcome for _, outcome in self._recent]
        good = sum(limits.kept(outcome) for outcome in ended)
        seconds = min(WINDOW, max((now - self._begun) * self._speed, 1.0))
        gaps = sorted(gap for outcome in ended for gap in outcome.gaps)
        return Score(
            ended=len(ended),
            share=good / len(ended),
            good_per_s=good / seconds,
            ttft=_spread(sorted(one.ttft for one in ended if one.ttft is not None)),
            tpot=_spread(sorted(one.tpot for one in ended if one.tpot is not None)),
            itl=_spread(gaps),
            worst_gap=gaps[-1] if gaps else None,
        )

    def _in_engine_time(self, outcome: Outcome) -> Outcome:
        return Outcome(
            due=outcome.due * self._speed,
            asked_input=outcome.asked_input,
            asked_output=outcome.asked_output,
            times=[at * self._speed for at in outcome.times],
            output_tokens=outcome.output_tokens,
            error=outcome.error,
        )


def _spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread()
    last = len(values) - 1
    return Spread(values[round(0.5 * last)], values[round(0.99 * last)])
