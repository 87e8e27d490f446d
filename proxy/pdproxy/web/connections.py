"""Connections of clients: a limit on their number.

Owns that count. The limit keeps enough open files for the engines: otherwise clients that only
connect could take all of them, and no request could be served. At the limit, a new connection
replaces the oldest idle connection of the client that has the most.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from pdproxy.kit.errors import TooManyConnectionsError
from pdproxy.observe.events import Evicted, Observers
from pdproxy.serving.access.clients import Client, Evictable
from pdproxy.web.revocable import RevocableConnection

MAX_SEARCHED = 64
"""How many clients, and how many connections of one client, are searched for an idle connection: to
search all costs too much.
"""

MAX_LEAVING = 32
"""Evicted connections that may still send their answer, at a time. Others are dropped: they hold
open files.
"""


class CountedConnection(Evictable, RevocableConnection, Protocol):
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
        self._by_client: OrderedDict[Client, dict[CountedConnection, None]] = OrderedDict()
        self._leaving: set[CountedConnection] = set()
        """Connections that were evicted and are still open: each has an open file until it is
        closed.
        """

    def __repr__(self) -> str:
        return f"<Connections {self.open} of {self.max_open}>"

    def __iter__(self) -> Iterator[CountedConnection]:
        """Return all that are open."""
        counted = (connection for own in self._by_client.values() for connection in own)
        return iter([*counted, *self._leaving])

    def opened(self, client: Client, connection: CountedConnection) -> None:
        """Count a connection, until `closed` is called for it.

        Raises:
            TooManyConnectionsError: there are too many. The connection still counts until it is
                closed: it has to be answered.
        """
        self.open += 1
        own = self._by_client.get(client)
        if own is None:
            own = self._by_client[client] = {}
        own[connection] = None
        if self.open - len(self._leaving) > self.max_open and not self._evict_for(
            client, connection
        ):
            raise TooManyConnectionsError(
                f"{self.max_open} connections are open: no more are taken"
            )

    def closed(self, client: Client, connection: CountedConnection) -> None:
        """Count it no longer. A second call changes nothing."""
        if connection in self._leaving:
            self._leaving.discard(connection)
            self.open -= 1
        elif self._forget(client, connection):
            self.open -= 1

    def _forget(self, client: Client, connection: CountedConnection) -> bool:
        own = self._by_client.get(client)
        if own is None or connection not in own:
            return False
        del own[connection]
        if not own:
            del self._by_client[client]
        return True

    def _evict_for(self, client: Client, new: CountedConnection) -> bool:
        """Close an idle connection of the client with the most (`client` in case of a tie). Return
        whether one was closed.
        """
        searched = list(islice(self._by_client, MAX_SEARCHED))
        for other in searched:  # others are searched the next time
            self._by_client.move_to_end(other)
        largest = max(searched, key=self._count, default=client)
        if self._count(largest) <= self._count(client):
            largest = client
        own = self._by_client[largest]
        for connection in list(islice(own, MAX_SEARCHED)):
            if connection is not new and connection.idle:
                self._observers.notify(Evicted("connection"))
                self._forget(largest, connection)
                self._leaving.add(connection)
                if len(self._leaving) > MAX_LEAVING:
                    connection.drop()
                else:
                    connection.evict(
                        TooManyConnectionsError(
                            "others connect, and this client has the most connections"
                        )
                    )
                return True
            del own[connection]  # others are searched the next time
            own[connection] = None
        return False

    def _count(self, client: Client) -> int:
        return len(self._by_client[client])
