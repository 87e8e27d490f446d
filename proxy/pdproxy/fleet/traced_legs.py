"""The open legs of an engine where traces are exported: each leg is noted in its request's
trace.
"""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.fleet.open_legs import OpenLeg, OpenLegs
from pdproxy.observe.traces import NotedSpan, begin_leg


class TracedOpenLegs(OpenLegs):
    """Open legs that note themselves in traces. `node`: the engine's URL; `now`: the clock's
    seconds.
    """

    __slots__ = ("_node", "_now", "_spans")

    def __init__(self, node: str, now: Callable[[], float]) -> None:
        super().__init__()
        self._node = node
        self._now = now
        self._spans: dict[OpenLeg, NotedSpan] = {}

    def add(self, leg: OpenLeg) -> None:
        """See `OpenLegs`."""
        OpenLegs.add(self, leg)  # `super()` costs more than all of that
        if (span := begin_leg(leg.phase, self._node, leg.since)) is not None:
            self._spans[leg] = span

    def remove(self, leg: OpenLeg, *, ended_well: float | None = None) -> None:
        """See `OpenLegs`."""
        OpenLegs.remove(self, leg, ended_well=ended_well)
        if (span := self._spans.pop(leg, None)) is not None:
            span.end = self._now()
