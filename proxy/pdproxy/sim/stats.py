"""What an engine counts. One writer: the engine. `/metrics` prints these under vLLM's names."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

LATENCY_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
BYTES_BUCKETS = tuple(2.0**exponent for exponent in range(10, 38, 2))


class Histogram:
    """Counts by upper bound, as Prometheus has them (not cumulated; the last is +Inf)."""

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BUCKETS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class Stats:
    """Counters since the engine's start, and three gauges."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of the KV blocks in use, 0 to 1."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prompt_tokens_by_source: Counter[str] = field(default_factory=Counter)
    """Keys: local_compute, local_cache_hit, external_kv_transfer."""
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    """Counted when a request is scheduled: it rises even if nothing arrives."""
    preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """Requests by finish reason."""
    kv_expired: int = 0
    failed_transfers: int = 0
    failed_notifications: int = 0
    late_notifications: int = 0
    """Releases of a handle that was over already."""
    transfers: Histogram = field(default_factory=Histogram)
    """Seconds a pull took."""
    transferred_bytes: Histogram = field(default_factory=lambda: Histogram(BYTES_BUCKETS))
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)
    prefill: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)
