"""One worker's places, and its requests' uses of keys, in the scheduler process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from pdproxy.deciding.local_admission import LocalAdmission, LocalPlace
from pdproxy.deciding.local_quotas import LocalQuotas, LocalUse
from pdproxy.kit.errors import LimitError, OverloadedError, PdproxyError
from pdproxy.serving.access.clients import Client, Clients
from pdproxy.workers.admission_messages import (
    CaughtUp,
    Charged,
    Enter,
    Evict,
    ForAdmission,
    Granted,
    HeldPlace,
    HeldUse,
    Left,
    OfAdmission,
    Overdrawn,
    ReadsSlowly,
    Reserve,
    Spent,
    UseEnded,
    UseKey,
)


class AdmissionOfAll(msgspec.Struct, frozen=True, eq=False):
    """What gives places to the requests of all workers, and has the limits of all keys."""

    admission: LocalAdmission
    quotas: LocalQuotas
    clients: Clients


class AdmittedWorker:
    """`answer`: sends the worker an item; `refuse`: sends an error for a number."""

    def __init__(
        self,
        of_all: AdmissionOfAll,
        answer: Callable[[ForAdmission], None],
        refuse: Callable[[int, OverloadedError], None],
    ) -> None:
        self._admission = of_all.admission
        self._quotas = of_all.quotas
        self._clients = of_all.clients
        self._answer = answer
        self._refuse = refuse
        self._places: dict[int, tuple[Client, LocalPlace]] = {}
        self._waits: dict[int, asyncio.Task[None]] = {}
        self._uses: dict[int, LocalUse] = {}
        self._slow: dict[bytes | str, tuple[Client, _SlowReader]] = {}
        self.do: dict[type[OfAdmission], Callable[[Any], None]] = {
            Enter: self._enter,
            Left: self._left,
            UseKey: self._use_key,
            Reserve: self._reserve,
            Spent: self._spent,
            UseEnded: self._use_ended,
            Charged: self._charged,
            ReadsSlowly: self._reads_slowly,
            CaughtUp: self._caught_up,
        }
        """What takes each item."""

    def __repr__(self) -> str:
        return f"<AdmittedWorker {len(self._places)} places, {len(self._waits)} waits>"

    def __len__(self) -> int:
        """How much it has: places, requests that wait, uses and slow readers."""
        return len(self._places) + len(self._waits) + len(self._uses) + len(self._slow)

    def close(self) -> None:
        """End all that the worker has."""
        for task in self._waits.values():
            task.cancel()
        for client, place in self._places.values():
            place.leave()
            self._clients.leave(client)
        self._places.clear()
        for use in self._uses.values():
            use.forfeit()
        self._uses.clear()
        for name in list(self._slow):
            self._caught_up(CaughtUp(name))

    def unwanted(self, number: int) -> None:
        """Nobody waits for what this number was to be any more."""
        if (task := self._waits.get(number)) is not None:
            task.cancel()
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

    def _enter(self, item: Enter) -> None:
        client = self._client(item.client, item.weight)
        try:
            place = self._admission.begin(client, item.demand, item.deadline)
        except OverloadedError as error:
            self._clients.leave(client)
            self._refuse(item.number, error)
            return
        if not place.patience:
            self._places[item.number] = client, place
            self._answer(Granted(item.number))
            return
        waits = self._wait(item.number, client, place)
        task = self._waits[item.number] = asyncio.get_running_loop().create_task(waits, name="wait")
        task.add_done_callback(partial(self._over, item.number))

    def _over(self, number: int, _: asyncio.Task[None]) -> None:
        self._waits.pop(number, None)

    async def _wait(self, number: int, client: Client, place: LocalPlace) -> None:
        has_place = False
        try:
            await self._admission.wait(client, place)
            has_place = True
        except OverloadedError as error:
            self._refuse(number, error)
        finally:
            if not has_place:
                self._clients.leave(client)
        if has_place:
            self._places[number] = client, place
            self._answer(Granted(number))

    def _left(self, item: Left) -> None:
        if (found := self._places.pop(item.place, None)) is not None:
            client, place = found
            place.leave(
                item.seconds,
                item.prompt,
                item.completion,
                late=item.late,
                answered=item.answered,
            )
            self._clients.leave(client)

    def _reads_slowly(self, item: ReadsSlowly) -> None:
        client, reader = self._slow.get(item.client) or (None, None)
        if client is None or reader is None:
            client = self._clients.enter(item.client)
            reader = _SlowReader(self._answer, item.client)
            self._slow[item.client] = client, reader
        if self._admission.over_share(client):
            self._answer(Evict(item.client))
        else:
            self._clients.mark_slow(client, reader)

    def _caught_up(self, item: CaughtUp) -> None:
        if (found := self._slow.pop(item.client, None)) is not None:
            client, reader = found
            self._clients.unmark_slow(client, reader)
            self._clients.leave(client)

    # -- limits of keys

    def _use_key(self, item: UseKey) -> None:
        try:
            use = self._quotas.begin(item.key)
        except OverloadedError as error:
            self._refuse(item.number, error)
            return
        if use is not None:
            self._uses[item.number] = use
        self._answer(Granted(item.number))

    def _reserve(self, item: Reserve) -> None:
        try:
            if (use := self._uses.get(item.use)) is not None:
                use.take(item.prompt, item.most, item.answers)
        except OverloadedError as error:
            self._refuse(item.number, error)
        else:
            self._answer(Granted(item.number))

    def _spent(self, item: Spent) -> None:
        try:
            if (use := self._uses.get(item.use)) is not None:
                use.spend(item.tokens)
        except LimitError as error:
            self._answer(Overdrawn(item.use, error.message, error.retry_after))

    def _use_ended(self, item: UseEnded) -> None:
        if (use := self._uses.pop(item.use, None)) is not None:
            use.end(item.tokens, item.unseen, item.seen)

    def _charged(self, item: Charged) -> None:
        self._quotas.charge(item.key, item.tokens, item.own)

    # -- what it has of a scheduler process that was before

    def restore(self, places: Sequence[HeldPlace], uses: Sequence[HeldUse]) -> None:
        """Take over what the worker has."""
        for held in places:
            client = self._client(held.client, held.weight)
            self._places[held.number] = client, self._admission.restore(client, held.demand)
        for one in uses:
            if (use := self._quotas.restore(one.key)) is not None:
                self._uses[one.number] = use
                if one.reserved is not None:
                    use.take(*one.reserved, check=False)
                if one.spent:
                    self._spent(Spent(one.number, one.spent))


class _SlowReader:
    """An answer at a worker that is read too slowly: an `Evictable`."""

    def __init__(self, answer: Callable[[ForAdmission], None], client: bytes | str) -> None:
        self._answer = answer
        self._client = client

    def evict(self, error: PdproxyError) -> None:
        """See `Evictable`."""
        self._answer(Evict(self._client))
