"""The gauges of engines, and which engines have metrics of their own."""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.exclusions import Exclusions
from pdproxy.fleet.stalls import Stalls
from pdproxy.observe import catalog, catalog_fleet, catalog_health
from pdproxy.observe.metrics import Gauge, Metrics
from pdproxy.scheduling.nodes import STATES

Samples = list[tuple[tuple[str, ...], float]]


class MetricsOfEngines:
    """Has engines counted by their URL while they are in the registry. Without it, their URLs would make series without end."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def added(self, engine: Engine) -> None:
        """Count an engine by its URL."""
        self._metrics.add_node(engine.url, engine.node.role.value)

    def removed(self, engine: Engine) -> None:
        """Drop its counts."""
        self._metrics.drop_node(engine.url)


def engine_gauges(
    engines: EngineRegistry,
    auditor: Auditor,
    stalls: Stalls,
    exclusions: Exclusions,
    now: Callable[[], float],
    pool: str,
) -> list[Gauge]:
    """Return the gauges of all engines of a pool. Each is read at every scrape. `pool`: its name."""

    def inflight() -> Samples:
        return [((url, one.node.role.value), one.node.requests - one.node.elsewhere[0]) for url, one in engines.items()]

    def up() -> Samples:
        at = now()
        return [((url, one.node.role.value), float(one.node.usable(at))) for url, one in engines.items()]

    def states() -> Samples:
        at = now()
        found: Samples = []
        for url, one in engines.items():
            is_in = one.node.state(at)
            found += [((url, state), float(state == is_in)) for state in STATES]
        return found

    def missing() -> Samples:
        return [((url,), tokens) for url, tokens in auditor.missing().items()]

    def infos() -> Samples:
        return [((url, one.node.role.value, pool), 1) for url, one in engines.items()]

    return [
        Gauge(catalog_fleet.NODE_INFO, infos),
        Gauge(catalog.NODE_INFLIGHT, inflight),
        Gauge(catalog_health.NODE_UP, up),
        Gauge(catalog.KV_MISSING, missing),
        Gauge(catalog_health.NODE_STATE, states),
        Gauge(catalog_health.STALLS, stalls.stalls),
        Gauge(catalog_health.CANARIES, stalls.canaries),
        Gauge(catalog_health.EXCLUSIONS, exclusions.counts),
    ]
