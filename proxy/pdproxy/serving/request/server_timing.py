"""The header Server-Timing (W3C), by which an answer says where its time went: durations alone, and
no engine's name.
"""

from __future__ import annotations

from pdproxy.observe.events import LegTimes
from pdproxy.observe.requests import phases_of_prompt

SERVER_TIMING = b"server-timing"


def server_timing(queue_s: float, times: LegTimes, total_s: float) -> bytes:
    """Return the header's value: milliseconds of the phases so far, by their names, and in all.

    `queue_s`: seconds until the request had its place; `total_s`: seconds since its complete body.
    """
    phases = [
        ("queue", queue_s),
        *((name, seconds) for name, _, seconds in phases_of_prompt(times)),
    ]
    shown = [*phases, ("total", total_s)]
    return ", ".join(f"{name};dur={seconds * 1000:.1f}" for name, seconds in shown).encode()
