"""Checks of sections against each other: whether the engines form pools that can serve requests,
and share nothing.

What is about one section alone stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from pdproxy.settings.conform import conform
from pdproxy.settings.dns import check_replicas
from pdproxy.settings.engines import (
    BY_LABEL,
    USER,
    ConfiguredEngine,
    Facts,
    check_allowed,
    check_networks,
    engine_url,
    refuse_contradictions,
    refuse_duplicates,
    refuse_useless,
    with_sources,
)
from pdproxy.settings.errors import KeyPath, Mistakes, SettingsError, quote, spell_key
from pdproxy.settings.keys import check_auth, check_tenants
from pdproxy.settings.kv import check_kv_events
from pdproxy.settings.limits import check_limits, check_media_settings
from pdproxy.settings.listen import check_admin, parsed_networks
from pdproxy.settings.pools import Pool, check_placing
from pdproxy.settings.schema import SOURCES, Settings, engine_scheme, source_section
from pdproxy.settings.tls import refuse_stray_files
from pdproxy.settings.tracing import check_tracing
from pdproxy.settings.transfer import check_pairs, check_transfer
from pdproxy.transfer import registry
from pdproxy.transfer.contract import Channel
from pdproxy.transfer.registry import AUTO


def crosscheck(settings: Settings, found: Mistakes, *, need_engines: bool = True) -> Settings:
    """Return the settings with every URL in its normal spelling. `need_engines` False: a pool
    without engines is allowed.

    Mistakes are added to `found`. A section in which it has one already is not checked: what is
    known of it is not complete.
    """
    auth, tls = settings.auth, settings.listen.tls
    if not found.within("auth"):
        check_auth(auth, found)
    if not found.within("listen"):
        refuse_stray_files(tls, ("listen", "tls"), ("key", "key_password_file", "client_ca"), found)
        with found.collecting("listen"):
            parsed_networks(
                settings.listen.trusted_proxies, found.source(("listen", "trusted_proxies"))
            )
        if not found.within("auth"):
            check_admin(settings.listen.admin, auth.admin_keys, auth.admin_keys_file, found)
    if not found.within("tenants"):
        check_tenants(settings.tenants, found)
    for name in SOURCES:
        if not found.within(name):
            getattr(settings, name).check(found)
    if not found.within("media"):
        check_media_settings(settings.media, found)
    networks = check_allowed(settings.engines, found)
    if not found.within("replicas"):
        check_replicas(settings.replicas, found)
    if not found.within("limits"):
        check_limits(settings.limits, found)
    if not found.within("observe"):
        check_tracing(settings.observe.tracing, found)
    if found.within("pools"):
        return settings
    pools = settings.pools or (Pool(),)
    checked = [_checked(pool, ("pools", at), need_engines, found) for at, pool in enumerate(pools)]
    if networks is not None:
        for at, pool in enumerate(checked):
            check_networks(pool.nodes, networks, ("pools", at, "nodes"), found)
    settings = msgspec.structs.replace(settings, pools=tuple(checked))
    check_pools(settings, found)
    return settings


def check_urls(nodes: Iterable[Mapping[str, object]], found: Mistakes) -> None:
    """Check the URLs of engines that are not checked otherwise, because something else in their
    pool is wrong.
    """
    for index, node in enumerate(nodes):
        path = ("pools", 0, "nodes", index, "url")
        if isinstance(url := node.get("url"), str):
            with found.collecting(*path):
                _spelled(url, path, found)


def _spelled(url: str, path: KeyPath, found: Mistakes) -> str:
    """Return the URL of a node in its normal spelling: an engine's own, or what a source is asked
    for. Raises SettingsError.
    """
    section, where = source_section(url), found.source(path)
    return engine_url(url, path, where) if section is None else section.spelled(url, path, where)


def _stand_in(node: ConfiguredEngine, pool: Pool) -> ConfiguredEngine:
    """Return an engine that stands for all that a source will find; an engine itself, if it is
    one.
    """
    if (section := source_section(node.url)) is None:
        return node
    labels = node.labels
    if section.labels_roles:  # what it finds is compared when it is added
        labels = {**dict.fromkeys(pool.pair_within or (), ""), **labels}
    role = "decode" if node.role == BY_LABEL else node.role
    return msgspec.structs.replace(node, url=section.stand_in(node.url), role=role, labels=labels)


def _refuse_by_label(node: ConfiguredEngine, path: KeyPath, found: Mistakes) -> None:
    section = source_section(node.url)
    if node.role == BY_LABEL and (section is None or not section.labels_roles):
        able = " or ".join(
            f"{scheme}://"
            for section in SOURCES.values()
            if section.labels_roles
            for scheme in section.schemes
        )
        key = (*path, "role")
        text = f"{spell_key(key)}: {BY_LABEL}: only engines of {able} have such labels"
        found.add(key, f"{text}{found.source(key)}")


def _checked(pool: Pool, path: KeyPath, need_engines: bool, found: Mistakes) -> Pool:
    refuse_stray_files(pool.tls, (*path, "tls"), ("key",), found)
    nodes: list[ConfiguredEngine] = []
    for index, node in enumerate(pool.nodes):
        here = (*path, "nodes", index)
        with found.collecting(*here):
            nodes.append(
                msgspec.structs.replace(node, url=_spelled(node.url, (*here, "url"), found))
            )
        refuse_contradictions(node, here, found, engine_scheme(node.url))
        _refuse_by_label(node, here, found)
    if len(nodes) == len(pool.nodes):
        stand_ins = [_stand_in(node, pool) for node in nodes]
        check_transfer(pool, stand_ins, path, found)
        refuse_duplicates(nodes, path, found)
        nodes = [
            with_sources(node, nodes, (*path, "nodes", at, "sources"), found)
            for at, node in enumerate(nodes)
        ]
        # How many engines a source finds is not known, perhaps none: each is compared with others
        # when it is added.
        known = [_nobody(node) if node.is_source else node for node in nodes]
        _check_kv_events(pool, known, path, found)
        check_pairs(pool, known, path, found)
        check_placing(pool, stand_ins, path, found)
        who = next(
            (section.who for node in nodes if (section := source_section(node.url)) is not None),
            None,
        )
        if who is not None and pool.connector == AUTO and not any(node.prefills for node in known):
            key = (*path, "connector")
            text = f"auto: engines that {who} names can't be asked for it: name the connector"
            found.add(key, f"{spell_key(key)}: {text}{found.source(key)}")
    if pool.nodes or need_engines:
        refuse_useless({node.role for node in pool.nodes}, (*path, "nodes"), found)
    return msgspec.structs.replace(pool, nodes=tuple(nodes))


def _nobody(node: ConfiguredEngine) -> ConfiguredEngine:
    """Return a node in the place of another one, with which no rule compares others."""
    return msgspec.structs.replace(node, role="aggregated", facts=Facts(), sources=())


def _check_kv_events(
    pool: Pool, nodes: Sequence[ConfiguredEngine], path: KeyPath, found: Mistakes
) -> None:
    sections = [
        (
            node.facts.kv_events,
            node.facts.data_parallel_size,
            (*path, "nodes", at, "facts", "kv_events"),
        )
        for at, node in enumerate(nodes)
    ]
    check_kv_events(pool.kv_events, sections, (*path, "kv_events"), found)


def checked_node(
    node: ConfiguredEngine, pool: Pool, others: Sequence[ConfiguredEngine]
) -> ConfiguredEngine:
    """Return an engine that is added to `others` of a pool while the proxy runs, with its URLs in
    their normal spelling.

    It passes the checks that an engine of the settings passes. The others are not checked again:
    their sources may be gone.

    Raises:
        SettingsError: naming the engine.
    """
    try:
        return _checked_nodes([node], pool, others, ("pools", 0))[0]
    except SettingsError as error:
        raise SettingsError(
            f"{quote(USER.sub('//***@', str(node.url)))} can't be added: {error}"
        ) from None


def checked_nodes(
    new: Sequence[ConfiguredEngine], pool: Pool, others: Sequence[ConfiguredEngine]
) -> list[ConfiguredEngine]:
    """Do as `checked_node` for several engines that are added together: that takes a time that
    grows with their number only.

    Raises:
        SettingsError: naming the engine, if one alone is wrong.
    """
    if len(new) > 1:
        try:
            return _checked_nodes(new, pool, others, ("pools", 0))
        except SettingsError:
            for node in new:
                checked_node(node, pool, others)
            raise
    return [checked_node(node, pool, others) for node in new]


def _checked_nodes(
    new: Sequence[ConfiguredEngine], pool: Pool, others: Sequence[ConfiguredEngine], path: KeyPath
) -> list[ConfiguredEngine]:
    found = Mistakes()
    spelled: list[ConfiguredEngine] = []
    for at, node in enumerate(new, len(others)):
        here = (*path, "nodes", at)
        conform(msgspec.to_builtins(node), ConfiguredEngine, "", here)
        spelled.append(msgspec.structs.replace(node, url=engine_url(node.url, (*here, "url"))))
        refuse_contradictions(spelled[-1], here, found)
        _refuse_by_label(node, here, found)
    nodes = (*others, *spelled)
    check_transfer(pool, nodes, path, found)
    _check_kv_events(pool, nodes, path, found)
    refuse_duplicates(nodes, path, found)
    spelled = [
        with_sources(node, nodes, (*path, "nodes", at, "sources"), found)
        for at, node in enumerate(spelled, len(others))
    ]
    check_pairs(pool, (*others, *spelled), path, found)
    check_placing(pool, (*others, *spelled), path, found)
    found.raise_any()
    return spelled


def check_pools(settings: Settings, found: Mistakes) -> None:
    """Check the pools, each of which was checked by itself. Mistakes are added to `found`."""
    for at, pool in enumerate(settings.pools):
        for alias, real in pool.aliases.items():
            if real in pool.aliases or not alias:
                key: KeyPath = ("pools", at, "aliases")
                why = "is an alias itself" if alias else "needs a name"
                found.add(
                    key, f"{spell_key(key)}: {quote(alias)}: {quote(real)} {why}{found.source(key)}"
                )
        for place, text in enumerate(pool.models):
            if text.count("*") > 1:
                key = ("pools", at, "models", place)
                found.add(
                    key,
                    f"{spell_key(key)}: {quote(text)}: a pattern has one * at "
                    f"most{found.source(key)}",
                )
    if len(settings.pools) < 2:
        return
    _refuse_shared(
        [(pool.name, ("pools", at, "name")) for at, pool in enumerate(settings.pools)],
        "the name",
        found,
    )
    urls: list[tuple[str, KeyPath]] = [
        # one port is either with TLS or without
        (node.url.partition("://")[2], ("pools", at, "nodes", place))
        for at, pool in enumerate(settings.pools)
        for place, node in enumerate(pool.nodes)
    ]
    _refuse_shared(urls, "the engine", found)
    _refuse_shared([*_sockets(settings)], "the port", found)


def _refuse_shared(named: Sequence[tuple[str, KeyPath]], what: str, found: Mistakes) -> None:
    first: dict[str, KeyPath] = {}
    for name, key in named:
        other = first.setdefault(name, key)
        if other[1] != key[1]:  # within one pool it was checked before
            text = (
                f"{spell_key(other)} and {spell_key(key)}: two pools can't share {what} "
                f"{name}{found.source(key)}"
            )
            found.add(key, text)


def _sockets(settings: Settings) -> Iterator[tuple[str, KeyPath]]:
    """Return the ports at which engines of the pools reach the proxy."""
    for at, pool in enumerate(settings.pools):
        key: KeyPath = ("pools", at)
        if pool.kv_events.enabled and pool.kv_events.host is not None:
            most = max((node.facts.data_parallel_size for node in pool.nodes), default=1)
            for port in range(pool.kv_events.port, pool.kv_events.port + most):
                yield str(port), (*key, "kv_events")
        yield from (
            (str(port), (*key, name)) for port, name in _of_connector(settings.of_pool(pool), pool)
        )


def _of_connector(settings: Settings, pool: Pool) -> Iterator[tuple[int, str]]:
    if pool.connector == registry.AUTO:  # checked once the engines have been asked
        return
    entry = registry.entry_of(pool.connector)
    if entry.registered is not None:
        yield settings.registration.port or entry.registration_port, "registration_port"
    contract = entry.contract(settings)
    if contract.has_notices_over(Channel.ZMQ) or contract.has_notices_over(Channel.HTTP):
        yield settings.kv_ready.port, "kv_ready_port"
