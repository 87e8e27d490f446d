"""Engines: `pools[].nodes[]` and the section `engines`, which says in which networks they may be.
Their checks.

Owns the normal spelling of an engine's URL: one engine has one, so that naming it twice is noticed
and metrics agree.

Names that the proxy resolves are looked at when they resolve. Other engines resolve the names that
KV handles have: where networks are named, such a name is refused, unless it is that of the engine's
own URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from pdproxy.kit.addresses import read_address, read_network
from pdproxy.kit.engine_networks import EngineNetworks
from pdproxy.settings.errors import MASK, KeyPath, Mistakes, SettingsError, quote, spell_key
from pdproxy.settings.kv import EngineKvEvents, ReceiverSettings
from pdproxy.settings.section import Count, File, Host, Key, Seconds, Section, Text
from pdproxy.settings.tls import EngineTls, refuse_stray_files
from pdproxy.wire.kv_events import address_of

Role = Literal["prefill", "decode", "aggregated", "any", "encode"]
NodeRole = Literal["prefill", "decode", "aggregated", "any", "encode", "by_label"]
BY_LABEL: NodeRole = "by_label"
"""In place of a role: a source says the role of each engine that it finds."""

PREFIX = re.compile(r"(/(?!\.{1,2}(/|\Z))[A-Za-z0-9._~-]+)+")
"""A path before routes: of segments without escapes, none of which is `.` or `..`."""
_HOST = re.compile(r"(?=.{1,254}\Z)[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?\.?")
_LABEL_LENGTHS = range(1, 64)
"""Characters between two dots of a name: the system's resolver takes no others."""
_PORTS = {"http": 80, "https": 443}
USER = re.compile(r"//[^/]*@")


class EngineSettings(Section, frozen=True):
    """What holds for all engines, wherever they are named: here, by a source, by the admin API."""

    networks: tuple[Text, ...] = ()
    """Networks in which engines may be, such as [10.1.0.0/16]: the proxy connects to no other
    address, whatever a name resolves to, and KV handles and registrations may name no other.
    facts.remote_host, facts.bootstrap and receiver.host must be addresses then, or the host of the
    engine's URL: other engines would resolve a name. []: all but link-local, multicast, reserved
    and unspecified addresses, and those at which clouds hand out credentials (169.254.169.254 and
    others).
    """

    @property
    def allowed(self) -> EngineNetworks:
        """These networks. Raises ValueError for a text that is none."""
        return EngineNetworks([read_network(text) for text in self.networks])


class Facts(Section, frozen=True):
    """What is known of an engine before it has been asked."""

    block_size: Count | None = None
    """Tokens per KV block. null: read from the engine."""

    tensor_parallel_size: Count | None = None
    """Number of GPUs that share its weights: the sizes of a pair must be what the connector allows,
    and a bootstrap server (mooncake) must name so many workers of each data-parallel rank. null:
    not known.
    """

    data_parallel_size: Count = 1
    """How many data-parallel ranks answer at its URL (--data-parallel-size). With several,
    connectors whose legs name the other engine choose the rank of each leg (X-data-parallel-rank);
    for all others the engine chooses.
    """

    max_num_seqs: Count | None = None
    """Requests that a decode engine runs at once (--max-num-seqs). Where it waits for pushed KV
    (nixl-push, mooncake) it should not queue: with this many requests it gets no more such prompts.
    These wait for no place: if no other pair is free, one engine serves them alone. null: no bound.
    How many engines are needed (docs/guide/scaling.md) is also counted by it.
    """

    kv_lease_duration: Seconds | None = None
    """Seconds for which a prefill engine keeps KV that no decode engine reads, as in its
    kv_connector_extra_config. No decode engine is asked with KV older than nine tenths of that: the
    prompt is prefilled again. null: as vLLM's own default, 30 s (nixl, nixl-push) or 480 s
    (mooncake).
    """

    engine_id: Text | None = None
    """The engine_id of its --kv-transfer-config. null: the engine makes a new one at each start."""

    remote_host: Host | None = None
    """The host at which decode engines reach a prefill engine's side channel, in place of the one
    that it names in its KV handles (nixl, nixl-push). With turns.bidirectional also the host at
    which prefill engines reach a decode engine's. null: as remote_host of the pool says.
    """
    registered_as: Text | None = None
    """host:port that it registers as its HTTP address (moriio, p2p-nccl). null: the host and port
    of its URL. vLLM registers the machine's IP address and the http_port of its
    --kv-transfer-config.
    """

    ec_address: Text | None = None
    """host:port at which an engine receives what encoder engines push (ec_connector
    mooncake): ec_ip and ec_port of its --ec-transfer-config.
    """

    profile: File | None = None
    """How long its work takes, in place of the pool's profile."""

    max_num_batched_tokens: Count | None = None
    """The most tokens of its steps, as it was started. null: as its profile says, or else 8192. For
    placements that predict times.
    """

    bootstrap: Text | None = None
    """A prefill engine's Mooncake bootstrap server, http://host:port, as the decode engines reach
    it, too. null: its own host, at the pool's bootstrap_port.
    """

    kv_events: EngineKvEvents = EngineKvEvents()
    """Where it publishes KV events. Each value overrides that of the pool's kv_events."""


class ConfiguredEngine(Section, frozen=True):
    """One engine: a vLLM server with its own HTTP port."""

    url: str
    """http://host:port or https://host:port without a path; each engine once. Also the engine's
    name in logs and metrics. Another scheme names a source of engines, which is followed while the
    proxy runs (docs/guide/operate.md).
    """

    role: NodeRole
    """prefill computes prompts, decode generates from them, aggregated does both. any (kv_role
    kv_both; not with every connector): each of these, for different requests at the same time.
    encode (ec_role ec_producer) encodes pictures, sounds and videos for engines of the roles
    prefill, aggregated and any (docs/guide/models.md). by_label: a label of each pod says its role
    (docs/guide/kubernetes.md).
    """

    serves_whole: bool = False
    """Whether a prefill engine may also serve requests whole."""

    sources: tuple[Text, ...] = ()
    """For a decode engine: URLs of the prefill engines whose KV it takes. []: all in the pool."""

    labels: dict[str, str] = {}  # noqa: RUF012 - a struct copies its defaults
    """Names with free text, such as {rack: r1}. pair_within names those that matter to pdproxy."""

    facts: Facts = Facts()
    """Known facts about the engine."""

    receiver: ReceiverSettings = ReceiverSettings()
    """Where it receives KV: only for decode engines of lmcache-pd. One port per tensor-parallel
    rank, in order.
    """

    api_key: Key | None = None
    """This engine's key. null: auth.engine_api_key."""

    api_key_file: File | None = None
    """The same from a file, read again when it changes."""

    tls: EngineTls = EngineTls()
    """Each value overrides that of the pool's tls; certificate and key go together. Only for
    https:// URLs.
    """

    @property
    def is_source(self) -> bool:
        """Whether it stands for engines that a source finds while the proxy runs
        (`settings.sources`).
        """
        return self.url.partition("://")[0] not in _PORTS

    @property
    def prefills(self) -> bool:
        """Whether it makes KV for other engines."""
        return self.role in ("prefill", "any")

    @property
    def encodes(self) -> bool:
        """Whether it encodes media for other engines."""
        return self.role == "encode"

    @property
    def decodes(self) -> bool:
        """Whether it uses other engines' KV."""
        return self.role in ("decode", "any")

    def __repr__(self) -> str:
        key = "set" if self.api_key or self.api_key_file else "not set"
        return f"Node({self.url}, {self.role}, <api_key {key}>)"


def check_allowed(engines: EngineSettings, found: Mistakes) -> EngineNetworks | None:
    """Return the networks in which engines may be, None if the setting is wrong."""
    try:
        return engines.allowed
    except ValueError:
        key = ("engines", "networks")
        text = f"expected networks or addresses, such as 10.0.0.0/8{found.source(key)}"
        found.add(key, f"{spell_key(key)}: {quote(', '.join(engines.networks))}: {text}")
        return None


def engine_url(url: str, path: KeyPath, where: str = "") -> str:
    """Return an engine's URL in its normal spelling: scheme, host and port, then the path it is
    behind, if there is one.

    `where`: the source of the URL.

    Raises:
        SettingsError: naming `path` and the URL; a password in it is not shown.
    """

    def wrong(why: str) -> SettingsError:
        return SettingsError(f"{spell_key(path)}: {quote(USER.sub('//***@', url))}: {why}{where}")

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
            # one engine has one spelling
            host = str(address) if address.version == 4 else f"[{address}]"
    except ValueError:
        raise wrong("no URL: expected http://host:port") from None
    if parts.scheme not in _PORTS or "://" not in url:
        raise wrong("expected http://host:port or https://host:port")
    if not (host.startswith("[") or (_HOST.fullmatch(host) and _has_labels(host))):
        raise wrong(
            "has no host name: expected http://host:port"
            if not host
            else "its host name can't exist"
        )
    prefix = parts.path.removesuffix("/")
    if (
        "?" in url
        or "#" in url
        or prefix.endswith("/v1")
        or not (prefix == "" or PREFIX.fullmatch(prefix))
    ):
        raise wrong(
            "an engine is a host and a port, and perhaps a path before its routes: nothing may "
            "follow, not even /v1"
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


def with_sources(
    node: ConfiguredEngine, nodes: Iterable[ConfiguredEngine], path: KeyPath, found: Mistakes
) -> ConfiguredEngine:
    """Return the node with its sources in their normal spelling. Each must be a prefill engine of
    the pool.
    """
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
                text = (
                    f"{spell_key(here)}: {url} is no prefill engine of this "
                    f"pool{found.source(here)}"
                )
                found.add(here, text)
    return msgspec.structs.replace(node, sources=tuple(sources)) if sources else node


def refuse_contradictions(
    node: ConfiguredEngine, path: KeyPath, found: Mistakes, scheme: str | None = None
) -> None:
    """Refuse settings of one engine that exclude each other. `path`: its own; `scheme`: of its URL,
    None: as it is there.
    """
    key, where = spell_key(path), found.source(path)
    if node.api_key == MASK:
        text = (
            f"{key}.api_key: {MASK} is what `pdproxy config print` shows in place of a key, not "
            f"a key{where}"
        )
        found.add(path, text)
    if node.api_key is not None and node.api_key_file is not None:
        found.add(path, f"{key}: api_key and api_key_file exclude each other: give one{where}")
    if node.serves_whole and node.role not in ("prefill", BY_LABEL):
        text = (
            "only a prefill engine has this setting, other roles say whether an engine serves "
            "requests whole"
        )
        found.add(
            (*path, "serves_whole"),
            f"{key}.serves_whole: {text}{found.source((*path, 'serves_whole'))}",
        )
    if node.tls != EngineTls() and (scheme or node.url.partition("://")[0]) == "http":
        url = quote(USER.sub("//***@", node.url))
        found.add(path, f"{key}.tls: {url} is without TLS: expected an https:// URL{where}")
    refuse_stray_files(node.tls, (*path, "tls"), ("key",), found)


def refuse_duplicates(nodes: Iterable[ConfiguredEngine], path: KeyPath, found: Mistakes) -> None:
    """Refuse engines that are named twice, by URLs in their normal spelling. `path`: of their
    pool.
    """
    first: dict[str, int] = {}
    for index, node in enumerate(nodes):
        # one port is either with TLS or without
        place = node.url if node.is_source else node.url.partition("://")[2]
        if place in first:
            both = " and ".join(spell_key((*path, "nodes", at)) for at in (first[place], index))
            where = found.source((*path, "nodes", index))
            text = (
                f"{both}: {node.url} is given twice: an engine has one role (flags add to the "
                f"file's nodes){where}"
            )
            found.add((*path, "nodes"), text)
        first.setdefault(place, index)


def refuse_useless(roles: set[str], path: KeyPath, found: Mistakes) -> None:
    """Refuse engines that can serve nothing together. `path`: of their list."""
    key = spell_key(path)
    if not roles:
        found.add(
            path,
            f"{key}: no engine is configured: give --prefill and --decode, or nodes in the YAML "
            f"file",
        )
    if roles == {"encode"}:
        found.add(path, f"{key}: encoder engines, but no engine that could use what they encode")
    if "prefill" in roles and roles.isdisjoint({"decode", "any", BY_LABEL}):
        found.add(
            path, f"{key}: prefill engines, but no decode engine that could take what they compute"
        )


def check_networks(
    nodes: Iterable[ConfiguredEngine], networks: EngineNetworks, path: KeyPath, found: Mistakes
) -> None:
    """Check all addresses of engines. `path`: of their list. What a source finds is looked at when
    it is added.
    """
    for at, node in enumerate(nodes):
        for name, host, why in () if node.is_source else _refused(node, networks):
            key = (*path, at, *name)
            found.add(key, f"{spell_key(key)}: {host} is {why}{found.source(key)}")


def refuse_networks(nodes: Sequence[ConfiguredEngine], networks: EngineNetworks) -> None:
    """Refuse engines that are added while the proxy runs.

    Raises:
        SettingsError: one of them is where no engine may be.
    """
    for node in nodes:
        for _, host, why in _refused(node, networks):
            raise SettingsError(f"{node.url} can't be added: {host} is {why}")


def _refused(
    node: ConfiguredEngine, networks: EngineNetworks
) -> Iterator[tuple[KeyPath, str, str]]:
    """Return the hosts that an engine's settings must not name, each with its setting and why."""
    own = urlsplit(node.url).hostname or ""
    for name, host in _of_proxy(node, own):
        if (why := networks.why_not(host)) is not None:
            yield name, host, why
    for name, host in _of_engines(node):
        why = networks.why_not(host) if host.lower() == own else networks.why_not_named(host)
        if why is not None:
            yield name, host, why


def _of_engines(node: ConfiguredEngine) -> Iterator[tuple[KeyPath, str]]:
    """Return the hosts that other engines connect to."""
    facts = node.facts
    if facts.remote_host is not None:
        yield ("facts", "remote_host"), facts.remote_host
    if facts.bootstrap is not None and (host := urlsplit(facts.bootstrap).hostname):
        yield ("facts", "bootstrap"), host
    if facts.ec_address is not None and (host := urlsplit(f"//{facts.ec_address}").hostname):
        yield ("facts", "ec_address"), host
    if node.receiver.host is not None:
        yield ("receiver", "host"), node.receiver.host


def _of_proxy(node: ConfiguredEngine, own: str) -> Iterator[tuple[KeyPath, str]]:
    """Return the hosts that the proxy alone connects to. `own`: the host of the engine's URL."""
    yield ("url",), own
    for name in ("endpoint", "replay_endpoint"):
        endpoint: str | None = getattr(node.facts.kv_events, name)
        place = None if endpoint is None else address_of(endpoint, "")
        if place is not None and not place[2]:
            yield ("facts", "kv_events", name), place[0]


class EngineFlag(NamedTuple):
    """An engine from the command line. A URL without a scheme gets `http://`."""

    role: NodeRole
    url: str


def with_scheme(url: str) -> str:
    """Return the URL, with `http://` added to a plain `host:port`."""
    return url if "://" in url else f"http://{url}"
