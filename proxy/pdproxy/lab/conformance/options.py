"""How thorough a run is. Times are in seconds."""

from __future__ import annotations

import msgspec


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may choose."""

    timeout: float = 30.0
    """Bounds each check."""
    lease_watch: float = 35.0
    """How long a KV handle is left alone to see its lease end by itself; 0: it isn't. NIXL's lease is 30 s by default."""
    plain: str | None = None
    """URL of an engine of the settings that has the same model and no connector: what it says is right."""
    settle: float = 5.0
    """How long counters are watched for what has just happened."""
    steady: float = 0.3
    """How long KV usage must stay where it was before it counts as back: engines tell it a step late."""
    poll: float = 0.05
    """Between two readings of metrics."""
    silence: float = 1.0
    """What the proxy waits for notices (`deadlines.kv_ready`) where none can come."""
