"""Wiring of the engines that DNS names: a source for each name of the settings, while the proxy runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from pdproxy.app.compose import Proxy
from pdproxy.fleet.dns_source import DnsSource, LookUp
from pdproxy.observe import catalog_fleet
from pdproxy.observe.metrics import Gauge
from pdproxy.settings.dns import dns_name
from pdproxy.upstream.resolver import Resolver


def follow_names(
    proxy: Proxy, look_up: LookUp | None = None, chance: Callable[[], float] = random.random
) -> list[DnsSource]:
    """Have the engines of a proxy that was started follow the names of its settings. `look_up` None: the settings' servers."""
    settings = proxy.settings
    ask = look_up or Resolver(settings.dns).look_up
    now = proxy.front.clock.now
    sources = [
        DnsSource(node, dns_name(node.url, ("url",)), ask, proxy.membership, proxy.observers, settings.dns, now, chance)
        for node in settings.pool.dns_nodes
    ]
    for source in sources:
        proxy.readiness.show(source.shortcomings)
        proxy.tasks.keep(source.run, source.name)
    if sources:
        proxy.metrics.add_gauges(_gauges(sources, now))
    return sources


def _gauges(sources: Sequence[DnsSource], now: Callable[[], float]) -> list[Gauge]:
    def answers() -> list[tuple[tuple[str, ...], float]]:
        return [((one.name, how), one.counts[how]) for one in sources for how, _ in catalog_fleet.DNS_RESULTS]

    def ages() -> list[tuple[tuple[str, ...], float]]:
        return [((one.name,), now() - one.answered_at) for one in sources if one.answered_at is not None]

    return [
        Gauge(catalog_fleet.DNS_ANSWERS, answers),
        Gauge(catalog_fleet.DNS_ENGINES, lambda: [((one.name,), len(one.urls())) for one in sources]),
        Gauge(catalog_fleet.DNS_AGE, ages),
    ]
