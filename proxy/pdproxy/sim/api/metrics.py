"""`/metrics` under vLLM's names, from the engine's counters. The engine counts; prometheus-client formats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pdproxy.sim.engine import Engine
from pdproxy.sim.stats import Histogram

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
_LOAD = "endpoint-load-metrics"
_REASONS = ("stop", "length", "abort", "error", "repetition")
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


def page(engine: Engine) -> bytes:
    """Return the metrics page of an engine."""
    registry = CollectorRegistry()
    registry.register(_Collector(engine))
    return generate_latest(registry)


def load_headers(engine: Engine, form: str) -> dict[str, str]:
    """Return the header with the engine's load in the format that a client names, none for other formats."""
    load = {
        "num_requests_waiting": float(engine.stats.waiting),
        "kv_cache_usage_perc": float(engine.stats.kv_cache_usage),
    }
    if form.lower() == "text":
        return {_LOAD: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())}
    if form.lower() == "json":
        return {_LOAD: f"JSON {json.dumps({'named_metrics': load})}"}
    return {}


class _Collector:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._labels = {"engine": "0", "model_name": engine.facts.model}

    def collect(self) -> Iterator[Metric]:
        facts, stats = self._engine.facts, self._engine.stats
        start = GaugeMetricFamily(
            "process_start_time_seconds", "Start time of the process since unix epoch in seconds."
        )
        start.add_metric([], self._engine.started_at)
        yield start
        if facts.has_nixl and facts.role != "aggregated":
            yield from self._nixl()
        yield self._gauge("num_requests_running", "Number of requests in model execution batches.", stats.running)
        yield self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", stats.waiting)
        reasons = (("capacity", stats.waiting), ("deferred", 0))
        yield self._several(
            "num_requests_waiting_by_reason", "Waiting requests by reason.", "reason", reasons, GaugeMetricFamily
        )
        if facts.is_kv_consumer:
            stages = [(stage, 0) for stage in ("waiting_to_start", "in_progress", "completed_waiting")]
            yield self._several(
                "num_requests_kv_fetch_by_stage",
                "Waiting requests by async KV load stage.",
                "stage",
                stages,
                GaugeMetricFamily,
            )
        yield self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", stats.kv_cache_usage)
        counters = (
            ("prefix_cache_queries", "Prefix cache queries, in tokens.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prefix cache hits, in tokens.", stats.prefix_cache_hits),
            (
                "external_prefix_cache_queries",
                "External cache queries, in tokens.",
                stats.external_prefix_cache_queries,
            ),
            ("external_prefix_cache_hits", "External cache hits, in tokens.", stats.external_prefix_cache_hits),
            ("num_preemptions", "Cumulative number of preemptions.", stats.preemptions),
            ("prompt_tokens", "Number of prefill tokens processed.", stats.prompt_tokens),
            ("generation_tokens", "Number of generation tokens processed.", stats.generation_tokens),
        )
        for name, words, value in counters:
            yield self._counter(name, words, value)
        sources = [(source, stats.prompt_tokens_by_source[source]) for source in _SOURCES]
        yield self._several(
            "prompt_tokens_by_source", "Prompt tokens by source.", "source", sources, CounterMetricFamily
        )
        ends = [(reason, stats.finished[reason]) for reason in _REASONS]
        yield self._several(
            "request_success", "Count of successfully processed requests.", "finished_reason", ends, CounterMetricFamily
        )
        histograms = (
            ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", stats.ttft),
            ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", stats.itl),
            ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", stats.e2e),
            ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", stats.queue),
            ("request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", stats.prefill),
        )
        for name, words, histogram in histograms:
            yield self._histogram(name, words, histogram)
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            labels=["block_size", "enable_prefix_caching", "engine", "num_gpu_blocks"],
        )
        config.add_metric([str(facts.block_size), str(facts.enable_prefix_caching), "0", str(facts.num_gpu_blocks)], 1)
        yield config

    def _nixl(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield self._histogram(
            "nixl_xfer_time_seconds", "Transfer duration for NIXL KV Cache transfers.", stats.transfers
        )
        yield self._histogram(
            "nixl_bytes_transferred", "Bytes transferred per NIXL KV Cache transfer.", stats.transferred_bytes
        )
        counters = (
            ("nixl_num_failed_transfers", "Number of failed NIXL KV Cache transfers.", stats.failed_transfers),
            (
                "nixl_num_failed_notifications",
                "Number of failed NIXL KV Cache notifications.",
                stats.failed_notifications,
            ),
            ("nixl_num_kv_expired_reqs", "Number of requests that had their KV expire.", stats.kv_expired),
            ("nixl_num_notifications_after_expiry", "Notifications for KV that is over.", stats.late_notifications),
        )
        for name, words, value in counters:
            yield self._counter(name, words, value)

    def _gauge(self, name: str, words: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", words, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, words: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", words, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _several(
        self,
        name: str,
        words: str,
        label: str,
        values: Iterable[tuple[str, float]],
        kind: type[GaugeMetricFamily | CounterMetricFamily],
    ) -> Metric:
        labels = sorted([*self._labels, label])
        family = kind(f"vllm:{name}", words, labels=labels)
        for one, value in values:
            named = self._labels | {label: one}
            family.add_metric([named[key] for key in labels], value)
        return family

    def _histogram(self, name: str, words: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", words, labels=list(self._labels))
        buckets, so_far = [], 0
        for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            so_far += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), so_far))
        family.add_metric(list(self._labels.values()), buckets, histogram.total)
        return family
