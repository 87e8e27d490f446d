"""What this process learns of its machine: when it began, and how much of a core it gets."""

from __future__ import annotations

import os
import time
from pathlib import Path

_START = 19
"""The place of the start time behind the command's name in /proc/PID/stat."""
_TRIAL = 0.1
"""Seconds of computing that show how much of a core there is."""


def since_enter() -> float:
    """Return the seconds since this process began, which includes the loading of its modules."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begun = int(fields[_START]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begun


def core_share() -> float:
    """Return the share of a core, 0 to 1, that this thread gets while it computes for `_TRIAL`
    seconds.
    """
    begun, used = time.perf_counter(), time.thread_time()
    while (passed := time.perf_counter() - begun) < _TRIAL:
        pass
    return min((time.thread_time() - used) / passed, 1.0)
