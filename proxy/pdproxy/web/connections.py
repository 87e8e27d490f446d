"""Connections of clients: how many there may be at once.

Owns that number. It leaves enough open files for the engines: without it, clients that only connect would take all of
them, and nobody could be served. Where it is reached, the client with the most connections loses its oldest idle one to
the new one.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Protocol

from pdproxy.kit.errors import OverloadedError
from pdproxy.observe.events import Evicted, Observers
from pdproxy.serving.access.clients import Client, Holder

LOOKED_AT = 64
"""Clients, and connections of one client, that are looked at for an idle one: in a flood, a look at all of them would
cost too much."""


MOST_LEAVING = 32
"""Connections that had to go and are told why, at a time. Others are dropped: their open files are needed."""


class Connection(Holder, Protocol):
    """One connection."""

    def drop(self) -> None:
        """Close it at once."""

    @property
    def idle(self) -> bool:
        """Whether no engine is at work for it: it has no request, or one that is not whole."""


class Connections:
    """At most `most` connections at once."""

    def __init__(self, most: int, observers: Observers) -> None:
        self.most = most
        self.open = 0
        self._observers = observers
        self._by_client: OrderedDict[Client, dict[Connection, None]] = OrderedDict()
        self._leaving: set[Connection] = set()
        """Those that had to go, and are still open: each has its open file until it is closed."""

    def __repr__(self) -> str:
        return f"<Connections {self.open} of {self.most}>"

    def opened(self, client: Client, connection: Connection) -> None:
        """Count a connection, until `closed`.

        Raises:
            OverloadedError: there are too many. It counts all the same until it is closed: it has to be answered.
        """
        self.open += 1
        own = self._by_client.get(client)
        if own is None:
            own = self._by_client[client] = {}
        own[connection] = None
        if self.open - len(self._leaving) > self.most and not self._evicted(client, connection):
            raise OverloadedError(f"{self.most} connections are open: no more are taken")

    def closed(self, client: Client, connection: Connection) -> None:
        """Count it no more. Again, or after it was evicted, this changes nothing."""
        if connection in self._leaving:
            self._leaving.discard(connection)
            self.open -= 1
        elif self._forgot(client, connection):
            self.open -= 1

    def _forgot(self, client: Client, connection: Connection) -> bool:
        own = self._by_client.get(client)
        if own is None or connection not in own:
            return False
        del own[connection]
        if not own:
            del self._by_client[client]
        return True

    def _evicted(self, client: Client, new: Connection) -> bool:
        """Close an idle connection of the client with the most, unless that is another one with no more; tell whether
        it was done."""
        looked_at = list(islice(self._by_client, LOOKED_AT))
        for other in looked_at:  # others are looked at the next time
            self._by_client.move_to_end(other)
        most = max(looked_at, key=self._count, default=client)
        if self._count(most) <= self._count(client):
            most = client
        own = self._by_client[most]
        for connection in list(islice(own, LOOKED_AT)):
            if connection is not new and connection.idle:
                self._observers.notify(Evicted("connection"))
                self._forgot(most, connection)
                self._leaving.add(connection)
                if len(self._leaving) > MOST_LEAVING:
                    connection.drop()
                else:
                    connection.evict(OverloadedError("others connect, and this client has the most connections"))
                return True
            del own[connection]  # others are looked at the next time
            own[connection] = None
        return False

    def _count(self, client: Client) -> int:
        return len(self._by_client[client])
