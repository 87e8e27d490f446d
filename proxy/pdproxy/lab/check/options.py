"""How thorough a check is. Times are in seconds."""

from __future__ import annotations

import msgspec


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may choose."""

    timeout: float = 10.0
    """Bounds each question. A decode engine that can't reach a prefill engine says so after 6 s."""
    lease_watch: float = 5.0
    """How long a handle is held back to see whether its lease ends; 0: not at all."""
    settle: float = 3.0
    """How long counters are watched for what has just happened."""
    poll: float = 0.1
    """Between two readings of metrics."""
