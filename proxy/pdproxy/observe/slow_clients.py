"""Whether many clients read their answers too slowly, by the connections that were closed for it.

Owns the bound, which the alert has, too. One such client is nothing that an operator must know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pdproxy.kit.errors import Wait
from pdproxy.observe.description import Samples
from pdproxy.observe.events import DeadlinePassed, Event, Evicted
from pdproxy.observe.slow import CLIENTS

WINDOW, MANY, STAYS = 900.0, 10, 6
"""More than `MANY` closed connections in so many seconds are named, until there are no more than
`STAYS`.
"""
EVICTED = ("reader", "answer")
"""What a client loses that reads too slowly while others wait."""


class SlowClients:
    """Counts the closed connections of this process. `now`: monotonic seconds. An observer."""

    only = (DeadlinePassed, Evicted)

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._closed: deque[float] = deque(maxlen=MANY + 1)
        self._is_named = False

    def notify(self, event: Event) -> None:
        """Count a connection that was closed since its client read too slowly."""
        match event:
            case DeadlinePassed(wait=Wait.CLIENT_WRITE.value):
                self._closed.append(self._now())
            case Evicted(what=what) if what in EVICTED:
                self._closed.append(self._now())

    def _named(self) -> bool:
        while self._closed and self._closed[0] <= self._now() - WINDOW:
            self._closed.popleft()
        self._is_named = len(self._closed) > (STAYS if self._is_named else MANY)
        return self._is_named

    def shortcomings(self) -> list[str]:
        """Return what an operator must know, in a sentence."""
        if not self._named():
            return []
        count, minutes = len(self._closed), WINDOW / 60
        text = f"{count} connections or more were closed in the last {minutes:.0f} minutes"
        return [f"{CLIENTS.words}: {text} since their clients read too slowly"]

    def samples(self) -> Samples:
        """Return the value of `PROBLEMS`."""
        return [((CLIENTS.name,), float(self._named()))]
