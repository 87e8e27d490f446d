"""`/metrics` under vLLM's names, from the engine's counters, as vLLM's prometheus-client would
write it.

Proxies ask for it all the time, and prometheus-client takes some milliseconds for a page of
families that live for one page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Literal

from prometheus_client.utils import floatToGoString

from pdproxy_lab.sim.engine import SimEngine
from pdproxy_lab.sim.stats import Histogram, Stats

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
_LOAD = "endpoint-load-metrics"
_REASONS = ("stop", "length", "abort", "error", "repetition")
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_Kind = Literal["counter", "gauge", "histogram"]


def page(engine: SimEngine) -> bytes:
    """Return the metrics page of an engine."""
    return _Page(engine).written()


def load_headers(engine: SimEngine, form: str) -> dict[str, str]:
    """Return the header with the engine's load in the format that a client names, none for other
    formats.
    """
    load = {
        "num_requests_waiting": float(sum(stats.waiting for stats in engine.rank_stats)),
        "kv_cache_usage_perc": float(max(stats.kv_cache_usage for stats in engine.rank_stats)),
    }
    if form.lower() == "text":
        return {
            _LOAD: "TEXT "
            + ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())
        }
    if form.lower() == "json":
        return {_LOAD: f"JSON {json.dumps({'named_metrics': load})}"}
    return {}


class _Page:
    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._ranks = [
            ({"engine": str(rank), "model_name": engine.facts.model}, stats)
            for rank, stats in enumerate(engine.rank_stats)
        ]
        """The labels and the counters of each data-parallel rank."""
        self._lines: list[str] = []

    def written(self) -> bytes:
        facts = self._engine.facts
        self._head(
            "process_start_time_seconds",
            "gauge",
            "Start time of the process since unix epoch in seconds.",
        )
        self._lines.append(f"process_start_time_seconds {_number(self._engine.started_at)}\n")
        if facts.has_nixl and facts.role != "aggregated":
            self._nixl()
        self._gauge(
            "num_requests_running", "Number of requests in model execution batches.", "running"
        )
        self._gauge(
            "num_requests_waiting", "Number of requests waiting to be processed.", "waiting"
        )
        self._several(
            "num_requests_waiting_by_reason",
            "gauge",
            "Waiting requests by reason.",
            "reason",
            lambda s: (("capacity", s.waiting - s.deferred), ("deferred", s.deferred)),
        )
        if facts.is_kv_consumer:
            self._several(
                "num_requests_kv_fetch_by_stage",
                "gauge",
                "Waiting requests by async KV load stage.",
                "stage",
                lambda _: [
                    (stage, 0) for stage in ("waiting_to_start", "in_progress", "completed_waiting")
                ],
            )
        self._gauge(
            "kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", "kv_cache_usage"
        )
        counters = (
            ("prefix_cache_queries", "Prefix cache queries, in tokens.", "prefix_cache_queries"),
            ("prefix_cache_hits", "Prefix cache hits, in tokens.", "prefix_cache_hits"),
            (
                "external_prefix_cache_queries",
                "External cache queries, in tokens.",
                "external_prefix_cache_queries",
            ),
            (
                "external_prefix_cache_hits",
                "External cache hits, in tokens.",
                "external_prefix_cache_hits",
            ),
            (
                "mm_cache_queries",
                "Multi-modal cache queries, in terms of number of queried items.",
                "mm_cache_queries",
            ),
            (
                "mm_cache_hits",
                "Multi-modal cache hits, in terms of number of cached items.",
                "mm_cache_hits",
            ),
            ("num_preemptions", "Cumulative number of preemptions.", "preemptions"),
            ("prompt_tokens", "Number of prefill tokens processed.", "prompt_tokens"),
            ("generation_tokens", "Number of generation tokens processed.", "generation_tokens"),
        )
        for name, words, counter in counters:
            self._counter(name, words, counter)
        self._several(
            "prompt_tokens_by_source",
            "counter",
            "Prompt tokens by source.",
            "source",
            lambda s: [(source, s.prompt_tokens_by_source[source]) for source in _SOURCES],
        )
        self._several(
            "request_success",
            "counter",
            "Count of successfully processed requests.",
            "finished_reason",
            lambda s: [(reason, s.finished[reason]) for reason in _REASONS],
        )
        histograms = (
            ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", "ttft"),
            ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", "itl"),
            ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", "e2e"),
            (
                "request_queue_time_seconds",
                "Histogram of time spent in WAITING phase for request.",
                "queue",
            ),
            (
                "request_prefill_time_seconds",
                "Histogram of time spent in PREFILL phase for request.",
                "prefill",
            ),
        )
        for name, words, counter in histograms:
            self._histogram(name, words, counter)
        name = "vllm:cache_config_info"
        self._head(name, "gauge", "Information of the LLMEngine CacheConfig")
        config = {
            "block_size": str(facts.block_size),
            "enable_prefix_caching": str(facts.enable_prefix_caching),
            "num_gpu_blocks": str(facts.num_gpu_blocks),
        }
        for labels, _ in self._ranks:
            self._sample(name, config | {"engine": labels["engine"]}, 1)
        return "".join(self._lines).encode()

    def _nixl(self) -> None:
        self._histogram(
            "nixl_xfer_time_seconds", "Transfer duration for NIXL KV Cache transfers.", "transfers"
        )
        self._histogram(
            "nixl_bytes_transferred",
            "Bytes transferred per NIXL KV Cache transfer.",
            "transferred_bytes",
        )
        counters = (
            (
                "nixl_num_failed_transfers",
                "Number of failed NIXL KV Cache transfers.",
                "failed_transfers",
            ),
            (
                "nixl_num_failed_notifications",
                "Number of failed NIXL KV Cache notifications.",
                "failed_notifications",
            ),
            (
                "nixl_num_kv_expired_reqs",
                "Number of requests that had their KV expire.",
                "kv_expired",
            ),
            (
                "nixl_num_notifications_after_expiry",
                "Notifications for KV that is over.",
                "late_notifications",
            ),
        )
        for name, words, counter in counters:
            self._counter(name, words, counter)

    def _gauge(self, name: str, words: str, counter: str) -> None:
        """Write what each rank has under a field of `Stats`; `_counter` does so, too."""
        self._single(f"vllm:{name}", "gauge", words, counter)

    def _counter(self, name: str, words: str, counter: str) -> None:
        self._single(f"vllm:{name}_total", "counter", words, counter)

    def _single(self, name: str, kind: _Kind, words: str, counter: str) -> None:
        self._head(name, kind, words)
        for labels, stats in self._ranks:
            self._sample(name, labels, getattr(stats, counter))

    def _several(
        self,
        name: str,
        kind: _Kind,
        words: str,
        label: str,
        values: Callable[[Stats], Iterable[tuple[str, float]]],
    ) -> None:
        name = f"vllm:{name}_total" if kind == "counter" else f"vllm:{name}"
        self._head(name, kind, words)
        for labels, stats in self._ranks:
            for one, value in values(stats):
                self._sample(name, labels | {label: one}, value)

    def _histogram(self, name: str, words: str, counter: str) -> None:
        name = f"vllm:{name}"
        self._head(name, "histogram", words)
        for labels, stats in self._ranks:
            histogram: Histogram = getattr(stats, counter)
            so_far = 0
            begin, end = _labels(labels | {"le": "\0"}).split("\0")
            for bound, count in zip(_bounds(histogram.bounds), histogram.counts, strict=True):
                so_far += count
                self._lines.append(f"{name}_bucket{begin}{bound}{end} {_number(so_far)}\n")
            self._sample(f"{name}_count", labels, so_far)
            self._sample(f"{name}_sum", labels, histogram.total)

    def _head(self, name: str, kind: _Kind, words: str) -> None:
        self._lines.append(f"# HELP {name} {words}\n# TYPE {name} {kind}\n")

    def _sample(self, name: str, labels: Mapping[str, str], value: float) -> None:
        self._lines.append(f"{name}{_labels(labels)} {_number(value)}\n")


def _labels(labels: Mapping[str, str]) -> str:
    """Return labels as a line has them, in the order of their names."""
    pairs = (f'{name}="{_escaped(labels[name])}"' for name in sorted(labels))
    return f"{{{','.join(pairs)}}}"


def _number(value: float) -> str:
    written: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return written


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


@cache
def _bounds(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*map(str, bounds), "+Inf")
