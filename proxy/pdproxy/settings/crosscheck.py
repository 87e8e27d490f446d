"""Checks of fields against each other: whether the engines form a pool that can serve requests, and which fields exclude others.

Owns the normal spelling of an engine's URL: one engine has one, so that naming it twice is noticed and metrics agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_network
from urllib.parse import urlsplit

import msgspec

from pdproxy.settings.conform import conform
from pdproxy.settings.dump import MASK
from pdproxy.settings.errors import KeyPath, SettingsError, quote, spell_key
from pdproxy.settings.limits import Limits
from pdproxy.settings.schema import EngineTls, ListenTls, Node, Pool, Settings
from pdproxy.settings.transfer_checks import check_transfer

_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?\.?")
_PORTS = {"http": 80, "https": 443}
_USER = re.compile(r"//[^/]*@")


def crosscheck(settings: Settings, *, need_engines: bool = True) -> Settings:
    """Return the settings with every URL in its normal spelling. `need_engines` False: a pool without engines is allowed.

    Raises:
        SettingsError: naming the key or the engine.
    """
    auth = settings.auth
    if MASK in (*auth.api_keys, auth.engine_api_key):
        raise SettingsError(f"auth: {MASK} is what `pdproxy config print` shows in place of a key, not a key")
    if auth.engine_api_key is not None and auth.engine_api_key_file is not None:
        raise SettingsError("auth: engine_api_key and engine_api_key_file exclude each other: give one")
    _refuse_stray_files(settings.listen.tls, ("listen", "tls"), ("key", "key_password_file", "client_ca"))
    parsed_networks(settings.listen.trusted_proxies)
    _refuse_bodies_without_space(settings.limits)
    if len(settings.pools) > 1:
        names = ", ".join(quote(pool.name) for pool in settings.pools[:4])
        raise SettingsError(f"pools: {len(settings.pools)} are configured ({names}), but only one is supported for now")
    pools = settings.pools or (Pool(),)
    pools = tuple(_checked(pool, ("pools", index), need_engines) for index, pool in enumerate(pools))
    return msgspec.structs.replace(settings, pools=pools)


def _checked(pool: Pool, path: KeyPath, need_engines: bool) -> Pool:
    _refuse_stray_files(pool.tls, (*path, "tls"), ("key",))
    nodes = tuple(
        msgspec.structs.replace(node, url=engine_url(node.url, (*path, "nodes", index, "url")))
        for index, node in enumerate(pool.nodes)
    )
    for index, node in enumerate(nodes):
        _refuse_contradictions(node, (*path, "nodes", index))
    check_transfer(pool, nodes, path)
    _refuse_duplicates(nodes, path)
    nodes = tuple(_with_sources(node, nodes, (*path, "nodes", index, "sources")) for index, node in enumerate(nodes))
    if nodes or need_engines:
        _refuse_useless({node.role for node in nodes}, (*path, "nodes"))
    return msgspec.structs.replace(pool, nodes=nodes)


def checked_node(node: Node, pool: Pool, others: Sequence[Node]) -> Node:
    """Return an engine that is added to `others` of a pool while the proxy runs, with its URLs in their normal spelling.

    It passes the checks that an engine of the settings passes. The others are not checked again: their sources may be gone.

    Raises:
        SettingsError: naming the engine.
    """
    path = ("pools", 0, "nodes", len(others))
    try:
        return _checked_node(node, pool, others, path)
    except SettingsError as error:
        raise SettingsError(f"{quote(_USER.sub('//***@', str(node.url)))} can't be added: {error}") from None


def _checked_node(node: Node, pool: Pool, others: Sequence[Node], path: KeyPath) -> Node:
    conform(msgspec.to_builtins(node), Node, "", path)
    node = msgspec.structs.replace(node, url=engine_url(node.url, (*path, "url")))
    _refuse_contradictions(node, path)
    nodes = (*others, node)
    check_transfer(pool, nodes, path[:2])
    _refuse_duplicates(nodes, path[:2])
    return _with_sources(node, nodes, (*path, "sources"))


def _refuse_bodies_without_space(limits: Limits) -> None:
    minimum = limits.max_body_bytes + -(-limits.max_body_bytes // 7)  # an eighth of it is kept for small bodies
    if limits.max_buffered_bytes < minimum:
        raise SettingsError(
            f"limits.max_buffered_bytes = {limits.max_buffered_bytes} has no space for a body of limits.max_body_bytes = "
            f"{limits.max_body_bytes}: expected at least {minimum}"
        )
    if limits.max_buffered_answer_bytes < limits.max_answer_bytes:
        raise SettingsError(
            f"limits.max_buffered_answer_bytes = {limits.max_buffered_answer_bytes} has no space for an answer of "
            f"limits.max_answer_bytes = {limits.max_answer_bytes}"
        )


def parsed_networks(texts: Iterable[str]) -> tuple[IPv4Network | IPv6Network, ...]:
    """Return `listen.trusted_proxies` as networks; an address is a network of one.

    Raises:
        SettingsError: naming the text that is neither.
    """
    found = []
    for index, text in enumerate(texts):
        try:
            found.append(ip_network(text, strict=False))
        except ValueError:
            key = spell_key(("listen", "trusted_proxies", index))
            raise SettingsError(f"{key}: {quote(text)}: expected an address or a network, such as 10.0.0.0/8") from None
    return tuple(found)


def engine_url(url: str, path: KeyPath) -> str:
    """Return an engine's URL in its normal spelling, `http://host:port` or `https://host:port`.

    Raises:
        SettingsError: naming `path` and the URL; a password in it is not shown.
    """

    def wrong(why: str) -> SettingsError:
        return SettingsError(f"{spell_key(path)}: {quote(_USER.sub('//***@', url))}: {why}")

    if not url.isascii() or not url.isprintable() or " " in url:
        raise wrong("an engine's URL can't hold blanks, control characters or letters beyond ASCII")
    if "@" in url:
        raise wrong("user and password aren't supported: set auth.engine_api_key")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        if ":" in host:
            host = f"[{IPv6Address(host)}]"
    except ValueError:
        raise wrong("no URL: expected http://host:port") from None
    if parts.scheme not in _PORTS or "://" not in url:
        raise wrong("expected http://host:port or https://host:port")
    if not (host.startswith("[") or _HOST.fullmatch(host)):
        raise wrong("has no host name: expected http://host:port" if not host else "its host name can't exist")
    if parts.path not in {"", "/"} or "?" in url or "#" in url:
        raise wrong("an engine is a host and a port: nothing may follow them, not even /v1")
    if port == 0:
        raise wrong("nothing listens on port 0")
    return f"{parts.scheme}://{host}:{_PORTS[parts.scheme] if port is None else port}"


def _with_sources(node: Node, nodes: Iterable[Node], path: KeyPath) -> Node:
    """Return the node with its sources in their normal spelling. Each must be a prefill engine of the pool."""
    if node.sources and node.role != "decode":
        raise SettingsError(f"{spell_key(path)}: only a decode engine takes KV")
    prefills = {other.url for other in nodes if other.role == "prefill"}
    sources = tuple(engine_url(url, (*path, at)) for at, url in enumerate(node.sources))
    for at, url in enumerate(sources):
        if url not in prefills:
            raise SettingsError(f"{spell_key((*path, at))}: {url} is no prefill engine of this pool")
    return msgspec.structs.replace(node, sources=sources) if sources else node


def _refuse_contradictions(node: Node, path: KeyPath) -> None:
    key = spell_key(path)
    if node.api_key == MASK:
        raise SettingsError(f"{key}.api_key: {MASK} is what `pdproxy config print` shows in place of a key, not a key")
    if node.api_key is not None and node.api_key_file is not None:
        raise SettingsError(f"{key}: api_key and api_key_file exclude each other: give one")
    if node.tls != EngineTls() and node.url.startswith("http:"):
        raise SettingsError(f"{key}.tls: {node.url} is without TLS: expected an https:// URL")
    _refuse_stray_files(node.tls, (*path, "tls"), ("key",))


def _refuse_stray_files(tls: ListenTls | EngineTls, path: KeyPath, names: Iterable[str]) -> None:
    for name in names:
        if tls.certificate is None and getattr(tls, name) is not None:
            raise SettingsError(
                f"{spell_key((*path, name))}: has no effect without {spell_key((*path, 'certificate'))}"
            )


def _refuse_duplicates(nodes: Iterable[Node], path: KeyPath) -> None:
    first: dict[str, int] = {}
    for index, node in enumerate(nodes):
        place = node.url.partition("://")[2]  # one port is either with TLS or without
        if place in first:
            both = " and ".join(spell_key((*path, "nodes", at)) for at in (first[place], index))
            raise SettingsError(
                f"{both}: {node.url} is given twice: an engine has one role (flags add to the file's nodes)"
            )
        first[place] = index


def _refuse_useless(roles: set[str], path: KeyPath) -> None:
    key = spell_key(path)
    if not roles:
        raise SettingsError(f"{key}: no engine is configured: give --prefill and --decode, or nodes in the YAML file")
    if "prefill" in roles and "decode" not in roles:
        raise SettingsError(f"{key}: prefill engines, but no decode engine that could take what they compute")
