"""Places, and a queue for them that is fair between tenants, by their weights and the costs of their requests. Pure.

Owns the places, the requests that wait, and what each tenant has received. While requests wait, a place that comes free goes to
the tenant that has received the least cost per weight (start-time fair queueing), there to the request with the smallest
priority, and among those to the oldest. What was granted while nobody waited took nothing from others: it counts only as long as
the place is held. Nor is there credit for idle times: a tenant that begins to wait has received at least as much as the one that
is next. If the queue is full, a tenant with less in it displaces the newest and least urgent request of the tenant with the most,
by weight.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from typing import Generic, TypeVar

MAX_RESTING = 4096
"""Tenants without any request of which it is remembered that they have received more than others. The oldest are forgotten."""

MOST_LOOKED_AT = 64
"""Tenants by which the work ahead of a request is estimated."""

Ticket = TypeVar("Ticket")


class QueueFullError(Exception):
    """Too many requests wait, and no other tenant has more of them by its weight."""


class Tenant(Generic[Ticket]):
    """What one tenant has. `received`: cost per weight, comparable with that of others that wait."""

    __slots__ = (
        "by_priority",
        "free_cost",
        "name",
        "places",
        "priorities",
        "received",
        "turn",
        "waiting",
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
        self.waiting = 0
        self.waiting_cost = 0.0
        self.turn = 0
        """Among tenants that have received equally much, the one with the smallest is next."""
        self.by_priority: dict[int, OrderedDict[Entry[Ticket], None]] = {}
        self.priorities: list[int] = []

    @property
    def has(self) -> float:
        """What it has received, with all that counts only as long as it is held."""
        return self.received + self.free_cost / self.weight if self.free_cost else self.received

    def first(self) -> Entry[Ticket]:
        """Return the request that is served next of those that wait."""
        return next(iter(self.by_priority[self.priorities[0]]))

    def last(self) -> Entry[Ticket]:
        """Return the request that is served last of those that wait."""
        return next(reversed(self.by_priority[self.priorities[-1]]))

    def append(self, entry: Entry[Ticket]) -> None:
        """Let a request wait."""
        if entry.priority not in self.by_priority:
            self.by_priority[entry.priority] = OrderedDict()
            insort(self.priorities, entry.priority)
        self.by_priority[entry.priority][entry] = None
        self.waiting += 1
        self.waiting_cost += entry.cost

    def remove(self, entry: Entry[Ticket]) -> None:
        """Remove a request that waits."""
        same = self.by_priority[entry.priority]
        del same[entry]
        if not same:
            del self.by_priority[entry.priority]
            self.priorities.remove(entry.priority)
        self.waiting -= 1
        self.waiting_cost = self.waiting_cost - entry.cost if self.waiting else 0.0


class Entry(Generic[Ticket]):
    """One request: it waits, has a place, or neither any more. `ticket` is the caller's.

    `cost`: what its tenant is charged. `size`: what it takes of `max_size` while it has a place.
    """

    __slots__ = ("charged", "cost", "has_place", "priority", "size", "tenant", "ticket", "waits")

    def __init__(self, tenant: Tenant[Ticket], ticket: Ticket, cost: float, size: int, priority: int) -> None:
        self.tenant = tenant
        self.ticket = ticket
        self.cost = cost
        self.size = size
        self.priority = priority
        self.waits = self.has_place = self.charged = False


class FairQueue(Generic[Ticket]):
    """At most `places` are taken at once, with at most `max_size` in all (0: no bound), and `max_waiting` requests wait.

    A request that alone is larger than `max_size` gets a place once no other is taken.

    `granted` is called with the ticket of a request that waited and has a place now; it returns whether that is still wanted,
    and otherwise the place goes to the next. `displaced` is called with the ticket of a request that waits no longer. Neither
    may call this object.
    """

    def __init__(
        self,
        places: int,
        max_waiting: int,
        max_size: int,
        granted: Callable[[Ticket], bool],
        displaced: Callable[[Ticket], None],
    ) -> None:
        self._places = places
        self._max_waiting = max_waiting
        self._max_size = max_size
        self._granted = granted
        self._displaced = displaced
        self._tenants: dict[Hashable, Tenant[Ticket]] = {}
        self._resting: OrderedDict[Hashable, None] = OrderedDict()
        """Those of them without places and waiting requests."""
        self._queued: dict[Hashable, Tenant[Ticket]] = {}
        """Those of them with waiting requests."""
        self._order: list[tuple[float, int, Tenant[Ticket]]] = []
        """A heap of (has, turn, tenant) of `_queued`. An item whose numbers are not the tenant's any more is dead."""
        self._turns = 0
        self._served = 0.0
        """The most that a tenant had received before it was served, while others waited."""
        self._active_weight = 0.0
        self.taken = 0
        """Places that are taken."""
        self.size = 0
        """The size of the requests that have them."""
        self.waiting = 0
        """Requests that wait."""

    def __repr__(self) -> str:
        return f"<FairQueue {self.taken} of {self._places} taken, {self.waiting} waiting, {len(self._tenants)} tenants>"

    @property
    def places(self) -> int:
        """How many may be taken at once."""
        return self._places

    def resize(self, places: int) -> None:
        """Change the number of places. Fewer take nothing from requests that have one."""
        self._places = places
        self.fill()

    def take(
        self, name: Hashable, weight: float, ticket: Ticket, cost: float, size: int, priority: int = 0
    ) -> Entry[Ticket] | None:
        """Take a place if one is free and nobody waits; None if not. Each success is matched by one `leave`."""
        if self.taken >= self._places or self.waiting or not self._fits(size):
            return None
        entry = Entry(self._tenant(name, weight), ticket, cost, size, priority)
        self._give_place(entry)
        entry.tenant.free_cost += cost
        return entry

    def queue_up(
        self, name: Hashable, weight: float, ticket: Ticket, cost: float, size: int, priority: int = 0
    ) -> Entry[Ticket]:
        """Let a request wait, after `take` has failed. It is matched by `stop_waiting`, or by `leave` once it has a place.

        Raises:
            QueueFullError: too many requests wait, and no other tenant has more of them.
        """
        tenant, loser = self._tenant(name, weight), None
        if self.waiting >= self._max_waiting:
            loser = self._displace(tenant, priority)
            if loser is None:
                self._rest(tenant)
                raise QueueFullError
        entry = Entry(tenant, ticket, cost, size, priority)
        if not tenant.waiting:
            following = self._following()
            tenant.received = max(tenant.received, self._served if following is None else following.received)
            self._queued[name] = tenant
            self._next_turn(tenant)
        tenant.append(entry)
        entry.waits = True
        self.waiting += 1
        if loser is not None:
            self._rest(loser)
        return entry

    def stop_waiting(self, entry: Entry[Ticket]) -> None:
        """Remove a request that waits. For another one this changes nothing."""
        if entry.waits:
            self._remove(entry)
            self._rest(entry.tenant)
            self.fill()  # it may have been the large one that the others waited for

    def leave(self, entry: Entry[Ticket], cost: float | None = None) -> None:
        """Release a place: it is granted to a request that waits, if there is one. `cost`: what it was in the end, if known."""
        tenant = entry.tenant
        entry.has_place = False
        self.taken -= 1
        self.size -= entry.size
        tenant.places -= 1
        if not entry.charged:
            tenant.free_cost = tenant.free_cost - entry.cost if tenant.places else 0.0
        elif cost is not None:
            tenant.received += (cost - entry.cost) / tenant.weight
        if tenant.waiting:
            self._push(tenant)
        self._rest(tenant)
        self.fill()

    def tickets(self) -> Iterator[Ticket]:
        """Yield the tickets of all requests that wait."""
        for tenant in self._queued.values():
            for same in tenant.by_priority.values():
                for entry in same:
                    yield entry.ticket

    def over_share(self, name: Hashable) -> bool:
        """Return whether a tenant has more than its part of all places, by weight, while others wait for one."""
        tenant = self._tenants.get(name)
        if tenant is None or len(self._queued) - (name in self._queued) <= 0:
            return False
        return tenant.places * self._active_weight > self._places * tenant.weight

    def cost_ahead(self, name: Hashable, weight: float) -> float:
        """Return the cost of the waiting requests that are served before a new one of a tenant, as far as they are known now.

        Of very many tenants only some are looked at, and the others taken to be like them.
        """
        tenant = self._tenants.get(name)
        own = 0.0 if tenant is None else tenant.waiting_cost
        received = 0.0 if tenant is None else tenant.has
        if not own and (following := self._following()) is not None:
            received = max(received, following.received)
        begins = received + own / weight
        others = len(self._queued) - (name in self._queued)
        if not others:
            return own
        ahead, seen = 0.0, 0
        for other in islice(self._queued.values(), MOST_LOOKED_AT):
            if other is not tenant:
                seen += 1
                lead = begins - other.has
                if lead >= 0:  # also with as much as this one: it has waited longer
                    ahead += min(other.waiting_cost, max(lead * other.weight, other.waiting_cost / other.waiting))
        return own + ahead * others / seen

    # -- tenants

    def _tenant(self, name: Hashable, weight: float) -> Tenant[Ticket]:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, weight)
            self._active_weight += weight
            return tenant
        if not tenant.places and not tenant.waiting:
            del self._resting[name]
            self._active_weight += weight
            tenant.weight = weight
        elif tenant.weight != weight:
            self._active_weight += weight - tenant.weight
            tenant.weight = weight
            if tenant.waiting:
                self._push(tenant)
        return tenant

    def _rest(self, tenant: Tenant[Ticket]) -> None:
        """Forget a tenant without requests, unless it has received more than others; forget all if nobody has one."""
        if tenant.places or tenant.waiting:
            return
        self._active_weight -= tenant.weight
        if not self.taken and not self.waiting:
            self._tenants.clear()
            self._resting.clear()
            self._order.clear()
            self._served = self._active_weight = 0.0
        elif tenant.received <= self._served:
            del self._tenants[tenant.name]
        else:
            self._resting[tenant.name] = None
            if len(self._resting) > MAX_RESTING:
                oldest, _ = self._resting.popitem(last=False)
                del self._tenants[oldest]

    def _next_turn(self, tenant: Tenant[Ticket]) -> None:
        """Put a tenant behind those that have received as much."""
        self._turns += 1
        tenant.turn = self._turns
        self._push(tenant)

    def _push(self, tenant: Tenant[Ticket]) -> None:
        heapq.heappush(self._order, (tenant.has, tenant.turn, tenant))
        if len(self._order) > 2 * len(self._queued) + 64:
            self._order = [(one.has, one.turn, one) for one in self._queued.values()]
            heapq.heapify(self._order)

    def _following(self) -> Tenant[Ticket] | None:
        """Return the tenant that is served next of those that wait, None if nobody waits."""
        while self._order:
            has, turn, tenant = self._order[0]
            if tenant.waiting and (has, turn) == (tenant.has, tenant.turn):
                return tenant
            heapq.heappop(self._order)
        return None

    # -- places

    def _fits(self, size: int) -> bool:
        return not self._max_size or not self.taken or self.size + size <= self._max_size

    def _give_place(self, entry: Entry[Ticket]) -> None:
        entry.has_place = True
        entry.tenant.places += 1
        self.taken += 1
        self.size += entry.size

    def _remove(self, entry: Entry[Ticket]) -> None:
        tenant = entry.tenant
        tenant.remove(entry)
        entry.waits = False
        self.waiting -= 1
        if not tenant.waiting:
            del self._queued[tenant.name]

    def fill(self) -> None:
        """Grant free places to requests that wait."""
        while self.taken < self._places and (tenant := self._following()) is not None:
            entry = tenant.first()
            if not self._fits(entry.size):
                return  # nobody overtakes it: it would wait as long as smaller ones come
            heapq.heappop(self._order)
            self._remove(entry)
            if self._granted(entry.ticket):
                self._served = max(self._served, tenant.received)
                tenant.received += entry.cost / tenant.weight
                entry.charged = True
                self._give_place(entry)
                if tenant.waiting:
                    self._next_turn(tenant)
            elif tenant.waiting:
                self._push(tenant)
            self._rest(tenant)

    def _displace(self, newcomer: Tenant[Ticket], priority: int) -> Tenant[Ticket] | None:
        """Make room in the queue for a request of a tenant. Return the tenant that has lost one, None if none may."""
        largest = max(self._queued.values(), key=_share, default=None)
        if largest is None:
            return None
        if largest is newcomer or _share(largest) <= (newcomer.waiting + 1) / newcomer.weight:
            # It has no less than the others. But a request of its own may be more urgent than another one.
            if not newcomer.waiting or newcomer.last().priority <= priority:
                return None
            largest = newcomer
        entry = largest.last()
        self._remove(entry)
        self._displaced(entry.ticket)
        return largest


def _share(tenant: Tenant[Ticket]) -> float:
    return tenant.waiting / tenant.weight
