"""Places of requests, and limits of keys, for requests of a worker: each is asked of the scheduler
process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from pdproxy.deciding.local_admission import shutting_down
from pdproxy.deciding.local_quotas import most_of
from pdproxy.kit.errors import LimitError, RefusalReason
from pdproxy.scheduling.admission import NO_DEMAND, AdmittedClient, RequestDemand
from pdproxy.serving.access.clients import Client, Clients
from pdproxy.settings.keys import KeyLimits
from pdproxy.workers.admission_messages import (
    CaughtUp,
    Charged,
    Enter,
    Evict,
    HeldPlace,
    HeldUse,
    Left,
    Overdrawn,
    ReadsSlowly,
    Reserve,
    Spent,
    UseEnded,
    UseKey,
)
from pdproxy.workers.scheduler_link import SchedulerLink


class RemoteAdmission:
    """A `scheduling.admission.Admission`. What it counts are the requests of this worker."""

    def __init__(self, link: SchedulerLink, clients: Clients) -> None:
        self._link = link
        self._clients = clients
        self._places: dict[int, RemotePlace] = {}
        self._waiting: set[int] = set()
        """The numbers of the requests that wait."""
        self._closed = False
        self._drained = asyncio.Event()
        """Set once admission is closed and no place is taken any more."""
        link.places = lambda: [place.held for place in self._places.values()]
        link.evict = self._evict
        clients.caught_up = self._caught_up

    def __repr__(self) -> str:
        return f"<RemoteAdmission {self.inflight} in flight, {self.waiting} waiting>"

    @property
    def inflight(self) -> int:
        """See `Admission`. Of this worker."""
        return len(self._places)

    @property
    def waiting(self) -> int:
        """See `Admission`. Of this worker."""
        return len(self._waiting)

    @property
    def closed(self) -> bool:
        """See `Admission`."""
        return self._closed

    def configure(self) -> None:
        """See `Admission`. The scheduler process follows the settings."""

    async def enter(
        self,
        client: AdmittedClient,
        demand: RequestDemand = NO_DEMAND,
        deadline: float | None = None,
    ) -> RemotePlace:
        """See `Admission`."""
        if self._closed:
            raise shutting_down()
        link = self._link
        number = link.numbers(1)
        self._waiting.add(number)
        try:
            await link.ask(Enter(number, client.name, client.weight, demand, deadline), 1)
        finally:
            self._waiting.discard(number)
            if self.closed:  # since it waits
                self._check_drained()
        held = HeldPlace(number, client.name, client.weight, demand)
        place = self._places[number] = RemotePlace(self, held)
        return place

    def left(self, place: RemotePlace, left: Left) -> None:
        """End a place."""
        if self._places.pop(left.place, None) is place:
            self._link.tell(left)
            if self._closed:
                self._check_drained()

    def over_share(self, client: AdmittedClient) -> bool:
        """See `Admission`. The scheduler process says a moment later if the client is."""
        self._link.tell(ReadsSlowly(client.name))
        return False

    async def close(self) -> None:
        """See `Admission`."""
        self._closed = True
        for number in list(self._waiting):
            self._link.refuse(number, shutting_down())
        self._check_drained()
        await self._drained.wait()

    def _check_drained(self) -> None:
        if not self._places and not self._waiting:
            self._drained.set()

    def _caught_up(self, client: Client) -> None:
        self._link.tell(CaughtUp(client.name))

    def _evict(self, item: Evict) -> None:
        if (client := self._clients.get(item.client)) is not None:
            self._clients.evict_reader(client)


class RemotePlace:
    """A `scheduling.admission.Place`."""

    __slots__ = ("_admission", "held")

    def __init__(self, admission: RemoteAdmission, held: HeldPlace) -> None:
        self._admission = admission
        self.held = held

    def leave(
        self,
        seconds: float = 0.0,
        prompt: int | None = None,
        completion: int | None = None,
        *,
        late: bool = False,
        answered: bool = True,
    ) -> None:
        """See `Place`."""
        left = Left(self.held.number, seconds, prompt, completion, late, answered)
        self._admission.left(self, left)


class RemoteQuotas:
    """A `scheduling.admission.Quotas`. `limits`: returns those in force: a key without any is asked
    nothing.
    """

    def __init__(self, link: SchedulerLink, limits: Callable[[], Mapping[str, KeyLimits]]) -> None:
        self._link = link
        self._limits = limits
        self._uses: dict[int, RemoteUse] = {}
        link.uses = lambda: [use.held for use in self._uses.values()]
        link.overdrawn = self._overdrawn

    def __repr__(self) -> str:
        return f"<RemoteQuotas {len(self._uses)} uses>"

    async def enter(self, key: str) -> RemoteUse | None:
        """See `Quotas`."""
        if key not in self._limits():
            return None
        number = self._link.numbers(1)
        await self._link.ask(UseKey(number, key), 1)
        use = self._uses[number] = RemoteUse(self._link, HeldUse(number, key, None, 0), self._ended)
        return use

    def _ended(self, number: int) -> None:
        self._uses.pop(number, None)

    def _overdrawn(self, item: Overdrawn) -> None:
        if (use := self._uses.get(item.use)) is not None:
            use.overdrawn = item


class RemoteUse:
    """A `scheduling.admission.Use`. `held`: what it has; `ended`: called at its end."""

    __slots__ = ("_ended", "_link", "_own", "held", "overdrawn")

    def __init__(self, link: SchedulerLink, held: HeldUse, ended: Callable[[int], None]) -> None:
        self._link = link
        self._ended = ended
        self._own = 0
        self.held = held
        self.overdrawn: Overdrawn | None = None
        """What the scheduler process has said to tokens that were spent."""

    async def reserve(self, prompt: int, most: int | None, answers: int = 1) -> None:
        """See `Use`."""
        link, held = self._link, self.held
        self._own = most_of(prompt, most)
        await link.ask(Reserve(link.numbers(1), held.number, prompt, most, answers), 1)
        held.reserved = prompt, most, answers

    def spend(self, tokens: int) -> None:
        """See `Use`. The scheduler process is told, and its answer counts the next time."""
        held = self.held
        held.spent += tokens
        self._own = max(self._own, held.spent)
        self._link.tell(Spent(held.number, tokens))
        if (told := self.overdrawn) is not None:
            self.overdrawn = None
            raise LimitError(told.text, RefusalReason.KEY_TOKENS, retry_after=told.retry_after)

    def end(self, tokens: int, unseen: float = 0.0, seen: int = 0) -> None:
        """See `Use`."""
        number = self.held.number
        self._ended(number)
        self._link.tell(UseEnded(number, tokens, unseen, seen))

    def add(self, tokens: int) -> None:
        """See `Use`."""
        self._link.tell(Charged(self.held.key, tokens, self._own))
