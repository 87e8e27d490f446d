"""How late the event loop is, as reported."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest

from pdproxy.app.heartbeat import EVERY, Heartbeat
from pdproxy.observe.events import Event, LoopBeat, Observers
from pdproxy.observe.metrics import Metrics


class _Recorder:
    def __init__(self) -> None:
        self.late: list[float] = []
        self.cpu: list[float] = []

    def notify(self, event: Event) -> None:
        assert isinstance(event, LoopBeat)
        self.late.append(event.late_s)
        self.cpu.append(event.cpu_s)


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


@pytest.mark.parametrize("works", [True, False])
async def test_a_hold_up_shows_whether_the_loop_worked(works: bool) -> None:
    """A machine that does not run the process looks like a sleep."""
    recorder = _Recorder()
    heartbeat = Heartbeat(Observers([recorder]))
    heartbeat.start()
    end = time.thread_time() + 3 * EVERY
    while works and time.thread_time() < end:
        pass
    if not works:
        time.sleep(4 * EVERY)
    await asyncio.sleep(0.01)
    heartbeat.stop()
    assert recorder.late[0] > EVERY
    assert (recorder.cpu[0] >= 3 * EVERY) is works
    assert recorder.cpu[1] == recorder.cpu[0], "each event of one delay has all of it"


async def test_it_stops() -> None:
    """Once stopped, nothing is reported any more."""
    recorder = _Recorder()
    heartbeat = Heartbeat(Observers([recorder]))
    heartbeat.start()
    heartbeat.stop()
    await asyncio.sleep(2 * EVERY)
    assert not recorder.late
