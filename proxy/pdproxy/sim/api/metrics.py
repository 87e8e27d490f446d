"""`/metrics` under vLLM's names, from the engine's counters. The engine counts; prometheus-client formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pdproxy.sim.engine import Engine
from pdproxy.sim.stats import Histogram, Stats

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
_LOAD = "endpoint-load-metrics"
_LABELS = ("engine", "model_name")
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
        "num_requests_waiting": float(sum(stats.waiting for stats in engine.rank_stats)),
        "kv_cache_usage_perc": float(max(stats.kv_cache_usage for stats in engine.rank_stats)),
    }
    if form.lower() == "text":
        return {_LOAD: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())}
    if form.lower() == "json":
        return {_LOAD: f"JSON {json.dumps({'named_metrics': load})}"}
    return {}


class _Collector:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def _ranks(self) -> Iterator[tuple[dict[str, str], Stats]]:
        """Yield the labels and the counters of each data-parallel rank."""
        for rank, stats in enumerate(self._engine.rank_stats):
            yield {"engine": str(rank), "model_name": self._engine.facts.model}, stats

    def collect(self) -> Iterator[Metric]:
        facts = self._engine.facts
        start = GaugeMetricFamily(
            "process_start_time_seconds", "Start time of the process since unix epoch in seconds."
        )
        start.add_metric([], self._engine.started_at)
        yield start
        if facts.has_nixl and facts.role != "aggregated":
            yield from self._nixl()
        yield self._gauge("num_requests_running", "Number of requests in model execution batches.", "running")
        yield self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", "waiting")
        yield self._several(
            "num_requests_waiting_by_reason",
            "Waiting requests by reason.",
            "reason",
            lambda s: (("capacity", s.waiting - s.deferred), ("deferred", s.deferred)),
            GaugeMetricFamily,
        )
        if facts.is_kv_consumer:
            yield self._several(
                "num_requests_kv_fetch_by_stage",
                "Waiting requests by async KV load stage.",
                "stage",
                lambda _: [(stage, 0) for stage in ("waiting_to_start", "in_progress", "completed_waiting")],
                GaugeMetricFamily,
            )
        yield self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", "kv_cache_usage")
        counters = (
            ("prefix_cache_queries", "Prefix cache queries, in tokens.", "prefix_cache_queries"),
            ("prefix_cache_hits", "Prefix cache hits, in tokens.", "prefix_cache_hits"),
            (
                "external_prefix_cache_queries",
                "External cache queries, in tokens.",
                "external_prefix_cache_queries",
            ),
            ("external_prefix_cache_hits", "External cache hits, in tokens.", "external_prefix_cache_hits"),
            ("num_preemptions", "Cumulative number of preemptions.", "preemptions"),
            ("prompt_tokens", "Number of prefill tokens processed.", "prompt_tokens"),
            ("generation_tokens", "Number of generation tokens processed.", "generation_tokens"),
        )
        for name, words, counter in counters:
            yield self._counter(name, words, counter)
        yield self._several(
            "prompt_tokens_by_source",
            "Prompt tokens by source.",
            "source",
            lambda s: [(source, s.prompt_tokens_by_source[source]) for source in _SOURCES],
            CounterMetricFamily,
        )
        yield self._several(
            "request_success",
            "Count of successfully processed requests.",
            "finished_reason",
            lambda s: [(reason, s.finished[reason]) for reason in _REASONS],
            CounterMetricFamily,
        )
        histograms = (
            ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", "ttft"),
            ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", "itl"),
            ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", "e2e"),
            ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", "queue"),
            ("request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", "prefill"),
        )
        for name, words, counter in histograms:
            yield self._histogram(name, words, counter)
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            labels=["block_size", "enable_prefix_caching", "engine", "num_gpu_blocks"],
        )
        for labels, _ in self._ranks():
            values = (facts.block_size, facts.enable_prefix_caching, labels["engine"], facts.num_gpu_blocks)
            config.add_metric([str(value) for value in values], 1)
        yield config

    def _nixl(self) -> Iterator[Metric]:
        yield self._histogram("nixl_xfer_time_seconds", "Transfer duration for NIXL KV Cache transfers.", "transfers")
        yield self._histogram(
            "nixl_bytes_transferred", "Bytes transferred per NIXL KV Cache transfer.", "transferred_bytes"
        )
        counters = (
            ("nixl_num_failed_transfers", "Number of failed NIXL KV Cache transfers.", "failed_transfers"),
            (
                "nixl_num_failed_notifications",
                "Number of failed NIXL KV Cache notifications.",
                "failed_notifications",
            ),
            ("nixl_num_kv_expired_reqs", "Number of requests that had their KV expire.", "kv_expired"),
            ("nixl_num_notifications_after_expiry", "Notifications for KV that is over.", "late_notifications"),
        )
        for name, words, counter in counters:
            yield self._counter(name, words, counter)

    def _gauge(self, name: str, words: str, counter: str) -> Metric:
        return self._filled(GaugeMetricFamily(f"vllm:{name}", words, labels=_LABELS), counter)

    def _counter(self, name: str, words: str, counter: str) -> Metric:
        return self._filled(CounterMetricFamily(f"vllm:{name}", words, labels=_LABELS), counter)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, counter: str) -> Metric:
        """Add what each rank has counted under a field of `Stats`."""
        for labels, stats in self._ranks():
            family.add_metric(list(labels.values()), getattr(stats, counter))
        return family

    def _several(
        self,
        name: str,
        words: str,
        label: str,
        values: Callable[[Stats], Iterable[tuple[str, float]]],
        kind: type[GaugeMetricFamily | CounterMetricFamily],
    ) -> Metric:
        labels = sorted([*_LABELS, label])
        family = kind(f"vllm:{name}", words, labels=labels)
        for rank, stats in self._ranks():
            for one, value in values(stats):
                named = rank | {label: one}
                family.add_metric([named[key] for key in labels], value)
        return family

    def _histogram(self, name: str, words: str, counter: str) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", words, labels=_LABELS)
        for labels, stats in self._ranks():
            histogram: Histogram = getattr(stats, counter)
            buckets, so_far = [], 0
            for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
                so_far += count
                buckets.append(("+Inf" if bound == float("inf") else str(bound), so_far))
            family.add_metric(list(labels.values()), buckets, histogram.total)
        return family
