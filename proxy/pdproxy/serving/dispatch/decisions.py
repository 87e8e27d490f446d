"""The last decisions on which engines serve a request, in their order. For operators: nothing here reads them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

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

    `choice`: whole, split or refused. `engines`: their URLs, the one that answers last. `must_be_whole`: why the request could
    not be split, None if it could. `values`: what the placement based it on. `tokens`: the prompt's, None where unknown.
    """

    at: float
    request_id: str
    choice: str
    reason: str
    engines: tuple[str, ...] = ()
    must_be_whole: str | None = None
    tokens: int | None = None
    values: Mapping[str, float] | None = None


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
    """The last `KEPT` decisions. `placement`: the name of what makes them, None where nothing does and none is kept."""

    def __init__(self, placement: str | None, now: Callable[[], float]) -> None:
        self.placement = placement
        self._now = now
        self.last: deque[Decision] = deque(maxlen=KEPT)

    def add(self, decision: Decision) -> None:
        """Keep a decision, and drop the oldest one if there are too many."""
        self.last.append(decision)

    def page(self, *others: Decisions) -> bytes:
        """Return them as JSON with those of other pools, the newest first. Numbers that are none (infinite) become null."""
        now, found, placement = self._now(), [*self.last], self.placement
        if others:
            found = sorted((last for one in (self, *others) for last in one.last), key=lambda one: one.at)
            placement = next((one.placement for one in (self, *others) if one.placement is not None), None)
        shown = [
            _Shown(
                round(now - one.at, 3),
                one.request_id,
                one.choice,
                one.reason,
                one.engines,
                one.must_be_whole,
                one.tokens,
                one.values,
            )
            for one in reversed(found)
        ]
        return msgspec.json.encode(_Page(placement, shown))


def decided(times: LegTimes, assignment: Assignment) -> LegTimes:
    """Return what happened, with the decision that led to it. Predictions that are no times (infinite) are left out."""
    ttft, tpot = (_finite((assignment.values or {}).get(name)) for name in ("ttft", "tpot"))
    return msgspec.structs.replace(times, decision=assignment.reason, predicted_ttft_s=ttft, predicted_tpot_s=tpot)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def spelled(assignment: Assignment, why_alone: str | None) -> str:
    """Return a decision as the value of a header: `whole URL; reason=R; name=value`, or `split URL -> URL; ...`."""
    urls = [lease.node.url for lease in assignment.leases]
    choice = WHOLE if len(urls) == 1 else SPLIT
    reason = assignment.reason or why_alone or "policy"
    values = [f"{name}={value:.4g}" for name, value in (assignment.values or {}).items()]
    return "; ".join([f"{choice} {' -> '.join(urls)}", f"reason={reason}", *values])
