"""Reads an engine's `/metrics` for the check, which needs more of it than the proxy. Pure.

Names are those of vLLM 0.32.0. An engine without NIXL has no `vllm:nixl_*`; one that is not a
consumer of KV has no `vllm:num_requests_kv_fetch_by_stage`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from prometheus_client.parser import text_string_to_metric_families

EXTERNAL = "external_kv_transfer"
_READ = (
    "process_start_time_seconds",
    "vllm:num_requests_running{",
    "vllm:num_requests_waiting{",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_by_source_total",
    "vllm:cache_config_info",
    "vllm:num_requests_kv_fetch_by_stage",
    "vllm:nixl_num_kv_expired_reqs_total",
    "vllm:nixl_num_failed_transfers_total",
)


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One reading. Counts are since the engine's start, summed over its data-parallel ranks."""

    vllm: bool = True
    """Whether there is any metric of vLLM."""
    pdproxy: bool = False
    """Whether this is a pdproxy."""
    started: float = 0.0
    block_size: int | None = None
    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    by_source: Mapping[str, float] = {}
    """Prompt tokens by where their KV came from."""
    nixl: bool = False
    consumer: bool = False
    expired: float = 0.0
    failed_transfers: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether it had requests."""
        return self.running + self.waiting > 0

    @property
    def external(self) -> float:
        """Prompt tokens that came from other engines."""
        return self.by_source.get(EXTERNAL, 0.0)


def read(page: str) -> EngineMetrics | None:
    """Read a page; None if it is not in Prometheus' text format."""
    lines = page.splitlines()
    relevant = "\n".join(line for line in lines if line.startswith(_READ)) + "\n"
    sums: dict[str, float] = {}
    by_source: dict[str, float] = {}
    usage, block_size = 0.0, None
    try:
        for family in text_string_to_metric_families(relevant):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
                match sample.name:
                    case "vllm:kv_cache_usage_perc":
                        usage = max(usage, sample.value)
                    case "vllm:prompt_tokens_by_source_total":
                        source = sample.labels.get("source", "")
                        by_source[source] = by_source.get(source, 0.0) + sample.value
                    case "vllm:cache_config_info":
                        size = sample.labels.get("block_size", "")
                        block_size = int(size) if size.isdigit() else block_size
    except (ValueError, KeyError, IndexError):
        return None
    return EngineMetrics(
        vllm=any(line.startswith("vllm:") for line in lines),
        pdproxy=any(line.startswith("pdproxy_") for line in lines),
        started=sums.get("process_start_time_seconds", 0.0),
        block_size=block_size,
        running=sums.get("vllm:num_requests_running", 0.0),
        waiting=sums.get("vllm:num_requests_waiting", 0.0),
        kv_usage=usage,
        by_source=by_source,
        nixl=any(line.startswith("vllm:nixl_") for line in lines),
        consumer="vllm:num_requests_kv_fetch_by_stage" in sums,
        expired=sums.get("vllm:nixl_num_kv_expired_reqs_total", 0.0),
        failed_transfers=sums.get("vllm:nixl_num_failed_transfers_total", 0.0),
    )
