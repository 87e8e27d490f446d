"""The tenants of a fair queue and their requests: who of one tenant's requests is next. Pure. See `kit.fair_queue`."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Hashable
from operator import attrgetter
from typing import Generic, TypeVar

import msgspec

Ticket = TypeVar("Ticket")
_order = attrgetter("order")


class Tenant(Generic[Ticket]):
    """What one tenant has. `received`: cost per weight, comparable with that of others that wait."""

    __slots__ = (
        "entries",
        "free_cost",
        "name",
        "places",
        "received",
        "turn",
        "waiting_cost",
        "weight",
    )

    def __init__(self, name: Hashable, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.received = 0.0
        self.free_cost = 0.0
        """The cost of its requests that got their places while nobody waited, and still have them."""
        self.places = 0
        self.waiting_cost = 0.0
        self.turn = 0
        """Among tenants that have received equally much, the one with the smallest is next."""
        self.entries: list[Entry[Ticket]] = []
        """Its requests that wait, the next one first."""

    @property
    def waiting(self) -> int:
        """How many of its requests wait."""
        return len(self.entries)

    @property
    def has(self) -> float:
        """What it has received, with all that counts only as long as it is held."""
        return self.received + self.free_cost / self.weight if self.free_cost else self.received

    def append(self, entry: Entry[Ticket]) -> None:
        """Let a request wait."""
        insort(self.entries, entry, key=_order)
        self.waiting_cost += entry.cost

    def remove(self, entry: Entry[Ticket]) -> None:
        """Remove a request that waits."""
        del self.entries[bisect_left(self.entries, entry.order, key=_order)]
        self.waiting_cost = self.waiting_cost - entry.cost if self.entries else 0.0

    def cost_before(self, priority: int, until: float) -> float:
        """Return the cost of its requests that go before a new one."""
        count = len(self.entries)
        before = bisect_left(self.entries, (priority, until, math.inf), key=_order)
        return self.waiting_cost if before == count else self.waiting_cost * before / count


class Entry(msgspec.Struct, Generic[Ticket], eq=False):
    """One request: it waits, has a place, or neither any more. `ticket` is the caller's.

    `cost`: what its tenant is charged. `size`: what it takes of `max_size` while it has a place. `order`: its priority, until
    when it would wait, and a growing number.
    """

    tenant: Tenant[Ticket]
    ticket: Ticket
    cost: float
    size: int
    order: tuple[int, float, int] = (0, math.inf, 0)
    waits: bool = False
    has_place: bool = False
    charged: bool = False
