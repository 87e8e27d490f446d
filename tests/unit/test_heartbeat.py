"""How late the event loop is, as reported."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

from pdproxy.app.heartbeat import EVERY, Heartbeat
from pdproxy.observe.events import Event, LoopBeat, Observers
from pdproxy.observe.metrics import Metrics


class _Recorder:
    def __init__(self) -> None:
        self.late: list[float] = []

    def notify(self, event: Event) -> None:
        assert isinstance(event, LoopBeat)
        self.late.append(event.late_s)


async def test_a_hold_up_is_reported_for_each_beat_that_it_swallowed() -> None:
    """Half a second without the loop is five beats, each late by what was left of it."""
    recorder, metrics = _Recorder(), Metrics()
    heartbeat = Heartbeat(Observers([recorder, metrics]))
    heartbeat.start()
    time.sleep(6.5 * EVERY)
    await asyncio.sleep(0.01)
    heartbeat.stop()
    beats = recorder.late
    assert len(beats) >= 6
    assert beats[0] >= 5 * EVERY
    assert all(abs(a - b - EVERY) < 1e-6 for a, b in pairwise(beats[:6]))
    assert f"pdproxy_loop_lateness_seconds_count {float(len(beats))}" in metrics.page().decode()


async def test_it_stops() -> None:
    """Once stopped, nothing is reported any more."""
    recorder = _Recorder()
    heartbeat = Heartbeat(Observers([recorder]))
    heartbeat.start()
    heartbeat.stop()
    await asyncio.sleep(2 * EVERY)
    assert not recorder.late
