"""What must be true of keys, their limits, and clients' deadlines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdproxy.observe.events import RequestEnded
from tests.chaos.access import KEYS
from tests.chaos.answers import UNNAMED
from tests.chaos.clients import Outcome
from tests.chaos.finding import Finding, shortened

LATE = 0.5
"""Seconds that an answer may come after its client's deadline: ticks of the proxy's clock, twice
`decode_leg.ACCEPT_GRACE`, in which a decode engine may show that it has the request, and the way of
the answer.
"""
_AT_ONCE = 0.001
"""Seconds within which the order of two things is not known."""
_MINUTE = 60.0
_BEFORE_THE_KEY = frozenset({"bodies", "connections", "draining", "open_files", UNNAMED})
"""Reasons for which a request is refused before its key or its deadline is looked at, or may be."""


def admitted(outcomes: Iterable[Outcome]) -> list[Finding]:
    """A request whose key or deadline can't be used is refused for it, and no other one; nobody
    waits past its deadline.
    """
    found = []
    for one in outcomes:
        must, seconds = one.sender.must_fail, one.sender.seconds
        if one.how == "right" and must is not None:
            found.append(Finding("what must be refused is refused", f"{_of(one)} was served"))
        elif (
            one.how == "error"
            and must is not None
            and must[0] in (400, 401)
            and one.detail != str(must[0])
            and one.reason not in _BEFORE_THE_KEY
            and not one.detail.startswith("408")
        ):
            found.append(
                Finding(
                    "what must be refused is refused", f"{_of(one)} got {one.detail}, not {must[0]}"
                )
            )
        if seconds is None or one.ready is None or one.slow or one.how in ("left", "refused"):
            continue
        if (waited := one.ended - one.ready) > seconds + LATE:
            found.append(
                Finding(
                    "nobody waits past its deadline", f"{_of(one)} waited {waited:.2f} s: {one.how}"
                )
            )
    return shortened(found)


def _of(one: Outcome) -> str:
    return f"item {one.item}, request {one.ident} ({one.sender.words()})"


def within_limits(
    reports: Sequence[tuple[float, RequestEnded]], told: float = 0.0
) -> list[Finding]:
    """The limits of keys hold, and refuse nothing else. `reports`: each with the time at which it
    was emitted; `told`: seconds until a worker's requests are known where they are counted.
    """
    found = []
    for name, limits in KEYS.items():
        own = [
            (time - report.total_s, time, report) for time, report in reports if report.key == name
        ]
        own.sort(key=lambda one: one[:2])
        if limits.inflight is not None:
            found += _at_once(name, limits.inflight, own, _AT_ONCE + told)
        if limits.rpm is not None:
            found += _per_minute(name, limits.rpm, own, _AT_ONCE + told)
    return shortened(found)


def _at_once(
    name: str, limit: int, own: list[tuple[float, float, RequestEnded]], near: float
) -> list[Finding]:
    found = []
    served = [(begun, over) for begun, over, report in own if report.reason != "key_inflight"]
    for begun, _, report in own:
        if report.reason == "key_inflight":
            others = sum(one - near <= begun <= over + near for one, over in served)
            if others < limit:
                text = f"key {name}: request {report.request_id} was refused beside {others}"
                found.append(Finding("limits of keys refuse nothing else", text))
            continue
        others = sum(one + near < begun + 2 * near < over - near for one, over in served)
        if others > limit:
            text = (
                f"key {name}: request {report.request_id} is one of {others}, {limit} may be served"
            )
            found.append(Finding("limits of keys hold", text))
    return found


def _per_minute(
    name: str, limit: int, own: list[tuple[float, float, RequestEnded]], near: float
) -> list[Finding]:
    found = []
    least = most = float(limit)
    since = own[0][0] if own else 0.0
    for begun, _, report in own:
        more, since = (begun - since) * limit / _MINUTE, begun
        least, most = min(least + more, float(limit)), min(most + more, float(limit))
        if near > _AT_ONCE and report.outcome == "client_left" and not report.status:
            least -= 1  # its client left before the worker knew whether it is served
            continue
        if report.reason == "key_requests":
            if least >= 1 + near * limit:
                text = f"key {name}: request {report.request_id} was refused, {least:.2f} were left"
                found.append(Finding("limits of keys refuse nothing else", text))
            continue
        if most < 1 - near * limit:
            text = f"key {name}: request {report.request_id} was served, {most:.2f} were left"
            found.append(Finding("limits of keys hold", text))
        least, most = least - 1, most - 1
    return found
