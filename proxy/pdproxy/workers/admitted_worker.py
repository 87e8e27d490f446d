"""One worker's places, and its requests' uses of keys, in the scheduler process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from pdproxy.deciding.local_admission import LocalAdmission, LocalPlace
from pdproxy.deciding.local_quotas import LocalQuotas, LocalUse
from pdproxy.kit.errors import LimitError, PdproxyError
from pdproxy.scheduling.admission import RequestDemand
from pdproxy.serving.access.clients import Client, Clients
from pdproxy.workers.calls import Answer, asked, told
from pdproxy.workers.scheduler_clients import Holder, SchedulerClient

ClientName = Any
"""`AdmittedClient.name`: bytes or a text. An argument can't have both types in msgspec."""


class HeldPlace(msgspec.Struct, array_like=True):
    """A place that a request of a worker has: the arguments of `AdmittedWorker.enter`."""

    number: int
    client: ClientName
    weight: float
    demand: RequestDemand


class HeldUse(msgspec.Struct, array_like=True):
    """A use of a key. `reserved`: the arguments of `Use.reserve`, None before; `spent`: tokens."""

    number: int
    key: str
    reserved: tuple[int, int | None, int] | None
    spent: int


class AdmissionAtWorker(Protocol):
    """What a worker is told of its places."""

    @told
    def evict(self, client: ClientName) -> None:
        """A client that reads too slowly is to lose an answer: others wait."""


class QuotasAtWorker(Protocol):
    """What a worker is told of its uses of keys."""

    @told
    def overdrawn(self, use: int, text: str, retry_after: float | None) -> None:
        """The minute of a use's key has no tokens left."""


class AdmissionOfAll(msgspec.Struct, frozen=True, eq=False):
    """What gives places to the requests of all workers, and has the limits of all keys."""

    admission: LocalAdmission
    quotas: LocalQuotas
    clients: Clients


class AdmittedWorker(Holder):
    """Places and uses have the numbers of the questions for them."""

    def __init__(self, of_all: AdmissionOfAll, worker: SchedulerClient) -> None:
        self._admission = of_all.admission
        self._quotas = of_all.quotas
        self._clients = of_all.clients
        self._worker = worker
        self._places: dict[int, tuple[Client, LocalPlace]] = {}
        self._uses: dict[int, LocalUse] = {}
        self._slow: dict[bytes | str, tuple[Client, _SlowReader]] = {}
        worker.hold(self)
        worker.serve(AdmittedWorker, self)

    def __repr__(self) -> str:
        return f"<AdmittedWorker {len(self._places)} places, {len(self._uses)} uses>"

    def __len__(self) -> int:
        return len(self._places) + len(self._uses) + len(self._slow)

    def close(self) -> None:
        """See `Holder`."""
        for client, place in self._places.values():
            place.leave()
            self._clients.leave(client)
        self._places.clear()
        for use in self._uses.values():
            use.forfeit()
        self._uses.clear()
        for name in list(self._slow):
            self.caught_up(name)

    def unwanted(self, number: int, *, is_sent: bool) -> None:
        """See `Holder`."""
        if (found := self._places.pop(number, None)) is not None:
            client, place = found
            place.leave()
            self._clients.leave(client)
        if (use := self._uses.pop(number, None)) is not None:
            use.end(0)

    # -- places

    def _client(self, name: bytes | str, weight: float) -> Client:
        client = self._clients.enter(name)
        client.weight = weight
        return client

    @asked
    def enter(
        self,
        number: int,
        client: ClientName,
        weight: float,
        demand: RequestDemand,
        deadline: float | None,
    ) -> Answer[None]:
        """See `Admission`. `client`, `weight`: see `AdmittedClient`."""
        own = self._client(client, weight)
        try:
            place = self._admission.begin(own, demand, deadline)
        except BaseException:
            self._clients.leave(own)
            raise
        if place.patience:
            return self._wait(number, own, place)
        self._places[number] = own, place
        return None

    async def _wait(self, number: int, client: Client, place: LocalPlace) -> None:
        try:
            await self._admission.wait(client, place)
        except BaseException:
            self._clients.leave(client)
            raise
        self._places[number] = client, place

    @told
    def left(
        self,
        place: int,
        seconds: float,
        prompt: int | None,
        completion: int | None,
        *,
        late: bool,
        answered: bool,
    ) -> None:
        """See `Place.leave`."""
        if (found := self._places.pop(place, None)) is not None:
            client, own = found
            own.leave(seconds, prompt, completion, late=late, answered=answered)
            self._clients.leave(client)

    @told
    def reads_slowly(self, client: ClientName) -> None:
        """A client reads an answer too slowly, still."""
        own, reader = self._slow.get(client) or (None, None)
        if own is None or reader is None:
            own = self._clients.enter(client)
            reader = _SlowReader(self._worker, client)
            self._slow[client] = own, reader
        if self._admission.over_share(own):
            self._worker.tell(AdmissionAtWorker.evict, 0, client)
        else:
            self._clients.mark_slow(own, reader)

    @told
    def caught_up(self, client: ClientName) -> None:
        """A client reads no answer too slowly any more."""
        if (found := self._slow.pop(client, None)) is not None:
            own, reader = found
            self._clients.unmark_slow(own, reader)
            self._clients.leave(own)

    # -- limits of keys

    @asked
    def use_key(self, number: int, key: str) -> Answer[None]:
        """See `Quotas.enter`."""
        if (use := self._quotas.begin(key)) is not None:
            self._uses[number] = use
        return None

    @asked
    def reserve(
        self, number: int, use: int, prompt: int, most: int | None, answers: int
    ) -> Answer[None]:
        """See `Use`."""
        if (own := self._uses.get(use)) is not None:
            own.take(prompt, most, answers)
        return None

    @told
    def spend(self, use: int, tokens: int) -> None:
        """See `Use`."""
        try:
            if (own := self._uses.get(use)) is not None:
                own.spend(tokens)
        except LimitError as error:
            self._worker.tell(QuotasAtWorker.overdrawn, 0, use, error.message, error.retry_after)

    @told
    def end(self, use: int, tokens: int, unseen: float, seen: int) -> None:
        """See `Use`."""
        if (own := self._uses.pop(use, None)) is not None:
            own.end(tokens, unseen, seen)

    @told
    def charge(self, key: str, tokens: int, own: int) -> None:
        """See `Use.add`. `own`: the most tokens of the request by its own size and limit."""
        self._quotas.charge(key, tokens, own)

    # -- what it has of a scheduler process that was before

    @told
    def restore_places(self, places: Sequence[HeldPlace]) -> None:
        """Take over the places that the worker has."""
        for held in places:
            client = self._client(held.client, held.weight)
            self._places[held.number] = client, self._admission.restore(client, held.demand)

    @told
    def restore_uses(self, uses: Sequence[HeldUse]) -> None:
        """Take over the uses of keys that the worker has."""
        for held in uses:
            if (use := self._quotas.restore(held.key)) is not None:
                self._uses[held.number] = use
                if held.reserved is not None:
                    use.take(*held.reserved, check=False)
                if held.spent:
                    self.spend(held.number, held.spent)


class _SlowReader:
    """An answer at a worker that is read too slowly: an `Evictable`."""

    def __init__(self, worker: SchedulerClient, client: bytes | str) -> None:
        self._worker = worker
        self._client = client

    def evict(self, error: PdproxyError) -> None:
        """See `Evictable`."""
        self._worker.tell(AdmissionAtWorker.evict, 0, self._client)
