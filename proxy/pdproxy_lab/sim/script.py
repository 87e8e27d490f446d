"""Scripts: answers that a test writes in place of the engine. Owns which script answers which
request.
"""

from __future__ import annotations

from collections import deque

from pdproxy_lab.sim.journal import Request
from pdproxy_lab.sim.reply import Script


class Scripts:
    """Scripts that wait for their request. Requests that release a handle (`max_tokens: 0`) use up
    none of `next`.
    """

    def __init__(self) -> None:
        self.next: deque[Script] = deque()
        """For the next generating requests, one each."""
        self.default: Script | None = None
        """For generating requests when `next` is empty; None: the engine answers."""
        self.on_release: Script | None = None
        """For requests that release a handle; None: the engine answers."""
        self.routes: dict[str, Script] = {}
        """By path, for every request of any method, before all others."""

    def take(self, request: Request) -> Script | None:
        """Return the script for a request; None: the engine answers."""
        if request.path in self.routes:
            return self.routes[request.path]
        if not request.generating:
            return None
        if request.release:
            return self.on_release
        return self.next.popleft() if self.next else self.default
