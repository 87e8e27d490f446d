"""Room for bodies: how many bytes of them, over all connections, there may be at once.

Owns that number, from a body's first byte to the end of its request. `limits.max_inflight` can't bound it: a request counts there
only once its body is whole.
"""

from __future__ import annotations

from pdproxy.kit.errors import OverloadedError


class BodyRoom:
    """At most `most` bytes at once; `held` are."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0

    def __repr__(self) -> str:
        return f"<BodyRoom {self.held} of {self._most} bytes>"

    def take(self, size: int) -> None:
        """Take room for so many bytes more; raise OverloadedError if there is none."""
        if self.held + size > self._most:
            raise OverloadedError(f"Bodies of {self._most} bytes are under way: no room for more")
        self.held += size

    def give_back(self, size: int) -> None:
        """Give room back."""
        self.held -= size
