"""The bounds of a sweep over request rates: how long a run may take, and from when on a server is
measured no more. Pure, but for the clock.

A server is far beyond its capacity if it answers less than half of a run's requests, if too many of
them are in flight, if a first token comes after twice the time in which the requests came and
`_SOON` seconds more, or if the last answers have not come after twice that time and `SETTLE`
seconds more. Higher rates would show nothing else, and each would take longer than the one before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pdproxy_lab.bench.outcome import Observed
from pdproxy_lab.bench.workload import Planned

SETTLE = 30.0
"""Seconds: long answers of the last requests are no sign of an overload."""
_SOON = 5.0
"""Seconds: more than a long prompt takes, and it does not depend on the length of answers."""
_LEAST_ANSWERED = 0.5


class Sweep:
    """One sweep. `seconds`: what all of its runs may take together, from now on."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = seconds
        self._end = clock() + seconds
        self._late = f"the sweep's {seconds:g} s are over (--max-seconds)"
        self.stopped: dict[str, str] = {}
        """Why a server is far beyond its capacity, by the server's name."""

    def refusal(self, name: str, planned: Sequence[Planned]) -> str:
        """Return why a run of a server must not begin; empty: it may."""
        if name in self.stopped:
            return self.stopped[name]
        return self._late if self._clock() + span(planned) >= self._end else ""

    def limit(self, planned: Sequence[Planned]) -> tuple[float, str]:
        """Return after how many seconds a run is given up, and why."""
        left = self._end - self._clock()
        most = 2 * span(planned) + SETTLE
        return (left, self._late) if left < most else (most, _not_answered(planned, most))

    def note(
        self, name: str, rate: float | None, planned: Sequence[Planned], seen: Observed
    ) -> None:
        """Note a run of a server, which may be the last one."""
        if seen.cut or seen.given_up == self._late:
            return
        answered = sum(outcome.error is None for outcome in seen.outcomes)
        first = max((outcome.times[0] for outcome in seen.outcomes if outcome.times), default=0.0)
        if seen.given_up:
            why = seen.given_up
        elif answered < _LEAST_ANSWERED * len(planned):
            why = f"{answered} of {len(planned)} requests were answered"
        elif first > 2 * span(planned) + _SOON:
            why = (
                f"requests of {span(planned):.0f} s had their last first token after {first:.0f} s"
            )
        else:
            return
        at = "" if rate is None else f" at {rate:g} req/s"
        self.stopped[name] = f"far beyond its capacity{at}: {why}"


def span(planned: Sequence[Planned]) -> float:
    """Return in how many seconds a run's requests come."""
    return planned[-1].at if planned else 0.0


def _not_answered(planned: Sequence[Planned], most: float) -> str:
    return (
        f"requests of {span(planned):.0f} s were not all answered after {most:.0f} s: the server "
        f"can't follow"
    )
