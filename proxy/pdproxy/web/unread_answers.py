"""Whole answers that clients have not read yet: how many bytes of them are kept.

Owns that number, apart from what engines' legs hold: an engine's stream must not fail since somebody does not read.
Where there is no room for more, the client that has the most unread loses its oldest answer.
"""

from __future__ import annotations

from typing import Protocol

from pdproxy.observe.events import Evicted, Observers
from pdproxy.serving.access.clients import Client


class Connection(Protocol):
    """The connection that an answer waits on."""

    def drop(self) -> None:
        """Close it at once."""


class Unread:
    """At most `most` bytes at once; `held` are."""

    def __init__(self, most: int, observers: Observers) -> None:
        self._most = most
        self._observers = observers
        self._by_client: dict[Client, dict[Connection, int]] = {}
        self.held = 0

    def __repr__(self) -> str:
        return f"<Unread {self.held} of {self._most} bytes>"

    def hold(self, client: Client, connection: Connection, size: int) -> None:
        """Count what is left of an answer, until `let_go`. What has no room is dropped, perhaps this one."""
        self._by_client.setdefault(client, {})[connection] = size
        self.held += size
        while self.held > self._most:
            most = max(self._by_client, key=self._bytes)
            oldest = next(iter(self._by_client[most]))
            self._observers.notify(Evicted("answer"))
            self.let_go(most, oldest)
            oldest.drop()

    def let_go(self, client: Client, connection: Connection) -> None:
        """Count it no longer: it was read, or its connection is lost. Again, this changes nothing."""
        own = self._by_client.get(client)
        if own is not None and connection in own:
            self.held -= own.pop(connection)
            if not own:
                del self._by_client[client]

    def _bytes(self, client: Client) -> int:
        return sum(self._by_client[client].values())
