"""Measures how late the event loop is: a callback that is due every 0.1 s reports by how much it
was late.

Owns that callback. What blocks the loop delays all requests: an operator should see it before
clients do.
"""

from __future__ import annotations

import asyncio
import time

from pdproxy.observe.description import histogram
from pdproxy.observe.events import LoopBeat, Observers

EVERY = 0.1
"""Seconds between two beats."""
MAX_MISSED = 100
"""Beats that are reported for one delay of the loop: each beat that was due in that time is late by
the rest of the delay.
"""
LATENESS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds in seconds for the event loop's delay."""
LOOP_LATENESS = histogram(
    "pdproxy_loop_lateness_seconds",
    "Seconds by which the event loop called a timer late, measured every 0.1 s",
    bounds=LATENESS,
    of=LoopBeat,
    by="late_s",
)


class Heartbeat:
    """Reports a `LoopBeat` every 0.1 s, from `start` to `stop`."""

    def __init__(self, observers: Observers) -> None:
        self._observers = observers
        self._due = 0.0
        self._cpu = 0.0
        self._next: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Heartbeat {'running' if self._next else 'stopped'}>"

    def start(self) -> None:
        """Begin, in the running loop."""
        loop = asyncio.get_running_loop()
        self._due = loop.time() + EVERY
        self._cpu = time.thread_time()
        self._next = loop.call_at(self._due, self._beat, loop)

    def stop(self) -> None:
        """End the reports."""
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        late = max(0.0, loop.time() - self._due)
        cpu = time.thread_time()
        for missed in range(min(int(late / EVERY) + 1, MAX_MISSED)):
            self._observers.notify(LoopBeat(late - missed * EVERY, missed > 0, cpu - self._cpu))
        self._cpu = cpu
        self._due += EVERY * (int(late / EVERY) + 1)
        self._next = loop.call_at(self._due, self._beat, loop)
