"""What the metrics and the ledger must show once all is quiet."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.samples import Sample

from pdproxy.app.compose import Proxy
from pdproxy.scheduling.ledger_engine import LedgerEngine
from tests.chaos.finding import Finding

HELD = frozenset(
    (
        *(
            "pdproxy_inflight",
            "pdproxy_queue",
            "pdproxy_tokens_in_flight",
            "pdproxy_node_inflight",
            "pdproxy_retries",
        ),
        *(
            "pdproxy_held_bytes",
            "pdproxy_connections",
            "pdproxy_kv_handles",
            "pdproxy_kv_ready_waits",
        ),
    )
)
"""Gauges of what requests hold: without requests each of their series is 0."""
_IN_USE = frozenset({"up", "slow_start"})
"""States of engines that work, and have shown it since the faults."""


def held(proxy: Proxy) -> list[Finding]:
    """Once all is quiet, the metrics say that nothing is held."""
    return [
        Finding("gauges go back to 0", f"{sample.name}{sample.labels or ''} is {sample.value:g}")
        for sample in _samples(proxy)
        if sample.name in HELD and sample.value
    ]


def out_of_use(engines: Iterable[LedgerEngine], now: float) -> list[Finding]:
    """After the calm, each engine is in use again, but for those that were found slower or worse
    than their peers.
    """
    return [
        Finding("each engine is in use again", f"{engine.url} is {engine.state(now)}")
        for engine in engines
        if engine.state(now) not in _IN_USE and engine.excluded_because is None
    ]


def _samples(proxy: Proxy) -> list[Sample]:
    return [sample for family in proxy.metrics.collect() for sample in family.samples]
