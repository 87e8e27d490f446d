"""What was written to clients and they have not read yet: a limit on its bytes.

Owns that count: of all answers, whoever writes them. What the legs to engines hold is counted
separately (`upstream.answer_budget`): a client that does not read must not make an engine's stream
fail. If there is no space left, the client with the most unread bytes loses its oldest answer.
"""

from __future__ import annotations

from typing import Protocol

from pdproxy.observe.events import Evicted, Observers
from pdproxy.serving.access.clients import Client


class DroppableConnection(Protocol):
    """The connection that an answer waits on."""

    def drop(self) -> None:
        """Close it at once."""


class UnreadAnswers:
    """At most `max_bytes` at once, of which `held` are kept now."""

    def __init__(self, max_bytes: int, observers: Observers) -> None:
        self.max_bytes = max_bytes
        self._observers = observers
        self._by_client: dict[Client, dict[DroppableConnection, int]] = {}
        self.held = 0

    def __repr__(self) -> str:
        return f"<UnreadAnswers {self.held} of {self.max_bytes} bytes>"

    def hold(self, client: Client, connection: DroppableConnection, size: int) -> None:
        """Count what waits on a connection, `size` bytes in all, until `release`. What has no space
        is dropped, perhaps this.
        """
        own = self._by_client.setdefault(client, {})
        self.held += size - own.get(connection, 0)
        own[connection] = size
        while self.held > self.max_bytes:
            largest = max(self._by_client, key=self._bytes)
            oldest = next(iter(self._by_client[largest]))
            self._observers.notify(Evicted("answer"))
            self.release(largest, oldest)
            oldest.drop()

    def release(self, client: Client, connection: DroppableConnection) -> None:
        """Count it no longer: it was read, or its connection is lost. A second call changes
        nothing.
        """
        own = self._by_client.get(client)
        if own is not None and connection in own:
            self.held -= own.pop(connection)
            if not own:
                del self._by_client[client]

    def _bytes(self, client: Client) -> int:
        return sum(self._by_client[client].values())
