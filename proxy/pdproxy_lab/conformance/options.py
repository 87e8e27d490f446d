"""How thorough a run is. Times are in seconds."""

from __future__ import annotations

import msgspec


class ConformanceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a run."""

    timeout: float = 30.0
    """Bounds each check."""
    lease_watch: float = 35.0
    """How long a KV handle is left unused until its lease must end; 0: not checked. NIXL's lease is
    30 s by default.
    """
    plain: str | None = None
    """URL of an engine of the settings with the same model and no connector: its answers are
    right.
    """
    settle: float = 5.0
    """How long counters are watched for the effect of a request."""
    steady: float = 0.3
    """How long KV usage must be back before it counts: engines report it a step late."""
    poll: float = 0.05
    """Between two readings of metrics."""
    silence: float = 1.0
    """How long the proxy waits for notices (`deadlines.kv_ready`) in the check in which none can
    come.
    """
