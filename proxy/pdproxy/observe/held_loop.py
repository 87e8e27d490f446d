"""Whether the event loop of this process is late so often that clients notice it.

Owns the bound, which the alert has, too.
"""

from __future__ import annotations

from collections import deque

from pdproxy.observe.description import Samples
from pdproxy.observe.events import Event, LoopBeat
from pdproxy.observe.slow import LOOP

LATE = 0.05
"""Seconds by which a beat is late that counts."""
MANY, STAYS = 0.01, 0.005
"""A larger part of the beats is named, until it is no larger than `STAYS`."""
PART, PARTS = 600, 5
"""Beats of a part of the window, and its parts: five minutes. With fewer than half of them, as at
the start, nothing is named.
"""


class HeldLoop:
    """Counts how many beats are late. An observer."""

    only = (LoopBeat,)

    def __init__(self) -> None:
        self._beats = 0
        """Of the part that is being counted."""
        self._late = 0
        self._parts: deque[int] = deque(maxlen=PARTS)
        """Late beats of each whole part."""
        self._is_named = False

    def notify(self, event: Event) -> None:
        """Count a beat."""
        assert isinstance(event, LoopBeat)
        self._beats += 1
        self._late += event.late_s >= LATE
        if self._beats == PART:
            self._parts.append(self._late)
            self._beats = self._late = 0
            share, is_known = self._share(), 2 * len(self._parts) >= PARTS
            self._is_named = is_known and share > (STAYS if self._is_named else MANY)

    def _share(self) -> float:
        return sum(self._parts) / (PART * max(1, len(self._parts)))

    def shortcomings(self) -> list[str]:
        """Return what an operator must know, in a sentence."""
        if not self._is_named:
            return []
        late = f"late by {1000 * LATE:.0f} ms or more in the last 5 minutes"
        return [f"{LOOP.words}: {self._share():.1%} of its timers were {late}"]

    def samples(self) -> Samples:
        """Return the value of `PROBLEMS`."""
        return [((LOOP.name,), float(self._is_named))]
