"""The section `pools[].kv_events`: how the KV events of a pool's engines are read, and its checks.

Owns names, units, bounds and defaults. Names are those of vLLM's `--kv-events-config`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

from pdproxy.settings.errors import KeyPath, Mistakes, quote, spell_key
from pdproxy.settings.section import Host, Port, Section, Text
from pdproxy.wire.kv_events import address_of

Topic = Annotated[str, Meta(max_length=1024)]


class KvEvents(Section, frozen=True):
    """Engines' reports of the blocks that they have cached (their `--kv-events-config`), over ZMQ."""

    enabled: bool = False
    """Whether they are read, where a policy or placement asks for it. Engines that publish none lose nothing by it; /ready names
    them."""

    endpoint: Text | None = None
    """Where an engine publishes, tcp://host:port, as in its own configuration: with * as the host, at the host of its URL.
    Further data-parallel ranks take the ports after it. null: as the engine answers to GET /kv_event_sources."""

    replay_endpoint: Text | None = None
    """Where it can be asked for lost messages, in the same way. null: as the engine answers, or nowhere if endpoint is given."""

    topic: Topic | None = None
    """The topic under which it publishes. null: as the engine answers, or the empty one if endpoint is given."""

    host: Host | None = None
    """Address to bind for engines that connect: those whose endpoint names a host, and one of these ports. Each needs its own
    topic. Anybody who reaches it can publish. null: nothing is bound, and the proxy connects to all endpoints."""

    port: Port = 5557
    """TCP port to bind. Further data-parallel ranks take the ports after it."""


class NodeKvEvents(Section, frozen=True):
    """One engine's KV events. What is set here overrides the pool's settings."""

    endpoint: Text | None = None
    """As the pool's."""

    replay_endpoint: Text | None = None
    """As the pool's."""

    topic: Topic | None = None
    """As the pool's."""


def check_kv_events(
    own: KvEvents, nodes: Iterable[tuple[NodeKvEvents, int, KeyPath]], path: KeyPath, found: Mistakes
) -> None:
    """Check the endpoints of a pool. `nodes`: each one's section, its number of ranks, and the key of the section."""
    of_nodes = list(nodes)
    most = max((ranks for _, ranks, _ in of_nodes), default=1)
    for section, ranks, here in [(own, most, path), *of_nodes]:
        for name in ("endpoint", "replay_endpoint"):
            text = getattr(section, name)
            if text is None:
                continue
            key = (*here, name)
            place, named, where = address_of(text, ""), f"{spell_key(key)}: {quote(text)}", found.source(key)
            if place is None:
                found.add(key, f"{named}: expected tcp://host:port, or tcp://*:port{where}")
            elif place[1] + ranks > 1 << 16:
                found.add(key, f"{named} leaves no port for each of {ranks} ranks{where}")
    if own.host is not None and own.port + most > 1 << 16:
        key = (*path, "port")
        found.add(key, f"{spell_key(key)} = {own.port} leaves no port for each of {most} ranks{found.source(key)}")
