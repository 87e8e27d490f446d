"""The counters of an engine, which alone writes them. `/metrics` prints these under vLLM's
names.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

# The bounds of vLLM 0.32.0.
TTFT_BUCKETS = (
    *(
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
    ),
    *(160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(
        0.01,
        0.025,
        0.05,
        0.075,
        0.1,
        0.15,
        0.2,
        0.3,
        0.4,
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
    ),
)
REQUEST_BUCKETS = (
    *(
        0.3,
        0.5,
        0.8,
        1.0,
        1.5,
        2.0,
        2.5,
        5.0,
        10.0,
        15.0,
        20.0,
        30.0,
        40.0,
        50.0,
        60.0,
        120.0,
        240.0,
        480.0,
        960.0,
    ),
    *(1920.0, 7680.0),
)
TRANSFER_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
BYTES_BUCKETS = tuple(2048.0 * 4**power for power in range(12))


class Histogram:
    """Counts by upper bound, as Prometheus has them (not cumulated; the last is +Inf)."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class Stats:
    """Counters since the engine's start, and four gauges."""

    running: int = 0
    waiting: int = 0
    deferred: int = 0
    """Those of `waiting` that wait for KV, or for encoder outputs."""
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
    """Counted when a request is scheduled: it rises even if no KV arrives."""
    mm_cache_queries: int = 0
    """Pictures that the processor had to read, and those of them that it knew."""
    mm_cache_hits: int = 0
    encoder_inputs: int = 0
    """Pictures that were encoded. vLLM says so in its log alone."""
    encoder_outputs_loaded: int = 0
    """Those that the EC connector has loaded, and those that it has stored, or pushed. vLLM does
    not say so.
    """
    encoder_outputs_stored: int = 0
    preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """Requests by finish reason."""
    kv_expired: int = 0
    failed_transfers: int = 0
    failed_notifications: int = 0
    failed_receives: int = 0
    """Mooncake: what a decode engine did not get, also answers to questions that only free
    blocks.
    """
    late_notifications: int = 0
    """Releases of a handle that had ended."""
    transfers: Histogram = field(default_factory=lambda: Histogram(TRANSFER_BUCKETS))
    """Seconds a pull took."""
    transferred_bytes: Histogram = field(default_factory=lambda: Histogram(BYTES_BUCKETS))
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS))
    itl: Histogram = field(default_factory=lambda: Histogram(ITL_BUCKETS))
    e2e: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS))
    prefill: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS))
    queue: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS))
