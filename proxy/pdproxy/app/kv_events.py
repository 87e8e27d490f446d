"""Wiring of engines' KV events: what finds their sources and reads them into an index."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from pdproxy.app.sockets import bind
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.kv_events import Index
from pdproxy.fleet.kv_sources import KvEventSources
from pdproxy.kit.clock import Clock
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import Observers
from pdproxy.observe.metrics import Metrics
from pdproxy.settings.kv_events import NodeKvEvents
from pdproxy.settings.schema import Settings
from pdproxy.upstream.admin import EngineAdmin

logger = logging.getLogger("pdproxy.kv")


@dataclass(frozen=True, slots=True)
class ReadingKvEvents:
    """The sources of KV events, and where engines that connect themselves find the proxy."""

    sources: KvEventSources
    host: str | None

    def start(self) -> None:
        """Bind the sockets to which engines connect, if the settings name a host.

        Raises:
            SettingsError: one can't be bound.
        """
        for port, socket in self.sources.bound.items():
            assert self.host is not None
            bind(socket, "pools[0].kv_events", self.host, port)
            logger.info("engines' KV events are expected on %s", socket.address)

    def stop(self) -> None:
        """Close all sockets."""
        self.sources.close()


def build_kv_events(
    settings: Settings,
    index: Index | None,
    of_node: Callable[[str], NodeKvEvents],
    engines: EngineRegistry,
    admin: EngineAdmin,
    observers: Observers,
    metrics: Metrics,
    clock: Clock,
    tasks: TaskOwner,
) -> ReadingKvEvents | None:
    """Return what reads the events of a pool's engines into an index, None if they are not read.

    `index` None: nobody asks it. `of_node`: an engine's own settings by its URL. Call it before engines are added.
    """
    own = settings.pool.kv_events
    if index is None or not own.enabled:
        return None
    most = max((node.facts.data_parallel_size for node in settings.pool.all_nodes), default=1)
    sources = KvEventSources(
        engines,
        index,
        own,
        of_node,
        admin.kv_event_sources,
        observers,
        clock,
        tasks,
        ports=range(own.port, own.port + most) if own.host is not None else range(0),
        deadline=settings.deadlines.kv_replay,
    )
    observers.add(sources)
    metrics.add_gauges(sources.gauges())
    return ReadingKvEvents(sources, own.host)
