"""Checks of fields against each other: whether the engines form a pool that can serve requests, and which fields exclude others.

Owns the normal spelling of an engine's URL: one engine has one, so that naming it twice is noticed and metrics agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

from pdproxy.kit.addresses import Network, read_address, read_network
from pdproxy.kit.engine_networks import EngineNetworks
from pdproxy.settings.admin import UNIX, check_admin
from pdproxy.settings.conform import conform
from pdproxy.settings.dns import check_servers, dns_name, is_dns, stand_in_url
from pdproxy.settings.dump import MASK
from pdproxy.settings.engine_networks import EngineSettings
from pdproxy.settings.errors import KeyPath, Mistakes, SettingsError, quote, spell_key
from pdproxy.settings.kv_events import check_kv_events
from pdproxy.settings.limits import Limits, least_buffered_bytes
from pdproxy.settings.listen import ListenTls
from pdproxy.settings.media import check_media_settings
from pdproxy.settings.network_checks import check_networks
from pdproxy.settings.placing_checks import check_placing
from pdproxy.settings.pool_checks import check_pools
from pdproxy.settings.replicas import check_replicas
from pdproxy.settings.schema import Auth, EngineTls, Node, Pool, Settings
from pdproxy.settings.tenants import check_tenants
from pdproxy.settings.transfer_checks import check_pairs, check_transfer
from pdproxy.transfer.registry import AUTO

PREFIX = re.compile(r"(/(?!\.{1,2}(/|\Z))[A-Za-z0-9._~-]+)+")
"""A path before routes: of segments without escapes, none of which is `.` or `..`."""
_HOST = re.compile(r"(?=.{1,254}\Z)[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?\.?")
_LABEL_LENGTHS = range(1, 64)
"""Characters between two dots of a name: the system's resolver takes no others."""
_PORTS = {"http": 80, "https": 443}
_USER = re.compile(r"//[^/]*@")


def crosscheck(settings: Settings, found: Mistakes, *, need_engines: bool = True) -> Settings:
    """Return the settings with every URL in its normal spelling. `need_engines` False: a pool without engines is allowed.

    Mistakes are added to `found`. A section in which it has one already is not checked: what is known of it is not complete.
    """
    auth, tls = settings.auth, settings.listen.tls
    if not found.within("auth"):
        _check_auth(auth, found)
    if not found.within("listen"):
        _refuse_stray_files(tls, ("listen", "tls"), ("key", "key_password_file", "client_ca"), found)
        with found.collecting("listen"):
            parsed_networks(settings.listen.trusted_proxies, found.source(("listen", "trusted_proxies")))
        if not found.within("auth"):
            check_admin(settings.listen.admin, auth.admin_keys, auth.admin_keys_file, found)
    if not found.within("tenants"):
        check_tenants(settings.tenants, found)
    if not found.within("dns"):
        check_servers(settings.dns, found)
    if not found.within("media"):
        check_media_settings(settings.media, found)
    networks = _allowed(settings.engines, found)
    if not found.within("replicas"):
        check_replicas(settings.replicas, found)
    if not found.within("limits"):
        _refuse_bodies_without_space(settings.limits, found)
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


def _allowed(engines: EngineSettings, found: Mistakes) -> EngineNetworks | None:
    """Return the networks in which engines may be, None if the setting is wrong."""
    try:
        return engines.allowed
    except ValueError:
        key = ("engines", "networks")
        text = f"expected networks or addresses, such as 10.0.0.0/8{found.source(key)}"
        found.add(key, f"{spell_key(key)}: {quote(', '.join(engines.networks))}: {text}")
        return None


def _check_auth(auth: Auth, found: Mistakes) -> None:
    if MASK in (*auth.api_keys, *auth.admin_keys, auth.engine_api_key):
        name = "api_keys" if MASK in auth.api_keys else "admin_keys" if MASK in auth.admin_keys else "engine_api_key"
        where = found.source(("auth", name))
        text = f"auth.{name}: {MASK} is what `pdproxy config print` shows in place of a key, not a key{where}"
        found.add(("auth",), text)
    if auth.engine_api_key is not None and auth.engine_api_key_file is not None:
        names = "engine_api_key", "engine_api_key_file"
        where = "".join(dict.fromkeys(found.source(("auth", name)) for name in names))
        text = f"auth: engine_api_key and engine_api_key_file exclude each other: give one{where}"
        found.add(("auth",), text)


def check_urls(nodes: Iterable[Mapping[str, object]], found: Mistakes) -> None:
    """Check the URLs of engines that are not checked otherwise, because something else in their pool is wrong."""
    for index, node in enumerate(nodes):
        path = ("pools", 0, "nodes", index, "url")
        if isinstance(url := node.get("url"), str):
            with found.collecting(*path):
                (dns_name if is_dns(url) else engine_url)(url, path, found.source(path))


def _checked(pool: Pool, path: KeyPath, need_engines: bool, found: Mistakes) -> Pool:
    _refuse_stray_files(pool.tls, (*path, "tls"), ("key",), found)
    nodes, named = [], [(node, (*path, "dns_nodes", at)) for at, node in enumerate(pool.dns_nodes)]
    for index, node in enumerate(pool.nodes):
        here = (*path, "nodes", index)
        if is_dns(node.url):
            named.append((node, here))
            continue
        with found.collecting(*here):
            url = engine_url(node.url, (*here, "url"), found.source((*here, "url")))
            nodes.append(msgspec.structs.replace(node, url=url))
        _refuse_contradictions(node, here, found)
    dns_nodes = _checked_names(pool, named, nodes, path, found)
    if len(nodes) + len(dns_nodes) == len(pool.all_nodes):
        others = [msgspec.structs.replace(node, url=stand_in_url(node.url)) for node in dns_nodes]
        check_transfer(pool, [*nodes, *others], path, found)
        _check_kv_events(pool, nodes, path, found)
        _refuse_duplicates(nodes, path, found)
        nodes = [_with_sources(node, nodes, (*path, "nodes", at, "sources"), found) for at, node in enumerate(nodes)]
        check_pairs(pool, nodes, path, found)
        check_placing(pool, [*nodes, *others], path, found)
    if pool.all_nodes or need_engines:
        _refuse_useless({node.role for node in pool.all_nodes}, (*path, "nodes"), found)
    return msgspec.structs.replace(pool, nodes=tuple(nodes), dns_nodes=tuple(dns_nodes))


def _checked_names(
    pool: Pool, named: Sequence[tuple[Node, KeyPath]], nodes: Sequence[Node], path: KeyPath, found: Mistakes
) -> list[Node]:
    """Return the nodes that DNS names with their URLs and sources in their normal spelling."""
    checked: dict[str, Node] = {}
    for node, here in named:
        with found.collecting(*here):
            url = dns_name(node.url, (*here, "url"), found.source((*here, "url"))).url
            _refuse_contradictions(node, here, found)
            if url in checked:
                found.add(here, f"{spell_key(here)}: {url} is given twice{found.source(here)}")
            node = _with_sources(node, nodes, (*here, "sources"), found)
            checked[url] = msgspec.structs.replace(node, url=url)
    if checked and pool.connector == AUTO and not any(node.prefills for node in nodes):
        key = (*path, "connector")
        text = "auto: engines that DNS names can't be asked for it: name the connector"
        found.add(key, f"{spell_key(key)}: {text}{found.source(key)}")
    return list(checked.values())


def _check_kv_events(pool: Pool, nodes: Sequence[Node], path: KeyPath, found: Mistakes) -> None:
    sections = [
        (node.facts.kv_events, node.facts.data_parallel_size, (*path, "nodes", at, "facts", "kv_events"))
        for at, node in enumerate(nodes)
    ]
    check_kv_events(pool.kv_events, sections, (*path, "kv_events"), found)


def checked_node(node: Node, pool: Pool, others: Sequence[Node]) -> Node:
    """Return an engine that is added to `others` of a pool while the proxy runs, with its URLs in their normal spelling.

    It passes the checks that an engine of the settings passes. The others are not checked again: their sources may be gone.

    Raises:
        SettingsError: naming the engine.
    """
    try:
        return _checked_nodes([node], pool, others, ("pools", 0))[0]
    except SettingsError as error:
        raise SettingsError(f"{quote(_USER.sub('//***@', str(node.url)))} can't be added: {error}") from None


def checked_nodes(new: Sequence[Node], pool: Pool, others: Sequence[Node]) -> list[Node]:
    """Do as `checked_node` for several engines that are added together: that takes a time that grows with their number only.

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


def _checked_nodes(new: Sequence[Node], pool: Pool, others: Sequence[Node], path: KeyPath) -> list[Node]:
    found = Mistakes()
    spelled: list[Node] = []
    for at, node in enumerate(new, len(others)):
        here = (*path, "nodes", at)
        conform(msgspec.to_builtins(node), Node, "", here)
        spelled.append(msgspec.structs.replace(node, url=engine_url(node.url, (*here, "url"))))
        _refuse_contradictions(spelled[-1], here, found)
    nodes = (*others, *spelled)
    check_transfer(pool, nodes, path, found)
    _check_kv_events(pool, nodes, path, found)
    _refuse_duplicates(nodes, path, found)
    spelled = [
        _with_sources(node, nodes, (*path, "nodes", at, "sources"), found)
        for at, node in enumerate(spelled, len(others))
    ]
    check_pairs(pool, (*others, *spelled), path, found)
    check_placing(pool, (*others, *spelled), path, found)
    found.raise_any()
    return spelled


def _refuse_bodies_without_space(limits: Limits, found: Mistakes) -> None:
    minimum = least_buffered_bytes(limits)
    if limits.max_buffered_bytes < minimum:
        text = (
            f"limits.max_buffered_bytes = {limits.max_buffered_bytes} has no space for a body of limits.max_body_bytes = "
            f"{limits.max_body_bytes}: expected at least {minimum}"
        )
        found.add(("limits",), text + _one_source(found, "max_buffered_bytes", "max_body_bytes"))
    if limits.max_buffered_answer_bytes < limits.max_answer_bytes:
        text = (
            f"limits.max_buffered_answer_bytes = {limits.max_buffered_answer_bytes} has no space for an answer of "
            f"limits.max_answer_bytes = {limits.max_answer_bytes}"
        )
        found.add(("limits",), text + _one_source(found, "max_buffered_answer_bytes", "max_answer_bytes"))


def _one_source(found: Mistakes, *names: str) -> str:
    """Return where the first of these limits that is not a default was read."""
    return next(filter(None, (found.source(("limits", name)) for name in names)), "")


def parsed_networks(texts: Iterable[str], where: str = "") -> tuple[Network, ...]:
    """Return the networks in `listen.trusted_proxies`; an address is a network of one. `where`: the source of the list.

    Raises:
        SettingsError: naming each text that is neither.
    """
    networks, found = [], Mistakes()
    for index, text in enumerate(texts):
        if text == UNIX:
            continue
        try:
            networks.append(read_network(text))
        except ValueError:
            path = ("listen", "trusted_proxies", index)
            words = f"{quote(text)}: expected an address or a network, such as 10.0.0.0/8, or {UNIX}{where}"
            found.add(path, f"{spell_key(path)}: {words}")
    found.raise_any()
    return tuple(networks)


def engine_url(url: str, path: KeyPath, where: str = "") -> str:
    """Return an engine's URL in its normal spelling: scheme, host and port, then the path it is behind, if there is one.

    `where`: the source of the URL.

    Raises:
        SettingsError: naming `path` and the URL; a password in it is not shown.
    """

    def wrong(why: str) -> SettingsError:
        return SettingsError(f"{spell_key(path)}: {quote(_USER.sub('//***@', url))}: {why}{where}")

    if not url.isascii() or not url.isprintable() or " " in url:
        raise wrong("an engine's URL can't hold blanks, control characters or letters beyond ASCII")
    if "@" in url:
        raise wrong("user and password aren't supported: set auth.engine_api_key")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        if ":" in host:
            address = read_address(f"[{host}]")
            if address is None or "%" in host or parts.netloc.partition("]")[2].partition(":")[0]:
                raise ValueError(host)
            host = str(address) if address.version == 4 else f"[{address}]"  # one engine has one spelling
    except ValueError:
        raise wrong("no URL: expected http://host:port") from None
    if parts.scheme not in _PORTS or "://" not in url:
        raise wrong("expected http://host:port or https://host:port")
    if not (host.startswith("[") or (_HOST.fullmatch(host) and _has_labels(host))):
        raise wrong("has no host name: expected http://host:port" if not host else "its host name can't exist")
    prefix = parts.path.removesuffix("/")
    if "?" in url or "#" in url or prefix.endswith("/v1") or not (prefix == "" or PREFIX.fullmatch(prefix)):
        raise wrong(
            "an engine is a host and a port, and perhaps a path before its routes: nothing may follow, not even /v1"
        )
    if port == 0:
        raise wrong("nothing listens on port 0")
    return f"{parts.scheme}://{host}:{_PORTS[parts.scheme] if port is None else port}{prefix}"


def _has_labels(host: str) -> bool:
    return all(len(label) in _LABEL_LENGTHS for label in host.removesuffix(".").split("."))


def both_schemes(url: str) -> list[str]:
    """Return an engine's URL with http and with https: one port is either."""
    rest = url.partition("://")[2]
    return [f"{scheme}://{rest}" for scheme in _PORTS]


def _with_sources(node: Node, nodes: Iterable[Node], path: KeyPath, found: Mistakes) -> Node:
    """Return the node with its sources in their normal spelling. Each must be a prefill engine of the pool."""
    if node.sources and not node.decodes:
        found.add(path, f"{spell_key(path)}: only a decode engine takes KV{found.source(path)}")
        return node
    prefills = {other.url for other in nodes if other.prefills}
    sources = []
    for at, text in enumerate(node.sources):
        here = (*path, at)
        with found.collecting(*here):
            url = engine_url(text, here, found.source(here))
            sources.append(url)
            if url not in prefills:
                text = f"{spell_key(here)}: {url} is no prefill engine of this pool{found.source(here)}"
                found.add(here, text)
    return msgspec.structs.replace(node, sources=tuple(sources)) if sources else node


def _refuse_contradictions(node: Node, path: KeyPath, found: Mistakes) -> None:
    key, where = spell_key(path), found.source(path)
    if node.api_key == MASK:
        text = f"{key}.api_key: {MASK} is what `pdproxy config print` shows in place of a key, not a key{where}"
        found.add(path, text)
    if node.api_key is not None and node.api_key_file is not None:
        found.add(path, f"{key}: api_key and api_key_file exclude each other: give one{where}")
    if node.serves_whole and node.role != "prefill":
        text = "only a prefill engine has this setting, other roles say whether an engine serves requests whole"
        found.add((*path, "serves_whole"), f"{key}.serves_whole: {text}{found.source((*path, 'serves_whole'))}")
    if node.tls != EngineTls() and node.url.startswith(("http:", "dns:", "srv:")):
        url = quote(_USER.sub("//***@", node.url))
        found.add(path, f"{key}.tls: {url} is without TLS: expected an https:// URL{where}")
    _refuse_stray_files(node.tls, (*path, "tls"), ("key",), found)


def _refuse_stray_files(tls: ListenTls | EngineTls, path: KeyPath, names: Iterable[str], found: Mistakes) -> None:
    for name in names:
        if tls.certificate is None and getattr(tls, name) is not None:
            key, needed, where = (*path, name), spell_key((*path, "certificate")), found.source((*path, name))
            found.add(key, f"{spell_key(key)}: has no effect without {needed}{where}")


def _refuse_duplicates(nodes: Iterable[Node], path: KeyPath, found: Mistakes) -> None:
    first: dict[str, int] = {}
    for index, node in enumerate(nodes):
        place = node.url.partition("://")[2]  # one port is either with TLS or without
        if place in first:
            both = " and ".join(spell_key((*path, "nodes", at)) for at in (first[place], index))
            where = found.source((*path, "nodes", index))
            text = f"{both}: {node.url} is given twice: an engine has one role (flags add to the file's nodes){where}"
            found.add((*path, "nodes"), text)
        first.setdefault(place, index)


def _refuse_useless(roles: set[str], path: KeyPath, found: Mistakes) -> None:
    key = spell_key(path)
    if not roles:
        found.add(path, f"{key}: no engine is configured: give --prefill and --decode, or nodes in the YAML file")
    if "prefill" in roles and roles.isdisjoint({"decode", "any"}):
        found.add(path, f"{key}: prefill engines, but no decode engine that could take what they compute")
