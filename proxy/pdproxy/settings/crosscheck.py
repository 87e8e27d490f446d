"""What no single field can tell: whether the engines make a pool that could serve anything.

Owns the spelling of an engine's URL: one engine has one, so that naming it twice is noticed and metrics agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv6Address
from urllib.parse import urlsplit

import msgspec

from pdproxy.settings.dump import MASK
from pdproxy.settings.errors import KeyPath, SettingsError, quote, spell_key
from pdproxy.settings.schema import Node, Pool, Settings

_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?\.?")
_USER = re.compile(r"//[^/]*@")


def crosscheck(settings: Settings, *, need_engines: bool = True) -> Settings:
    """Return the settings with every URL as `http://host:port`. `need_engines` False: having no engine at all is fine.

    Raises:
        SettingsError: naming the key or the engine.
    """
    keys = (*settings.auth.api_keys, settings.auth.engine_api_key)
    if MASK in keys:
        raise SettingsError(f"auth: {MASK} is what `pdproxy config print` shows in place of a key, not a key")
    if len(settings.pools) > 1:
        names = ", ".join(quote(pool.name) for pool in settings.pools[:4])
        raise SettingsError(f"pools: {len(settings.pools)} are configured ({names}), but only one is supported for now")
    pools = settings.pools or (Pool(),)
    pools = tuple(_checked(pool, ("pools", index), need_engines) for index, pool in enumerate(pools))
    return msgspec.structs.replace(settings, pools=pools)


def _checked(pool: Pool, path: KeyPath, need_engines: bool) -> Pool:
    nodes = tuple(
        msgspec.structs.replace(node, url=engine_url(node.url, (*path, "nodes", index, "url")))
        for index, node in enumerate(pool.nodes)
    )
    _refuse_duplicates(nodes, path)
    if nodes or need_engines:
        _refuse_useless({node.role for node in nodes}, (*path, "nodes"))
    return msgspec.structs.replace(pool, nodes=nodes)


def engine_url(url: str, path: KeyPath) -> str:
    """Return an engine's URL in its one spelling, `http://host:port`.

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
    if parts.scheme == "https":
        raise wrong("https to engines isn't supported yet: expected http://host:port")
    if parts.scheme != "http" or "://" not in url:
        raise wrong("expected http://host:port")
    if not (host.startswith("[") or _HOST.fullmatch(host)):
        raise wrong("has no host name: expected http://host:port" if not host else "its host name can't exist")
    if parts.path not in {"", "/"} or "?" in url or "#" in url:
        raise wrong("an engine is a host and a port: nothing may follow them, not even /v1")
    if port == 0:
        raise wrong("nothing listens on port 0")
    return f"http://{host}:{80 if port is None else port}"


def _refuse_duplicates(nodes: Iterable[Node], path: KeyPath) -> None:
    first: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if node.url in first:
            both = " and ".join(spell_key((*path, "nodes", at)) for at in (first[node.url], index))
            raise SettingsError(
                f"{both}: {node.url} is given twice: an engine has one role (flags add to the file's nodes)"
            )
        first[node.url] = index


def _refuse_useless(roles: set[str], path: KeyPath) -> None:
    key = spell_key(path)
    if not roles:
        raise SettingsError(f"{key}: no engine is configured: give --prefill and --decode, or nodes in the YAML file")
    if "prefill" in roles and "decode" not in roles:
        raise SettingsError(f"{key}: prefill engines, but no decode engine that could take what they compute")
