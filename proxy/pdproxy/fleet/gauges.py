"""The gauges of engines."""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.observe.metrics import Gauge

_LABELS = ("node", "role")


def engine_gauges(engines: EngineRegistry, auditor: Auditor, now: Callable[[], float]) -> list[Gauge]:
    """Return the gauges of all engines. Each is read at every scrape."""

    def inflight() -> list[tuple[tuple[str, ...], float]]:
        return [((url, one.node.role.value), one.node.requests) for url, one in engines.items()]

    def up() -> list[tuple[tuple[str, ...], float]]:
        at = now()
        return [((url, one.node.role.value), float(one.node.usable(at))) for url, one in engines.items()]

    def missing() -> list[tuple[tuple[str, ...], float]]:
        return [((url,), tokens) for url, tokens in auditor.missing().items()]

    text = "Prompt tokens that never arrived by KV transfer since the engine's start"
    return [
        Gauge("pdproxy_node_inflight", "Legs in flight on an engine", _LABELS, inflight),
        Gauge("pdproxy_node_up", "Whether an engine may be used", _LABELS, up),
        Gauge("pdproxy_kv_missing_tokens", text, ("node",), missing),
    ]
