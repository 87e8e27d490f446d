"""What one input costs on one path: CPU time and the longest turn of the event loop, memory, and
steps of Python.

Time is the thread's own CPU time, so that a busy machine, and work that another process or thread
does, do not count. A turn is what the event loop does without looking at its sockets: as long as
that lasts, nobody else is served.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

Run = Callable[[bytes], Awaitable[int | None]]
"""Makes an input ready, which does not count; what is returned reads it as the proxy would. That
may return how many bytes it has written for others (a log line).
"""

NOMINAL_NS = 5.0
"""What the yardstick costs per byte on the machine for which bounds are stated (a core of a server
of 2023, Python 3.11).
"""
_YARD = json.dumps(
    {"items": [{"name": "x" * 20, "value": number} for number in range(1500)]}
).encode()


class Loop(asyncio.SelectorEventLoop):
    """A loop that knows what its turns have cost."""

    def __init__(self) -> None:
        super().__init__()
        self.spent = self.longest = 0.0

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        took = time.thread_time() - began
        self.spent += took
        self.longest = max(self.longest, took)


@dataclass(frozen=True)
class Cost:
    """Of one input: CPU seconds in all and of the longest turn, bytes of memory at the worst
    moment, bytes written for others.
    """

    size: int
    seconds: float
    longest: float
    peak: int
    made: int

    @property
    def ns(self) -> float:
        """Nanoseconds of CPU time per byte."""
        return 1e9 * self.seconds / max(1, self.size)

    @property
    def bytes(self) -> float:
        """Bytes of memory per byte, beside the input itself."""
        return self.peak / max(1, self.size)


def _once(reading: Awaitable[int | None]) -> tuple[float, float, int]:
    loop = Loop()
    try:
        made = loop.run_until_complete(reading)
        return loop.spent, loop.longest, made or 0
    finally:
        loop.close()


def measured(
    run: Run, data: bytes, times: int = 5, *, best: bool = False, memory: bool = True
) -> Cost:
    """Return what an input costs: the median of so many runs, or the `best` of them (noise only
    adds), and the traced memory.
    """
    runs = []
    for _ in range(times):
        reading = run(data)
        gc.collect(0)
        runs.append(_once(reading))
    middle: Callable[[list[float]], float] = min if best else statistics.median
    seconds, longest = (middle([one[part] for one in runs]) for part in (0, 1))
    return Cost(len(data), seconds, longest, traced(run, data)[0] if memory else 0, runs[0][2])


def traced(run: Run, data: bytes) -> tuple[int, int]:
    """Return the most bytes that were allocated at once, beside the input, and how many were
    written for others.
    """
    reading = run(data)
    gc.collect(0)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        made = _once(reading)[2]
        return tracemalloc.get_traced_memory()[1] - before, made
    finally:
        tracemalloc.stop()


def steps(run: Run, data: bytes) -> int:
    """Count the lines of Python that are executed, and the calls into C. The same in every run, on
    every machine.
    """
    count = 0
    theirs: set[CodeType] = set()

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        return None if frame.f_code in theirs else line(frame, event, argument)

    def profile(_: FrameType, event: str, __: Any) -> None:
        nonlocal count
        count += event == "c_call"

    theirs |= {Loop._run_once.__code__}
    _once(asyncio.sleep(0))  # the first loop of a process does more: it fills caches of types
    reading = run(data)
    before = sys.gettrace(), sys.getprofile()
    gc.disable()  # what other tests have left may have destructors, which would count
    sys.settrace(call)
    sys.setprofile(profile)
    try:
        _once(reading)
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
        gc.enable()
    return count


def speed() -> float:
    """Return how many times slower than the nominal machine this one is."""
    best = float("inf")
    for _ in range(15):
        began = time.thread_time()
        for _ in range(4):
            json.loads(_YARD)
        best = min(best, time.thread_time() - began)
    return max(1.0, 1e9 * best / 4 / len(_YARD) / NOMINAL_NS)
