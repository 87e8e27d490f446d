"""Places, and a queue for them that is fair between tenants, by their weights and the costs of
their requests. Pure.

Owns the places, the requests that wait, and what each tenant has received. While requests wait, a
place that comes free goes to the tenant that has received the least cost per weight (start-time
fair queueing), there to the request with the smallest priority, among those to the one that would
wait for the shortest time, and then to the oldest.

What was granted while nobody waited took nothing from others: it counts only as long as the place
is held. But after a request has waited, as many grants as there are places count in any case: where
requests wait only at times, whoever comes at others must not get more for that. A tenant without
requests earns no credit: once it waits, it has received as much as the one that is next. One that
has places is owed what it did not get, up to all places once.

If the queue is full, a tenant with less in it displaces the least urgent request of the tenant with
the most, by weight.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from operator import attrgetter
from typing import Generic, TypeVar

import msgspec

Ticket = TypeVar("Ticket")
_order = attrgetter("order")


class Tenant(Generic[Ticket]):
    """What one tenant has. `received`: cost per weight, comparable with that of others that
    wait.
    """

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
        """The cost of its requests that got their places while nobody waited, and still have
        them.
        """
        self.places = 0
        self.waiting_cost = 0.0
        self.turn = 0
        """Among tenants that have received equally much, the one with the smallest is next."""
        self.entries: list[TenantRequest[Ticket]] = []
        """Its requests that wait, the next one first."""

    @property
    def waiting(self) -> int:
        """How many of its requests wait."""
        return len(self.entries)

    @property
    def has(self) -> float:
        """What it has received, with all that counts only as long as it is held."""
        return self.received + self.free_cost / self.weight if self.free_cost else self.received

    def append(self, entry: TenantRequest[Ticket]) -> None:
        """Let a request wait."""
        insort(self.entries, entry, key=_order)
        self.waiting_cost += entry.cost

    def remove(self, entry: TenantRequest[Ticket]) -> None:
        """Remove a request that waits."""
        del self.entries[bisect_left(self.entries, entry.order, key=_order)]
        self.waiting_cost = self.waiting_cost - entry.cost if self.entries else 0.0

    def cost_before(self, priority: int, until: float) -> float:
        """Return the cost of its requests that go before a new one."""
        count = len(self.entries)
        before = bisect_left(self.entries, (priority, until, math.inf), key=_order)
        return self.waiting_cost if before == count else self.waiting_cost * before / count


class TenantRequest(msgspec.Struct, Generic[Ticket], eq=False):
    """One request: it waits, has a place, or neither any more. `ticket` is the caller's.

    `cost`: what its tenant is charged. `size`: what it takes of `max_size` while it has a place.
    `order`: its priority, until when it would wait, and a growing number.
    """

    tenant: Tenant[Ticket]
    ticket: Ticket
    cost: float
    size: int
    order: tuple[int, float, int] = (0, math.inf, 0)
    waits: bool = False
    has_place: bool = False
    charged: bool = False


MAX_RESTING = 4096
"""Tenants without any request of which it is remembered that they have received more than others.
The oldest are forgotten.
"""

MOST_LOOKED_AT = 64
"""Tenants by which the work ahead of a request is estimated."""


class QueueFullError(Exception):
    """Too many requests wait, and no other tenant has more of them by its weight."""


class FairQueue(Generic[Ticket]):
    """At most `places` are taken at once, with at most `max_size` in all (0: no bound), and
    `max_waiting` requests wait.

    A request that alone is larger than `max_size` gets a place once no other is taken.

    `granted` is called with the ticket of a request that waited and has a place now; it returns
    whether that is still wanted, and otherwise the place goes to the next. `displaced` is called
    with the ticket of a request that waits no longer. Neither may call this object.
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
        self.max_waiting = max_waiting
        """How many may wait. Fewer take nothing from requests that do."""
        self._max_size = max_size
        self._granted = granted
        self._displaced = displaced
        self._tenants: dict[Hashable, Tenant[Ticket]] = {}
        self._resting: OrderedDict[Hashable, None] = OrderedDict()
        """Those of them without places and waiting requests."""
        self._queued: dict[Hashable, Tenant[Ticket]] = {}
        """Those of them with waiting requests."""
        self._order: list[tuple[float, int, Tenant[Ticket]]] = []
        """A heap of (has, turn, tenant) of `_queued`. An item whose numbers are not the tenant's
        any more is dead.
        """
        self._turns = self._count = 0
        self._served = 0.0
        """The most that a tenant had received before it was served, while others waited."""
        self._active_weight = 0.0
        self._contended = 0
        """How many more places are charged though nobody waits: as many as there are, since the
        last request that waited.
        """
        self.taken = 0
        """Places that are taken."""
        self.size = 0
        """The size of the requests that have them."""
        self.waiting = 0
        """Requests that wait."""

    def __repr__(self) -> str:
        return f"<FairQueue {self.taken} of {self._places} taken, {self.waiting} waiting>"

    @property
    def places(self) -> int:
        """How many may be taken at once."""
        return self._places

    @property
    def max_size(self) -> int:
        """How much they may hold together, 0 if there is no bound."""
        return self._max_size

    def resize(self, places: int, max_size: int) -> None:
        """Change the number of places, and how much they hold. Less of either takes nothing from
        requests that have one.
        """
        self._places, self._max_size = places, max_size
        self.fill()

    def take(
        self, name: Hashable, weight: float, ticket: Ticket, cost: float, size: int
    ) -> TenantRequest[Ticket] | None:
        """Take a place if one is free and nobody waits; None if not. Each success is matched by one
        `leave`.
        """
        if self.taken >= self._places or self.waiting or not self._fits(size):
            return None
        tenant = self._tenant(name, weight)
        entry = TenantRequest(tenant, ticket, cost, size)
        if self._contended:
            self._contended -= 1
            self._lift(tenant, self._served, cost)
            self._charge(entry)
        else:
            tenant.free_cost += cost
        self._give_place(entry)
        return entry

    def restore(
        self, name: Hashable, weight: float, ticket: Ticket, cost: float, size: int
    ) -> TenantRequest[Ticket]:
        """Take a place that a request has already, whatever the bounds are. It is matched by one
        `leave`.
        """
        tenant = self._tenant(name, weight)
        entry = TenantRequest(tenant, ticket, cost, size)
        tenant.free_cost += cost
        self._give_place(entry)
        return entry

    def queue_up(
        self,
        name: Hashable,
        weight: float,
        ticket: Ticket,
        cost: float,
        size: int,
        priority: int = 0,
        until: float = math.inf,
    ) -> TenantRequest[Ticket]:
        """Let a request wait, after `take` has failed. It is matched by `stop_waiting`, or by
        `leave` once it has a place.

        `until`: the time at which the caller will call `stop_waiting`.

        Raises:
            QueueFullError: too many requests wait, and no other tenant has more of them.
        """
        tenant, loser = self._tenant(name, weight), None
        if self.waiting >= self.max_waiting:
            loser = self._displace(tenant, priority)
            if loser is None:
                self._rest(tenant)
                raise QueueFullError
        self._count += 1
        entry = TenantRequest(tenant, ticket, cost, size)
        entry.order = (priority, until, self._count)
        if not tenant.waiting:
            following = self._following()
            self._lift(tenant, self._served if following is None else following.received, cost)
            self._queued[name] = tenant
            self._next_turn(tenant)
        tenant.append(entry)
        entry.waits = True
        self.waiting += 1
        self._contended = self._places
        if loser is not None:
            self._rest(loser)
        return entry

    def stop_waiting(self, entry: TenantRequest[Ticket]) -> None:
        """Remove a request that waits. For another one this changes nothing."""
        if entry.waits:
            self._remove(entry)
            self._rest(entry.tenant)
            self.fill()  # it may have been the large one that the others waited for

    def leave(self, entry: TenantRequest[Ticket], cost: float | None = None) -> None:
        """Release a place: it is granted to a request that waits, if there is one. `cost`: what it
        was in the end, if known.
        """
        tenant = entry.tenant
        entry.has_place = False
        self.taken -= 1
        self.size -= entry.size
        tenant.places -= 1
        if not entry.charged:
            tenant.free_cost = tenant.free_cost - entry.cost if tenant.places else 0.0
        elif cost is not None:
            tenant.received += (cost - entry.cost) / tenant.weight
        if tenant.entries:
            self._push(tenant)
        elif not tenant.places:
            self._rest(tenant)
        if self._order:
            self.fill()

    def tickets(self) -> Iterator[Ticket]:
        """Yield the tickets of all requests that wait."""
        for tenant in self._queued.values():
            for entry in tenant.entries:
                yield entry.ticket

    def over_share(self, name: Hashable) -> bool:
        """Return whether a tenant has more than its part of all places, by weight, while others
        wait for one.
        """
        tenant = self._tenants.get(name)
        if tenant is None or len(self._queued) - (name in self._queued) <= 0:
            return False
        return tenant.places * self._active_weight > self._places * tenant.weight

    def cost_ahead(
        self,
        name: Hashable,
        weight: float,
        cost: float = 0.0,
        priority: int = 0,
        until: float = math.inf,
    ) -> float:
        """Return the cost of the waiting requests that are served before a new one of a tenant, as
        far as they are known now.

        Of very many tenants only some are looked at, and the others taken to be like them.
        """
        tenant = self._tenants.get(name)
        own = 0.0 if tenant is None else tenant.cost_before(priority, until)
        received = 0.0 if tenant is None else tenant.has
        if (tenant is None or not tenant.waiting) and (following := self._following()) is not None:
            received = max(received, following.received - self._owed(tenant, cost))
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
                    ahead += min(
                        other.waiting_cost,
                        max(lead * other.weight, other.waiting_cost / other.waiting),
                    )
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
        """Forget a tenant without requests, unless it has received more than others; forget all if
        nobody has one.
        """
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

    def _lift(self, tenant: Tenant[Ticket], received: float, cost: float) -> None:
        """Take the credit of idle times from a tenant. What it is owed while it has requests is
        kept, up to all places once.
        """
        tenant.received = max(tenant.received, received - self._owed(tenant, cost))

    def _owed(self, tenant: Tenant[Ticket] | None, cost: float) -> float:
        return self._places * cost / tenant.weight if tenant is not None and tenant.places else 0.0

    # -- places

    def _fits(self, size: int) -> bool:
        return not self._max_size or not self.taken or self.size + size <= self._max_size

    @staticmethod
    def _charge(entry: TenantRequest[Ticket]) -> None:
        entry.tenant.received += entry.cost / entry.tenant.weight
        entry.charged = True

    def _give_place(self, entry: TenantRequest[Ticket]) -> None:
        entry.has_place = True
        entry.tenant.places += 1
        self.taken += 1
        self.size += entry.size

    def _remove(self, entry: TenantRequest[Ticket]) -> None:
        tenant = entry.tenant
        tenant.remove(entry)
        entry.waits = False
        self.waiting -= 1
        if not tenant.waiting:
            del self._queued[tenant.name]

    def fill(self) -> None:
        """Grant free places to requests that wait."""
        while self.taken < self._places and (tenant := self._following()) is not None:
            entry = tenant.entries[0]
            if not self._fits(entry.size):
                return  # nobody overtakes it: it would wait as long as smaller ones come
            heapq.heappop(self._order)
            self._remove(entry)
            if self._granted(entry.ticket):
                self._served = max(self._served, tenant.received)
                self._charge(entry)
                self._give_place(entry)
                if tenant.waiting:
                    self._next_turn(tenant)
            elif tenant.waiting:
                self._push(tenant)
            self._rest(tenant)

    def _displace(self, newcomer: Tenant[Ticket], priority: int) -> Tenant[Ticket] | None:
        """Make room in the queue for a request of a tenant. Return the tenant that has lost one,
        None if none may.
        """
        largest = max(self._queued.values(), key=_share, default=None)
        if largest is None:
            return None
        if largest is newcomer or _share(largest) <= (newcomer.waiting + 1) / newcomer.weight:
            # It has no less than the others. But a request of its own may be more urgent than
            # another one.
            if not newcomer.waiting or newcomer.entries[-1].order[0] <= priority:
                return None
            largest = newcomer
        entry = largest.entries[-1]
        self._remove(entry)
        self._displaced(entry.ticket)
        return largest


def _share(tenant: Tenant[Ticket]) -> float:
    return tenant.waiting / tenant.weight
