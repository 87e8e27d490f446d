"""Wiring of engines' KV events: what finds their sources and reads them into an index."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pdproxy.app.process import Process
from pdproxy.app.sockets import AddressToBind, Sockets, kv_events_places
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.kv_events import Index
from pdproxy.fleet.kv_sources import KvEventSources
from pdproxy.settings.kv import EngineKvEvents
from pdproxy.settings.schema import Settings
from pdproxy.upstream.admin import EngineAdmin

logger = logging.getLogger("pdproxy.kv")


@dataclass(frozen=True, slots=True)
class ReadingKvEvents:
    """The sources of KV events, and where engines that connect themselves find the proxy: by
    port.
    """

    sources: KvEventSources
    places: Mapping[int, AddressToBind]
    sockets: Sockets

    def start(self) -> None:
        """Bind the sockets to which engines connect, if the settings name a host.

        Raises:
            SettingsError: one can't be bound.
        """
        for port, socket in self.sources.bound.items():
            self.sockets.bind(socket, self.places[port])
            logger.info("engines' KV events are expected on %s", socket.address)

    def stop(self) -> None:
        """Close all sockets."""
        self.sources.close()


def build_kv_events(
    settings: Settings,
    index: Index | None,
    of_engine: Callable[[str], EngineKvEvents],
    engines: EngineRegistry,
    admin: EngineAdmin,
    process: Process,
    sockets: Sockets | None,
) -> ReadingKvEvents | None:
    """Return what reads the events of a pool's engines into an index, None if this process does not
    read them.

    `index` None: nobody asks it. `of_engine`: an engine's own settings by its URL. `sockets`: how
    the pool's are bound, None: they are not. Call it before engines are added.
    """
    events = settings.pool.kv_events
    if index is None or not events.enabled or sockets is None:
        return None
    places = {place.port: place for place in kv_events_places(settings)}
    sources = KvEventSources(
        engines,
        index,
        events,
        of_engine,
        admin.kv_event_sources,
        process.observers,
        process.clock,
        process.tasks,
        ports=places,
        deadlines=settings.deadlines,
        networks=settings.engines.allowed,
    )
    process.observers.add(sources)
    return ReadingKvEvents(sources, places, sockets)
