"""What bounds every connection of a client, as `web.guard` needs to know it. Set once, from the settings."""

from __future__ import annotations

from dataclasses import dataclass

from pdproxy.serving.clients import Clients
from pdproxy.web.connections import Connections
from pdproxy.web.reading import Floor


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a client may take: seconds for a head and for a body, bytes of a head, speed of reading, connections."""

    head_timeout: float
    body_timeout: float
    max_header_bytes: int
    floor: Floor
    clients: Clients
    connections: Connections
