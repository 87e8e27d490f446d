"""Wiring of other proxies in front of the same engines: how many there are, while the proxy
runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from pdproxy.app.compose import Proxy
from pdproxy.fleet.dns_source import LookUp
from pdproxy.fleet.replicas import ReplicaCount
from pdproxy.observe.description import NODE, ROLE, MergeRule, Samples, gauge
from pdproxy.scheduling.replicas import ReplicaLedger
from pdproxy.settings.dns import DnsName
from pdproxy.upstream.resolver import Resolver

REPLICAS = gauge(
    "pdproxy_replicas",
    "proxies",
    "Proxies in front of the same engines, with this one (replicas.count)",
    workers=MergeRule.MOST,
)
NODE_OTHERS = gauge(
    "pdproxy_node_other_requests",
    "requests",
    "Requests that an engine is estimated to have from other replicas, or from others' clients",
    NODE,
    ROLE,
    workers=MergeRule.MOST,
)


def follow_replicas(
    proxy: Proxy, look_up: LookUp | None = None, chance: Callable[[], float] = random.random
) -> ReplicaCount | None:
    """Have a proxy that was started know how many others there are. `look_up` None: the settings'
    servers.

    Return what follows the name of `replicas.name`, None if the settings have the number.
    """
    replicas, now = proxy.settings.replicas, proxy.front.clock.now
    ledgers = [pool.ledger for pool in proxy.pools if isinstance(pool.ledger, ReplicaLedger)]
    if not ledgers:
        return None
    _show(proxy, ledgers[0])
    if replicas.name is None:
        return None

    def use(count: int) -> None:
        for pool in proxy.pools:
            if isinstance(pool.ledger, ReplicaLedger):
                pool.ledger.use_replicas(count)
            if pool.capacity is not None:
                pool.capacity.use_replicas(count)

    ask = look_up or Resolver(proxy.settings.dns).look_up
    name = DnsName("dns", replicas.name.lower(), 1)
    found = ReplicaCount(
        name, ask, use, proxy.observers, proxy.settings.dns, now, chance, ledgers[0].replicas
    )
    proxy.readiness.show(found.shortcomings)
    proxy.tasks.keep(found.run, "replicas")
    return found


def _show(proxy: Proxy, ledger: ReplicaLedger) -> None:
    def others() -> Samples:
        engines = [engine for pool in proxy.pools for engine in pool.engines.values()]
        return [
            ((one.url, one.in_ledger.role.value), one.in_ledger.of_replicas[0]) for one in engines
        ]

    proxy.observers.show(REPLICAS, lambda: [((), ledger.replicas)])
    proxy.observers.show(NODE_OTHERS, others)
