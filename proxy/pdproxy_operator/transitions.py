"""Events of the API: one for each condition of a resource that has become another one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from pdproxy_operator.kinds import EVENTS
from pdproxy_operator.names import MANAGER
from pdproxy_operator.resources import API_VERSION, ConditionOf, Object, Proxy, Runtime

BURST, PER_SECOND = 25.0, 1.0
"""Events that may be written at once, and how many more each second."""
_MAX_NOTE = 1024
"""Characters of an Event's note, as the API bounds it."""


class Rate:
    """Bounds how many Events are written: what is left out is in the conditions anyway. `now`:
    seconds of a steady clock.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._left = BURST
        self._at = now()

    def __repr__(self) -> str:
        return f"<Rate {self._left:.0f} left>"

    def takes(self) -> bool:
        """Return whether one more Event may be written."""
        now = self._now()
        self._left = min(BURST, self._left + (now - self._at) * PER_SECOND)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def transitions(before: Sequence[ConditionOf], now: Sequence[ConditionOf]) -> Iterator[ConditionOf]:
    """Yield the conditions whose status or reason is another one. A resource that has none yet is
    new, which is no news.
    """
    known = {one.type: one for one in before}
    for one in now:
        was = known.get(one.type)
        if was is not None and (was.status, was.reason) != (one.status, one.reason):
            yield one


def event_of(of: Runtime | Proxy, one: ConditionOf, reporter: str, now: float) -> Object:
    """Return the Event of a transition. The same transition has the same name: it is written once.

    Args:
        reporter: the name of this operator.
        now: Unix seconds.
    """
    kind = "PDRuntime" if isinstance(of, Runtime) else "PDProxy"
    metadata = of.metadata
    words = f"{metadata.uid} {metadata.resource_version} {one.type} {one.status} {one.reason}"
    name = f"{metadata.name}.{hashlib.sha256(words.encode()).hexdigest()[:16]}"
    return {
        "apiVersion": EVENTS.version,
        "kind": EVENTS.kind,
        "metadata": {"name": name, "namespace": metadata.namespace},
        "eventTime": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": f"pdproxy.dev/{MANAGER.removeprefix('pdproxy-')}",
        "reportingInstance": reporter[:128],
        "action": "Reconcile",
        "reason": one.reason,
        "regarding": {
            "apiVersion": API_VERSION,
            "kind": kind,
            "namespace": metadata.namespace,
            "name": metadata.name,
            "uid": metadata.uid,
        },
        "note": f"{one.type} {one.status}: {one.message}"[:_MAX_NOTE],
        "type": "Warning" if _is_bad(one) else "Normal",
    }


def _is_bad(one: ConditionOf) -> bool:
    if one.type == "Progressing":
        return one.reason == "Stuck"
    return one.status == ("True" if one.type in ("Degraded", "ScalingLimited") else "False")
