"""Places that are taken in the order in which their takers come, and the wait for one, which ends
in time.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque

from pdproxy.kit.clock import Clock


class PlacesInOrder(ABC):
    """Subclasses say how many places there are, and call `grant` when there may be more. `clock`:
    of the waits.
    """

    __slots__ = ("_clock", "_waiting", "running")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.running = 0
        """Places that are taken."""

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.running} of {self.limit} running, {self.waiting} "
            f"waiting>"
        )

    @property
    @abstractmethod
    def limit(self) -> int:
        """How many may be taken now."""

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return len(self._waiting)

    def take(self) -> bool:
        """Take a place if one is free and nobody waits for it; return whether it was taken. `leave`
        follows each success.
        """
        self.grant()
        if self._waiting or self.running >= self.limit:
            return False
        self.running += 1
        return True

    async def wait(self, seconds: float) -> bool:
        """Wait for a place; return whether there was one in time. `leave` follows each success."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            with self._clock.within(seconds):
                await turn
        except TimeoutError:
            return self._has(turn)
        except asyncio.CancelledError:
            if self._has(turn):
                self.leave()
            raise
        return True

    def _has(self, turn: asyncio.Future[None]) -> bool:
        """Return whether a place was granted at the moment at which the wait has ended otherwise;
        give up the turn if not.
        """
        if turn.done() and not turn.cancelled():
            return True
        turn.cancel()
        if turn in self._waiting:
            self._waiting.remove(turn)
        return False

    def leave(self) -> None:
        """Give a place back: it is the next one's."""
        self.running -= 1
        self.grant()

    def grant(self) -> None:
        """Give those that wait the places that are free."""
        limit = self.limit
        while self._waiting and self.running < limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self.running += 1
                turn.set_result(None)
