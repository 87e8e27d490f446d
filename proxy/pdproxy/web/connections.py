"""Connections of clients: how many there may be at once.

Owns that number. It leaves enough open files for the engines: without it, clients that only connect would take all of
them, and nobody could be served. Where it is reached, the oldest idle connection of the client with the most is closed for
the new one.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Protocol

from pdproxy.kit.errors import OverloadedError
from pdproxy.observe.events import Evicted, Observers
from pdproxy.serving.access.clients import Client, Evictable

MAX_SEARCHED = 64
"""Clients, and connections of one client, that are searched for an idle one: in a flood, a search of all would cost too much."""

MAX_LEAVING = 32
"""Evicted connections that may still send their answer, at a time. Others are dropped: their open files are needed."""


class Connection(Evictable, Protocol):
    """One connection."""

    def drop(self) -> None:
        """Close it at once."""

    @property
    def idle(self) -> bool:
        """Whether no engine works for it: it has no request, or one that is not complete."""


class Connections:
    """At most `max_open` connections at once, of which `open` are open now."""

    def __init__(self, max_open: int, observers: Observers) -> None:
        self.max_open = max_open
        self.open = 0
        self._observers = observers
        self._by_client: OrderedDict[Client, dict[Connection, None]] = OrderedDict()
        self._leaving: set[Connection] = set()
        """Those that were evicted and are still open: each has its open file until it is closed."""

    def __repr__(self) -> str:
        return f"<Connections {self.open} of {self.max_open}>"

    def opened(self, client: Client, connection: Connection) -> None:
        """Count a connection, until `closed`.

        Raises:
            OverloadedError: there are too many. The connection still counts until it is closed: it has to be answered.
        """
        self.open += 1
        own = self._by_client.get(client)
        if own is None:
            own = self._by_client[client] = {}
        own[connection] = None
        if self.open - len(self._leaving) > self.max_open and not self._evict_for(client, connection):
            raise OverloadedError(f"{self.max_open} connections are open: no more are taken")

    def closed(self, client: Client, connection: Connection) -> None:
        """Count it no longer. A second call changes nothing."""
        if connection in self._leaving:
            self._leaving.discard(connection)
            self.open -= 1
        elif self._forget(client, connection):
            self.open -= 1

    def _forget(self, client: Client, connection: Connection) -> bool:
        own = self._by_client.get(client)
        if own is None or connection not in own:
            return False
        del own[connection]
        if not own:
            del self._by_client[client]
        return True

    def _evict_for(self, client: Client, new: Connection) -> bool:
        """Close an idle connection of the client with the most (`client`, unless another has more); return whether one was."""
        searched = list(islice(self._by_client, MAX_SEARCHED))
        for other in searched:  # others are searched the next time
            self._by_client.move_to_end(other)
        most = max(searched, key=self._count, default=client)
        if self._count(most) <= self._count(client):
            most = client
        own = self._by_client[most]
        for connection in list(islice(own, MAX_SEARCHED)):
            if connection is not new and connection.idle:
                self._observers.notify(Evicted("connection"))
                self._forget(most, connection)
                self._leaving.add(connection)
                if len(self._leaving) > MAX_LEAVING:
                    connection.drop()
                else:
                    connection.evict(OverloadedError("others connect, and this client has the most connections"))
                return True
            del own[connection]  # others are searched the next time
            own[connection] = None
        return False

    def _count(self, client: Client) -> int:
        return len(self._by_client[client])
