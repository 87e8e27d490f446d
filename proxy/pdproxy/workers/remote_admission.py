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
from pdproxy.workers.admitted_worker import (
    AdmissionAtWorker,
    AdmittedWorker,
    ClientName,
    HeldPlace,
    HeldUse,
    QuotasAtWorker,
)
from pdproxy.workers.scheduler_link import Question, SchedulerLink


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
        link.begins.append(self._begin)
        link.serve(AdmissionAtWorker, self)
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
            await link.ask(
                Question(number),
                AdmittedWorker.enter,
                0,
                client.name,
                client.weight,
                demand,
                deadline,
            )
        finally:
            self._waiting.discard(number)
            if self.closed:  # since it waits
                self._check_drained()
        held = HeldPlace(number, client.name, client.weight, demand)
        place = self._places[number] = RemotePlace(self, link, held)
        return place

    def left(self, place: RemotePlace) -> bool:
        """Return whether a place was not left before. It is, now."""
        is_new = self._places.pop(place.held.number, None) is not None
        if self._closed:
            self._check_drained()
        return is_new

    def over_share(self, client: AdmittedClient) -> bool:
        """See `Admission`. The scheduler process says a moment later if the client is."""
        self._link.tell(AdmittedWorker.reads_slowly, 0, client.name)
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
        self._link.tell(AdmittedWorker.caught_up, 0, client.name)

    def evict(self, client: ClientName) -> None:
        """See `AdmissionAtWorker`."""
        if (own := self._clients.get(client)) is not None:
            self._clients.evict_reader(own)

    def _begin(self) -> None:
        held = [place.held for place in self._places.values()]
        self._link.tell(AdmittedWorker.restore_places, 0, held)


class RemotePlace:
    """A `scheduling.admission.Place`."""

    __slots__ = ("_admission", "_link", "held")

    def __init__(self, admission: RemoteAdmission, link: SchedulerLink, held: HeldPlace) -> None:
        self._admission = admission
        self._link = link
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
        if self._admission.left(self):
            self._link.tell(
                AdmittedWorker.left,
                0,
                self.held.number,
                seconds,
                prompt,
                completion,
                late=late,
                answered=answered,
            )


class RemoteQuotas:
    """A `scheduling.admission.Quotas`. `limits`: returns those in force: a key without any is asked
    nothing.
    """

    def __init__(self, link: SchedulerLink, limits: Callable[[], Mapping[str, KeyLimits]]) -> None:
        self._link = link
        self._limits = limits
        self._uses: dict[int, RemoteUse] = {}
        link.begins.append(self._begin)
        link.serve(QuotasAtWorker, self)

    def __repr__(self) -> str:
        return f"<RemoteQuotas {len(self._uses)} uses>"

    async def enter(self, key: str) -> RemoteUse | None:
        """See `Quotas`."""
        if key not in self._limits():
            return None
        number = self._link.numbers(1)
        await self._link.ask(Question(number), AdmittedWorker.use_key, 0, key)
        use = self._uses[number] = RemoteUse(self._link, HeldUse(number, key, None, 0), self._ended)
        return use

    def _ended(self, number: int) -> None:
        self._uses.pop(number, None)

    def overdrawn(self, use: int, text: str, retry_after: float | None) -> None:
        """See `QuotasAtWorker`."""
        if (own := self._uses.get(use)) is not None:
            error = LimitError(text, RefusalReason.KEY_TOKENS, retry_after=retry_after)
            own.overdrawn = error

    def _begin(self) -> None:
        held = [use.held for use in self._uses.values()]
        self._link.tell(AdmittedWorker.restore_uses, 0, held)


class RemoteUse:
    """A `scheduling.admission.Use`. `held`: what it has; `ended`: called at its end."""

    __slots__ = ("_ended", "_link", "_own", "held", "overdrawn")

    def __init__(self, link: SchedulerLink, held: HeldUse, ended: Callable[[int], None]) -> None:
        self._link = link
        self._ended = ended
        self._own = 0
        self.held = held
        self.overdrawn: LimitError | None = None
        """What the scheduler process has said to tokens that were spent."""

    async def reserve(self, prompt: int, most: int | None, answers: int = 1) -> None:
        """See `Use`."""
        link, held = self._link, self.held
        self._own = most_of(prompt, most)
        reserve = AdmittedWorker.reserve
        await link.ask(link.question(), reserve, 0, held.number, prompt, most, answers)
        held.reserved = prompt, most, answers

    def spend(self, tokens: int) -> None:
        """See `Use`. The scheduler process is told, and its answer counts the next time."""
        held = self.held
        held.spent += tokens
        self._own = max(self._own, held.spent)
        self._link.tell(AdmittedWorker.spend, 0, held.number, tokens)
        if (error := self.overdrawn) is not None:
            self.overdrawn = None
            raise error

    def end(self, tokens: int, unseen: float = 0.0, seen: int = 0) -> None:
        """See `Use`."""
        number = self.held.number
        self._ended(number)
        self._link.tell(AdmittedWorker.end, 0, number, tokens, unseen, seen)

    def add(self, tokens: int) -> None:
        """See `Use`."""
        self._link.tell(AdmittedWorker.charge, 0, self.held.key, tokens, self._own)
