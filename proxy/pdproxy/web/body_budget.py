"""The memory for bodies of requests: a limit on their bytes, over all connections together.

Owns that number. A body counts from its first byte until no engine may need it any more.
`limits.max_inflight` can't bound it: a request counts there only once its body is complete.

If no space is left, a client that holds less than its share gets some from the client that holds
the most: of that client's incomplete bodies, the one that has waited longest for its next byte is
refused. A complete body is never dropped. An eighth of the space is reserved for clients that hold
less than their share, so that complete bodies can't take everything.
"""

from __future__ import annotations

from pdproxy.kit.errors import OverloadedError, RefusalReason
from pdproxy.observe.events import Evicted, Observers
from pdproxy.serving.access.clients import Client

RESERVED = 8
"""The space divided by this number is reserved for clients that hold less than their share."""


class BodyBudget:
    """At most `max_bytes` at once, of which `held` are held now."""

    def __init__(self, max_bytes: int, observers: Observers) -> None:
        self.resize(max_bytes)
        self._observers = observers
        self._holders: dict[Client, None] = {}
        self.held = 0

    def __repr__(self) -> str:
        return f"<BodyBudget {self.held} of {self._max_bytes} bytes>"

    def resize(self, max_bytes: int) -> None:
        """Change the limit. What is held stays."""
        self._max_bytes = max_bytes
        self._common = max_bytes - max_bytes // RESERVED

    def take(self, client: Client, size: int) -> None:
        """Take space for `size` more bytes.

        Raises:
            OverloadedError: there is none.
        """
        if not size:
            return  # an empty body holds nothing
        if self.held + size > self._common and not self._make_space(client, size):
            raise OverloadedError(
                f"Bodies of {self.held} bytes are held: no space for {size} more",
                RefusalReason.BODIES,
            )
        self.held += size
        if not client.bytes:
            self._holders[client] = None
        client.bytes += size

    def release(self, client: Client, size: int) -> None:
        """Release space."""
        self.held -= size
        client.bytes -= size
        if size and not client.bytes:
            self._holders.pop(client, None)

    def _make_space(self, client: Client, size: int) -> bool:
        """Refuse bodies of clients that hold more than their share, if needed; return whether there
        is space now.
        """
        # One more client than there are: one that is alone must leave space for the next.
        share = self._max_bytes // (len(self._holders) + 1)
        if client.bytes + size > share:
            return False
        while self.held + size > self._max_bytes:
            others = [other for other in self._holders if other.bodies and other is not client]
            largest = max(others, key=_bytes, default=client)
            if largest.bytes <= share:
                return False
            self._observers.notify(Evicted("body"))
            next(iter(largest.bodies)).evict(
                OverloadedError(
                    "The body came too slowly: others wait, and this client holds the most",
                    RefusalReason.BODIES,
                )
            )
        return True


def _bytes(client: Client) -> int:
    return client.bytes
