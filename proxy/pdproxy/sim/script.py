"""Answers that a test writes itself, in place of the engine's. Owns which script is whose turn."""

from __future__ import annotations

from collections import deque

from pdproxy.sim.journal import Request
from pdproxy.sim.reply import Script


class Scripts:
    """Scripts that wait for their request. Requests that give a handle back (`max_tokens: 0`) use none up."""

    def __init__(self) -> None:
        self.next: deque[Script] = deque()
        """For the next generating requests, one each."""
        self.default: Script | None = None
        """For generating requests when `next` is empty; None: the engine answers."""
        self.on_release: Script | None = None
        """For handles given back; None: the engine answers."""
        self.routes: dict[str, Script] = {}
        """By path, for every request of any method, ahead of all others."""

    def take(self, request: Request) -> Script | None:
        """Return the script for a request; None: the engine answers."""
        if request.path in self.routes:
            return self.routes[request.path]
        if not request.generating:
            return None
        if request.release:
            return self.on_release
        return self.next.popleft() if self.next else self.default
