"""The rules of `pdproxy check --security`: only data. Each says when something is open, where, and
how to close it. Pure.

A rule more is a `SecurityRule` in `RULES`, with a row in the table of its tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from pdproxy.app.valid_keys import SHORT
from pdproxy.check.security.view import SecurityView, is_far
from pdproxy.kit.addresses import overlap, read_network
from pdproxy.kit.engine_networks import FORBIDDEN
from pdproxy.settings.keys import SEPARATE, SHARED
from pdproxy.settings.listen import UNIX
from pdproxy.settings.schema import engine_scheme
from pdproxy.transfer import registry

WIDEST = {4: 8, 6: 32}
"""Bits of a network's prefix by version: proxies in front are in no wider one."""


class Open(NamedTuple):
    """Something that is open. `says`: by which setting, as what follows its name, and who can do
    what.
    """

    setting: str
    says: str


class SecurityRule(NamedTuple):
    """`name` is stable, for scripts. `finds` returns what is open, `remedy` says how to close
    it.
    """

    name: str
    finds: Callable[[SecurityView], Iterator[Open]]
    remedy: str


def _no_keys(view: SecurityView) -> Iterator[Open]:
    listen = view.settings.listen
    if not view.is_local and not view.settings.auth.wants_keys and listen.tls.client_ca is None:
        yield Open(
            "auth.api_keys", f"there are no keys: anybody who reaches {view.place} can send prompts"
        )


def _no_tls(view: SecurityView) -> Iterator[Open]:
    if not view.is_local and view.settings.listen.tls.certificate is None:
        yield Open(
            "listen.tls.certificate",
            f"there is none: prompts and keys go to {view.place} as they are",
        )


def _admin_without_keys(view: SecurityView) -> Iterator[Open]:
    place = view.admin
    if place is not None and place.path is None and not view.settings.auth.wants_admin_keys:
        yield Open(
            "auth.admin_keys",
            f"there are none: each user and program of this machine can use {place}",
        )


def _admin_without_tls(view: SecurityView) -> Iterator[Open]:
    place = view.admin
    if place is not None and not place.is_local and view.settings.listen.tls.certificate is None:
        yield Open("listen.admin", f"{place} has no TLS: keys of operators go there as they are")


def _operator_routes(view: SecurityView) -> Iterator[Open]:
    if not view.is_local and not view.settings.hides_operator_routes:
        said = "/metrics, /docs, /load, /version and the details of /ready are open to everybody"
        yield Open("listen.operator_routes", f"{view.settings.listen.operator_routes}: {said}")


def _trusted_proxies(view: SecurityView) -> Iterator[Open]:
    for text in view.settings.listen.trusted_proxies:
        if text == UNIX:
            continue
        network = read_network(text)
        if network.prefixlen < WIDEST[network.version]:
            yield Open(
                "listen.trusted_proxies",
                f"{text}: all of these may say who a client is, in X-Forwarded-For",
            )


def _media(view: SecurityView) -> Iterator[Open]:
    if view.settings.media.urls == "any":
        yield Open(
            "media.urls", "any: clients have engines fetch from everywhere that these can reach"
        )


def _engine_networks(view: SecurityView) -> Iterator[Open]:
    named = view.settings.engines.networks
    if not named and not view.is_local:
        yield Open(
            "engines.networks",
            "none are named: an engine, or a name in DNS, may lead to any address",
        )
    for text in named:
        network = read_network(text)
        reached = next((why for other, why in FORBIDDEN if overlap(network, other)), None)
        if reached is not None:
            yield Open(
                "engines.networks", f"{text}: holds addresses at which no engine is ({reached})"
            )


def _short_keys(view: SecurityView) -> Iterator[Open]:
    for setting, name, length in view.keys:
        if length < SHORT:
            yield Open(setting, f"{name}: a key of {length} characters can be guessed")


def _readable_files(view: SecurityView) -> Iterator[Open]:
    for setting, path in view.exposed:
        yield Open(setting, f"{path}: other users of this machine can read or change it")


def _plain_engines(view: SecurityView) -> Iterator[Open]:
    for setting, engine in view.nodes:
        if engine_scheme(engine.url) == "http" and is_far(engine):
            yield Open(
                f"{setting}.url",
                f"{engine.url}: prompts and the engines' key cross a network as they are",
            )


def _unverified(view: SecurityView) -> Iterator[Open]:
    said = "false: anybody in between can pass for an engine, and read prompts and keys"
    for at, pool in enumerate(view.settings.pools):
        if pool.tls.verify is False:
            yield Open(f"pools[{at}].tls.verify", said)
    for setting, engine in view.nodes:
        if engine.tls.verify is False:
            yield Open(f"{setting}.tls.verify", said)


def _wide_sockets(view: SecurityView) -> Iterator[Open]:
    for setting, host in view.wide_sockets:
        yield Open(
            setting,
            f"{host}: whoever reaches any address of this machine can pass for an engine there",
        )


def _cors(view: SecurityView) -> Iterator[Open]:
    if "*" in view.settings.listen.cors.allowed_origins:
        yield Open(
            "listen.cors.allowed_origins",
            '"*": pages of all sites may use the proxy from a browser',
        )


def _core_dumps(view: SecurityView) -> Iterator[Open]:
    if view.settings.observe.core_dumps:
        yield Open("observe.core_dumps", "true: a crash writes keys and prompts into a file")


def _shared_caches(view: SecurityView) -> Iterator[Open]:
    if view.settings.tenants.caches == SHARED and _has_tenants(view):
        yield Open(
            "tenants.caches", "shared: who measures times can guess what other tenants have sent"
        )


def _unsalted_stores(view: SecurityView) -> Iterator[Open]:
    caches = view.settings.tenants.caches
    if not (caches == SEPARATE or (caches != SHARED and _has_tenants(view))):
        return
    for at, pool in enumerate(view.settings.pools):
        if pool.connector != registry.AUTO and registry.ignores_salt(pool.connector):
            why = (
                f"{pool.connector}: its stores of KV may not know tenants' salts, and give one "
                f"tenant's KV to another one"
            )
            yield Open(f"pools[{at}].connector", why)


def _has_tenants(view: SecurityView) -> bool:
    settings = view.settings
    return settings.auth.wants_keys or settings.overload.tenant_header is not None


RULES: tuple[SecurityRule, ...] = (
    SecurityRule(
        "no_keys",
        _no_keys,
        "give clients keys (auth.api_keys_file), or have TLS ask for certificates",
    ),
    SecurityRule(
        "no_tls",
        _no_tls,
        "set listen.tls.certificate; or listen where only a balancer that has TLS reaches the "
        "proxy",
    ),
    SecurityRule(
        "admin_without_keys",
        _admin_without_keys,
        "set auth.admin_keys_file, or use a Unix socket: unix:PATH",
    ),
    SecurityRule(
        "admin_without_tls",
        _admin_without_tls,
        "set listen.tls.certificate, which the admin API has, too",
    ),
    SecurityRule("operator_routes", _operator_routes, "set listen.operator_routes: admin"),
    SecurityRule("trusted_proxies_wide", _trusted_proxies, "name the balancers' own addresses"),
    SecurityRule("media_any", _media, "set media.urls: off, or hosts"),
    SecurityRule(
        "engine_networks_wide",
        _engine_networks,
        "name the networks that engines are in, and no others",
    ),
    SecurityRule("short_keys", _short_keys, "make keys by `openssl rand -hex 24`"),
    SecurityRule(
        "readable_files", _readable_files, "chmod 600, and give them to the user of the proxy"
    ),
    SecurityRule(
        "plain_engines",
        _plain_engines,
        "give engines TLS, and https:// URLs; or keep that network to them and the proxy",
    ),
    SecurityRule(
        "unverified_engines",
        _unverified,
        "set tls.ca to the authority of the engines' certificates",
    ),
    SecurityRule("sockets_everywhere", _wide_sockets, "bind the address of the engines' network"),
    SecurityRule("cors_any", _cors, "name the sites whose pages may use it"),
    SecurityRule("core_dumps", _core_dumps, "set observe.core_dumps: false"),
    SecurityRule("shared_caches", _shared_caches, "set tenants.caches: auto, or separate"),
    SecurityRule(
        "unsalted_stores",
        _unsalted_stores,
        "use a store that knows cache_salt (MooncakeStoreConnector, LMCacheMPConnector), or a "
        "pool for each tenant",
    ),
)
