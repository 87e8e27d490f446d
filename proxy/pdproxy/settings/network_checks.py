"""Whether the addresses in the settings are those of `engines.networks`. Names are looked at when they resolve."""

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
        for name, host in _hosts(node):
            if (why := networks.why_not(host)) is not None:
                key = (*path, at, *name)
                found.add(key, f"{spell_key(key)}: {host} is {why}{found.source(key)}")


def refuse_networks(nodes: Sequence[Node], networks: EngineNetworks) -> None:
    """Refuse engines that are added while the proxy runs.

    Raises:
        SettingsError: one of them is where no engine may be.
    """
    for node in nodes:
        for _, host in _hosts(node):
            if (why := networks.why_not(host)) is not None:
                raise SettingsError(f"{node.url} can't be added: {host} is {why}")


def _hosts(node: Node) -> Iterator[tuple[KeyPath, str]]:
    """Return the hosts that an engine's settings name, each with its setting."""
    facts = node.facts
    yield ("url",), urlsplit(node.url).hostname or ""
    if facts.remote_host is not None:
        yield ("facts", "remote_host"), facts.remote_host
    if facts.bootstrap is not None:
        yield ("facts", "bootstrap"), urlsplit(facts.bootstrap).hostname or ""
    if node.receiver.host is not None:
        yield ("receiver", "host"), node.receiver.host
    for name in ("endpoint", "replay_endpoint"):
        endpoint: str | None = getattr(facts.kv_events, name)
        place = None if endpoint is None else address_of(endpoint, "")
        if place is not None and not place[2]:
            yield ("facts", "kv_events", name), place[0]
