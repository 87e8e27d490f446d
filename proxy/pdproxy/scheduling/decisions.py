"""The last decisions on which engines serve a request, in their order. For operators: nothing here
reads them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from operator import attrgetter

import msgspec

from pdproxy.observe.events import LegTimes
from pdproxy.scheduling.leases import Assignment

KEPT = 256
"""How many decisions are kept."""
WHOLE, SPLIT, REFUSED = "whole", "split", "refused"
LATE = "late"
"""Why a request was refused: no engine can serve it within its objective."""


class Decision(msgspec.Struct, frozen=True):
    """A decision for one attempt of a request. `at`: when, in monotonic seconds.

    `choice`: whole, split or refused. `engines`: their URLs, the one that answers last.
    `must_be_whole`: why the request could not be split, None if it could. `values`: what the
    placement based it on. `tokens`: the prompt's, None where unknown.
    """

    at: float
    request_id: str
    choice: str
    reason: str
    engines: tuple[str, ...] = ()
    must_be_whole: str | None = None
    tokens: int | None = None
    values: Mapping[str, float] | None = None


class KeptDecisions(msgspec.Struct, array_like=True, frozen=True):
    """Decisions, the oldest first. `placement`: what made them, None where nothing does; `now`:
    when they were shown.
    """

    placement: str | None
    now: float
    decisions: list[Decision]


class _Shown(msgspec.Struct):
    age_s: float
    request_id: str
    choice: str
    reason: str
    engines: tuple[str, ...]
    must_be_whole: str | None
    tokens: int | None
    values: Mapping[str, float] | None


class _Page(msgspec.Struct):
    placement: str | None
    decisions: list[_Shown]


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

    def page(self) -> bytes:
        """Return them as `page_of` does."""
        return page_of(self.kept())


def page_of(kept: KeptDecisions) -> bytes:
    """Return decisions as JSON, the newest first. Numbers that are none (infinite) become null."""
    shown = [
        _Shown(
            round(kept.now - one.at, 3),
            one.request_id,
            one.choice,
            one.reason,
            one.engines,
            one.must_be_whole,
            one.tokens,
            one.values,
        )
        for one in reversed(kept.decisions)
    ]
    return msgspec.json.encode(_Page(kept.placement, shown))


def decided(times: LegTimes, assignment: Assignment) -> LegTimes:
    """Return what happened, with the decision that led to it. Predictions that are no times
    (infinite) are left out.
    """
    ttft, tpot = (_finite((assignment.values or {}).get(name)) for name in ("ttft", "tpot"))
    return msgspec.structs.replace(
        times, decision=assignment.reason, predicted_ttft_s=ttft, predicted_tpot_s=tpot
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def spelled(assignment: Assignment, why_alone: str | None) -> str:
    """Return a decision as the value of a header: `whole URL; reason=R; name=value`, or `split URL
    -> URL; ...`.
    """
    urls = [lease.engine.url for lease in assignment.leases]
    choice = WHOLE if len(urls) == 1 else SPLIT
    reason = assignment.reason or why_alone or "policy"
    values = [f"{name}={value:.4g}" for name, value in (assignment.values or {}).items()]
    return "; ".join([f"{choice} {' -> '.join(urls)}", f"reason={reason}", *values])
