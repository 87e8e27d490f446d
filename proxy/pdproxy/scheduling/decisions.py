"""The last decisions on which engines serve a request, in their order. For operators: nothing here
reads them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

import msgspec

from pdproxy.observe.events import LegTimes
from pdproxy.observe.weighed import Option, Weighed
from pdproxy.scheduling.leases import Assignment

KEPT = 256
"""How many decisions are kept."""
WHOLE, SPLIT, REFUSED = "whole", "split", "refused"
LATE = "late"
"""No engine could serve it within its objective: it was refused, or has waited."""


class Decision(msgspec.Struct, frozen=True):
    """A decision for one attempt of a request. `at`: when, in monotonic seconds.

    `choice`: whole, split or refused. `engines`: their URLs, the one that answers last.
    `must_be_whole`: why the request could not be split, None if it could. `weighed`: what the
    placement based it on. `tokens`: the prompt's, None where unknown.
    """

    at: float
    request_id: str
    choice: str
    reason: str
    engines: tuple[str, ...] = ()
    must_be_whole: str | None = None
    tokens: int | None = None
    weighed: Weighed | None = None


class KeptDecisions(msgspec.Struct, array_like=True, frozen=True):
    """Decisions, the oldest first. `placement`: what made them, None where nothing does; `now`:
    when they were shown.
    """

    placement: str | None
    now: float
    decisions: list[Decision]


class Decisions:
    """The last `KEPT` decisions. `placement`: the name of what makes them, None where nothing does
    and none is kept.
    """

    def __init__(self, placement: str | None, now: Callable[[], float]) -> None:
        self.placement = placement
        self._now = now
        self.last: deque[Decision] = deque(maxlen=KEPT)

    def add(self, decision: Decision) -> None:
        """Keep a decision, and drop the oldest one if there are too many."""
        self.last.append(decision)

    def kept(self, *others: Decisions) -> KeptDecisions:
        """Return the decisions of this pool and of other pools."""
        pools = (self, *others)
        found = [one for pool in pools for one in pool.last]
        if others:
            found.sort(key=attrgetter("at"))
        placement = next((one.placement for one in pools if one.placement is not None), None)
        return KeptDecisions(placement, self._now(), found)


def decided(times: LegTimes, assignment: Assignment) -> LegTimes:
    """Return what happened, with the decision that led to it."""
    return msgspec.structs.replace(times, decision=assignment.reason, weighed=assignment.weighed)


def choice_of(engines: Sequence[object]) -> str:
    """Return what is chosen with so many engines."""
    return WHOLE if len(engines) == 1 else SPLIT


def spelled(assignment: Assignment, why_alone: str | None) -> str:
    """Return a decision as the value of a header: `whole URL; reason=R; name=value`, or `split URL
    -> URL; ...`.
    """
    weighed = assignment.weighed
    parts = [
        _engines([lease.engine.url for lease in assignment.leases]),
        f"reason={assignment.reason or why_alone or 'policy'}",
    ]
    if weighed is not None:
        parts += _values(weighed.chosen, "")
        if weighed.other is not None:
            parts += [f"term={weighed.term()}", f"other={_engines(weighed.engines)}"]
            parts += _values(weighed.other, "other_")
    return "; ".join(parts)


def _engines(urls: Sequence[str]) -> str:
    return f"{choice_of(urls)} {' -> '.join(urls)}"


def _values(option: Option, before: str) -> list[str]:
    return [f"{before}{name}={value:.4g}" for name, value in option.values().items()]
