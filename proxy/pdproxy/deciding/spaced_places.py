"""Places that come free while requests have been waiting for long: one after another, though many
requests end at once.

Requests that begin together are prefilled together, end together, and so begin together again: the
more, the longer all of them take, until all are late at once. So what has come free is granted at
most `FASTER` times as fast as requests end on average. Owns the places that are kept back for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from pdproxy.kit.fair_queue import TenantRequest

FASTER = 2.0
"""How many times as fast as requests end on average places are granted again at most."""
LEAST = 0.005
"""Seconds: a place is not kept back for less."""
Ticket = TypeVar("Ticket")


class SpacedPlaces(Generic[Ticket]):
    """`give_back(entry, cost)` releases a place. See `FairQueue.leave`. None is kept back for
    longer than `seconds / FASTER`.
    """

    def __init__(self, give_back: Callable[[TenantRequest[Ticket], float | None], None]) -> None:
        self._give_back = give_back
        self._next = 0.0
        """When the next place may be granted."""
        self.kept: dict[TenantRequest[Ticket], tuple[asyncio.TimerHandle, float | None]] = {}
        """What is kept back."""

    def __repr__(self) -> str:
        return f"<SpacedPlaces: {len(self.kept)} kept back>"

    def leave(
        self,
        now: float,
        entry: TenantRequest[Ticket],
        cost: float | None,
        seconds: float,
        taken: int,
    ) -> None:
        """Release a place, now or soon. `seconds`: for which places are taken on average; `taken`:
        how many are.
        """
        begin = max(now, self._next)
        self._next = begin + seconds / (FASTER * max(taken, 1))
        if begin - now < LEAST:
            self._give_back(entry, cost)
        else:
            timer = asyncio.get_running_loop().call_later(begin - now, self._due, entry)
            self.kept[entry] = timer, cost

    def release(self) -> None:
        """Give all of them back now: nobody waits any more."""
        kept, self.kept = self.kept, {}
        for entry, (timer, cost) in kept.items():
            timer.cancel()
            self._give_back(entry, cost)

    def _due(self, entry: TenantRequest[Ticket]) -> None:
        _, cost = self.kept.pop(entry)
        self._give_back(entry, cost)
