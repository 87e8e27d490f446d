"""Whether the addresses in the settings are those of `engines.networks`.

Names that the proxy resolves are looked at when they resolve. Other engines resolve the names that KV handles have: where
networks are named, such a name is refused, unless it is that of the engine's own URL.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import urlsplit

from pdproxy.kit.engine_networks import EngineNetworks
from pdproxy.settings.errors import KeyPath, Mistakes, SettingsError, spell_key
from pdproxy.settings.schema import Node
from pdproxy.wire.kv_events import address_of


def check_networks(nodes: Iterable[Node], networks: EngineNetworks, path: KeyPath, found: Mistakes) -> None:
    """Check all addresses of engines. `path`: of their list."""
    for at, node in enumerate(nodes):
        for name, host, why in _refused(node, networks):
            key = (*path, at, *name)
            found.add(key, f"{spell_key(key)}: {host} is {why}{found.source(key)}")


def refuse_networks(nodes: Sequence[Node], networks: EngineNetworks) -> None:
    """Refuse engines that are added while the proxy runs.

    Raises:
        SettingsError: one of them is where no engine may be.
    """
    for node in nodes:
        for _, host, why in _refused(node, networks):
            raise SettingsError(f"{node.url} can't be added: {host} is {why}")


def _refused(node: Node, networks: EngineNetworks) -> Iterator[tuple[KeyPath, str, str]]:
    """Return the hosts that an engine's settings must not name, each with its setting and why."""
    own = urlsplit(node.url).hostname or ""
    for name, host in _of_proxy(node, own):
        if (why := networks.why_not(host)) is not None:
            yield name, host, why
    for name, host in _of_engines(node):
        why = networks.why_not(host) if host.lower() == own else networks.why_not_named(host)
        if why is not None:
            yield name, host, why


def _of_engines(node: Node) -> Iterator[tuple[KeyPath, str]]:
    """Return the hosts that other engines connect to."""
    facts = node.facts
    if facts.remote_host is not None:
        yield ("facts", "remote_host"), facts.remote_host
    if facts.bootstrap is not None and (host := urlsplit(facts.bootstrap).hostname):
        yield ("facts", "bootstrap"), host
    if node.receiver.host is not None:
        yield ("receiver", "host"), node.receiver.host


def _of_proxy(node: Node, own: str) -> Iterator[tuple[KeyPath, str]]:
    """Return the hosts that the proxy alone connects to. `own`: the host of the engine's URL."""
    yield ("url",), own
    for name in ("endpoint", "replay_endpoint"):
        endpoint: str | None = getattr(node.facts.kv_events, name)
        place = None if endpoint is None else address_of(endpoint, "")
        if place is not None and not place[2]:
            yield ("facts", "kv_events", name), place[0]
