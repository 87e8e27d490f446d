"""How thorough a check is. Times are in seconds."""

from __future__ import annotations

import msgspec


class CheckOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a check."""

    timeout: float = 10.0
    """Bounds each request. A decode engine that can't reach a prefill engine reports it after 6
    s.
    """
    lease_watch: float = 5.0
    """How long a handle is left unused to see whether its lease ends; 0: not checked."""
    settle: float = 3.0
    """How long counters are watched for the effect of a request."""
    poll: float = 0.1
    """Between two readings of metrics."""
