"""Checks of several pools against each other: their names, their engines, their models, and the sockets for their engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdproxy.settings.errors import KeyPath, Mistakes, quote, spell_key
from pdproxy.settings.schema import Pool, Settings
from pdproxy.transfer import registry
from pdproxy.transfer.contract import Channel


def check_pools(settings: Settings, found: Mistakes) -> None:
    """Check the pools, each of which was checked by itself. Mistakes are added to `found`."""
    for at, pool in enumerate(settings.pools):
        for alias, real in pool.aliases.items():
            if real in pool.aliases or not alias:
                key: KeyPath = ("pools", at, "aliases")
                why = "is an alias itself" if alias else "needs a name"
                found.add(key, f"{spell_key(key)}: {quote(alias)}: {quote(real)} {why}{found.source(key)}")
        for place, text in enumerate(pool.models):
            if text.count("*") > 1:
                key = ("pools", at, "models", place)
                found.add(key, f"{spell_key(key)}: {quote(text)}: a pattern has one * at most{found.source(key)}")
    if len(settings.pools) < 2:
        return
    _refuse_shared([(pool.name, ("pools", at, "name")) for at, pool in enumerate(settings.pools)], "the name", found)
    urls: list[tuple[str, KeyPath]] = [
        (node.url.partition("://")[2], ("pools", at, "nodes", place))  # one port is either with TLS or without
        for at, pool in enumerate(settings.pools)
        for place, node in enumerate(pool.nodes)
    ]
    # Names that DNS has: where in the list they were is not known any more.
    urls += [
        (node.url.partition("://")[2], ("pools", at, "nodes"))
        for at, pool in enumerate(settings.pools)
        for node in pool.dns_nodes
    ]
    _refuse_shared(urls, "the engine", found)
    _refuse_shared([*_sockets(settings)], "the port", found)


def _refuse_shared(named: Sequence[tuple[str, KeyPath]], what: str, found: Mistakes) -> None:
    first: dict[str, KeyPath] = {}
    for name, key in named:
        other = first.setdefault(name, key)
        if other[1] != key[1]:  # within one pool it was checked before
            text = f"{spell_key(other)} and {spell_key(key)}: two pools can't share {what} {name}{found.source(key)}"
            found.add(key, text)


def _sockets(settings: Settings) -> Iterator[tuple[str, KeyPath]]:
    """Return the ports at which engines of the pools reach the proxy."""
    for at, pool in enumerate(settings.pools):
        key: KeyPath = ("pools", at)
        if pool.kv_events.enabled and pool.kv_events.host is not None:
            most = max((node.facts.data_parallel_size for node in pool.all_nodes), default=1)
            for port in range(pool.kv_events.port, pool.kv_events.port + most):
                yield str(port), (*key, "kv_events")
        yield from ((str(port), (*key, name)) for port, name in _of_connector(settings.of_pool(pool), pool))


def _of_connector(settings: Settings, pool: Pool) -> Iterator[tuple[int, str]]:
    if pool.connector == registry.AUTO:  # checked once the engines have been asked
        return
    entry = registry.entry_of(pool.connector)
    if entry.registered is not None:
        yield settings.registration.port or entry.registration_port, "registration_port"
    contract = entry.contract(settings)
    if contract.has_notices_over(Channel.ZMQ) or contract.has_notices_over(Channel.HTTP):
        yield settings.kv_ready.port, "kv_ready_port"
