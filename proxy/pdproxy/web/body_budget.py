"""Room for bodies: how many bytes of them, over all connections, there may be at once.

Owns that number, from a body's first byte until no engine may need it any more. `limits.max_inflight` can't bound it: a
request counts there only once its body is whole.

Where there is no room left, a client that holds less than its share gets some at the expense of the client that holds
the most: of the body that has waited longest for its next byte. A body in service is never given up; so that these
can't take everything, an eighth of all is kept for clients that hold less than their share.
"""

from __future__ import annotations

from pdproxy.kit.errors import OverloadedError
from pdproxy.observe.events import Evicted, Observers
from pdproxy.serving.access.clients import Client

KEPT = 8
"""One part in so many is kept for clients that hold less than their share."""


class BodyBudget:
    """At most `most` bytes at once; `held` are."""

    def __init__(self, most: int, observers: Observers) -> None:
        self._most = most
        self._common = most - most // KEPT
        self._observers = observers
        self._holders: dict[Client, None] = {}
        self.held = 0

    def __repr__(self) -> str:
        return f"<BodyBudget {self.held} of {self._most} bytes>"

    def take(self, client: Client, size: int) -> None:
        """Take room for so many bytes more.

        Raises:
            OverloadedError: there is none.
        """
        if not size:
            return  # an empty body makes nobody a holder
        if self.held + size > self._common and not self._has_room(client, size):
            raise OverloadedError(f"Bodies of {self.held} bytes are under way: no room for {size} more")
        self.held += size
        if not client.bytes:
            self._holders[client] = None
        client.bytes += size

    def give_back(self, client: Client, size: int) -> None:
        """Give room back."""
        self.held -= size
        client.bytes -= size
        if size and not client.bytes:
            self._holders.pop(client, None)

    def _has_room(self, client: Client, size: int) -> bool:
        # One more than there are: a client that is alone must leave room for the next.
        share = self._most // (len(self._holders) + 1)
        if client.bytes + size > share:
            return False
        while self.held + size > self._most:
            others = [other for other in self._holders if other.bodies and other is not client]
            most = max(others, key=_bytes, default=client)
            if most.bytes <= share:
                return False
            self._observers.notify(Evicted("body"))
            next(iter(most.bodies)).evict(
                OverloadedError("The body came too slowly: others wait, and this client holds the most")
            )
        return True


def _bytes(client: Client) -> int:
    return client.bytes
