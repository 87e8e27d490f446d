"""Admission: requests wait here, before any engine works for them.

Owns the places of requests being served, and how many there are; `kit.fair_queue` decides which
request is next, and `scheduling.waits` predicts how long that takes. A request with a deadline
waits only as long as it can spare; half as long, once others have been waiting for longer than a
request is served: places would go to requests that just miss their deadlines, if each were begun at
the last moment. `scheduling.concurrency_limit` lowers the number of places where too many requests
at once make each other late, and `spaced_places` keeps requests from beginning all together where
others have been waiting for long. A prefilled request never waits here, because the lease on its KV
is running. While a request waits, a client with more places than its share loses one, if it reads
that answer too slowly.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

import msgspec

from pdproxy.deciding.patience import may_wait
from pdproxy.deciding.spaced_places import SpacedPlaces
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import LimitError, OverloadedError, RefusalReason, Wait
from pdproxy.kit.fair_queue import FairQueue, QueueFullError, TenantRequest
from pdproxy.observe.description import MergeRule, gauge
from pdproxy.observe.events import DeadlinePassed, Evicted, Observers
from pdproxy.scheduling.admission import MOST_TOKENS, NO_DEMAND, AdmittedClient, RequestDemand
from pdproxy.scheduling.concurrency_limit import ConcurrencyLimit
from pdproxy.scheduling.outputs import Outputs
from pdproxy.scheduling.waits import MEAN_OVER, Waits
from pdproxy.settings.limits import Deadlines, Limits, Overload


class SlowReaders(Protocol):
    """The clients that read an answer too slowly."""

    def evict_slow(self, client: object, over_share: Callable[[AdmittedClient], bool]) -> None:
        """Drop one slow reader of another client that has more than its share."""


class Ended(msgspec.Struct, frozen=True):
    """How a request ended its place: see `Place.leave`."""

    seconds: float = 0.0
    prompt: int | None = None
    completion: int | None = None
    late: bool = False
    answered: bool = True


class LocalPlace(msgspec.Struct, eq=False):
    """A request's place, or its wait for one. Released by one `leave`, which calls `left`."""

    left: Callable[[LocalPlace, Ended], None]
    demand: RequestDemand
    expected: float
    """How many tokens its answers are likely to have."""
    entry: TenantRequest[LocalPlace] | None = None
    """None before it is in the queue, and after its end."""
    begun: float = 0.0
    served_before: float = 0.0
    """When it got its place, and for how many seconds in sum requests had had places until then."""
    time: float | None = None
    """The seconds that it had from its arrival on, None if its client named none."""
    patience: float = 0.0
    """For how many seconds it waits, 0 if it was free."""
    wake: asyncio.Future[None] | None = None
    """Done once the place is granted or refused. None if it was free."""

    def out_of_queue(self) -> TenantRequest[LocalPlace]:
        """Return its entry, and refer to it no more: they refer to each other."""
        entry, self.entry = self.entry, None
        assert entry is not None
        return entry

    def grant(self) -> bool:
        """Grant the place to a request that waits for it. Return False if it was cancelled or
        refused, and has not run since.
        """
        if self.wake is None or self.wake.done():
            return False
        self.wake.set_result(None)
        return True

    def refuse(self, error: Exception) -> bool:
        """Refuse the place to a request that waits for it. Return whether it still waits."""
        if self.wake is None or self.wake.done():
            return False
        self.wake.set_exception(error)
        return True

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
        self.left(self, Ended(seconds, prompt, completion, late, answered))


OPTIMISM = 0.5
"""The part of a predicted wait that is believed where a request is refused by it: predictions may
be twice too long.
"""
INFLIGHT = gauge(
    "pdproxy_inflight",
    "requests",
    "Requests that have a place and have not ended",
    workers=MergeRule.SUM,
)
QUEUE = gauge("pdproxy_queue", "requests", "Requests that wait for a place", workers=MergeRule.SUM)
PLACES = gauge(
    "pdproxy_places",
    "requests",
    "Requests that may be served at once now: by limits.max_inflight, by what engines can take, "
    "and by clients' deadlines",
    workers=MergeRule.LEAST,  # one number for all; the fewest are in force
)
TOKENS_IN_FLIGHT = gauge(
    "pdproxy_tokens_in_flight",
    "tokens",
    "Tokens of the requests that have a place: prompts and expected answers, as estimated before "
    "(limits.max_inflight_tokens)",
    workers=MergeRule.SUM,
)


class LocalAdmission:
    """At most so many requests at once, with so many tokens, as `limits` say; others wait in a
    queue, as all three sections say.

    What is read for each request is taken from the sections by `configure`.
    """

    def __init__(
        self,
        limits: Limits,
        deadlines: Deadlines,
        overload: Overload,
        observers: Observers,
        clock: Clock,
        slow_readers: SlowReaders,
    ) -> None:
        self._limits, self._deadlines, self._overload = limits, deadlines, overload
        self._take_settings()
        self._queue: FairQueue[LocalPlace] = FairQueue(
            limits.max_inflight,
            limits.max_queue,
            limits.max_inflight_tokens,
            self._granted,
            self._displaced,
        )
        self._engines_places: int | None = None
        self._engines_tokens = 0
        self._observers, self._clock, self._slow_readers = observers, clock, slow_readers
        self._outputs, self._waits, self._limit = Outputs(), Waits(), ConcurrencyLimit()
        self._spaced = SpacedPlaces(self._give_back_late)
        self._served = self._served_at = 0.0
        """The sum of the seconds for which requests have had places, up to a time."""
        self._queued_since = 0.0
        """Since when there have always been requests that wait, where there are some."""
        self._closed = False
        self._drained = asyncio.Event()
        """Set once admission is closed and no place is taken any more."""
        observers.show(INFLIGHT, lambda: [((), self.inflight)])
        observers.show(QUEUE, lambda: [((), self.waiting)])
        observers.show(PLACES, lambda: [((), self.places)])
        observers.show(TOKENS_IN_FLIGHT, lambda: [((), self.tokens)])

    def __repr__(self) -> str:
        return (
            f"<LocalAdmission {self.inflight} in flight, {self.waiting} "
            f"waiting{', closed' * self._closed}>"
        )

    @property
    def inflight(self) -> int:
        """Requests being served."""
        return self._queue.taken

    @property
    def tokens(self) -> int:
        """Tokens of these requests, prompts and expected answers together."""
        return self._queue.size

    @property
    def waiting(self) -> int:
        """Requests waiting for a place."""
        return self._queue.waiting

    @property
    def places(self) -> int:
        """How many requests may be served at once."""
        return self._queue.places

    @property
    def closed(self) -> bool:
        """Whether new requests are refused because of a shutdown."""
        return self._closed

    def resize(self, places: int | None, tokens: int = 0) -> None:
        """Change the number of places, at most those of the settings (None: these), and their
        tokens, the same (0: these).
        """
        self._engines_places, self._engines_tokens = places, tokens
        self._resize()

    def configure(self) -> None:
        """Use the settings as they are now. Requests that have a place or wait for one keep what
        they have.
        """
        self._take_settings()
        self._queue.max_waiting = self._limits.max_queue
        self._resize()

    def _take_settings(self) -> None:
        self._max_inflight, self._max_tokens = (
            self._limits.max_inflight,
            self._limits.max_inflight_tokens,
        )
        self._timeout = self._deadlines.queue
        self._output_weight, self._by_priority = (
            self._overload.output_weight,
            self._overload.priority == "within",
        )

    async def enter(
        self,
        client: AdmittedClient,
        demand: RequestDemand = NO_DEMAND,
        deadline: float | None = None,
    ) -> LocalPlace:
        """See `Admission`."""
        place = self.begin(client, demand, deadline)
        if place.patience:
            await self.wait(client, place)
        return place

    def begin(
        self, client: AdmittedClient, demand: RequestDemand, deadline: float | None
    ) -> LocalPlace:
        """Take a place as `enter`. If it has `patience`, call `wait` behind this, in any case."""
        if self._closed:
            raise shutting_down()
        # engines read a text with many others a few at a time
        prompt = min(demand.prompt, MOST_TOKENS)
        expected = self._outputs.expected(prompt, demand.limit) * demand.answers
        place, size = LocalPlace(self._left, demand, expected), prompt + int(expected)
        cost = prompt + self._output_weight * expected
        if self._spaced.kept and not self._queue.waiting:
            self._spaced.release()
        priority, patience, now = (
            demand.priority if self._by_priority else 0,
            self._timeout,
            self._clock.now(),
        )
        if deadline is not None:
            place.time = deadline - now
            patience = min(self._check(client, demand, cost, priority, now, place.time), patience)
        entry = self._queue.take(client.name, client.weight, place, cost, size)
        if entry is not None:
            place.entry = entry
            self._begin(place, self._queue.taken - 1)
        else:
            if not self._queue.waiting:
                self._queued_since = now
            try:
                place.entry = self._queue.queue_up(
                    client.name, client.weight, place, cost, size, priority, now + patience
                )
            except QueueFullError:
                text = f"{self.inflight} requests are being served and {self.waiting} are waiting"
                raise OverloadedError(
                    text, RefusalReason.QUEUE_FULL, retry_after=self._wait_of(client)
                ) from None
            place.patience = patience
        return place

    def restore(self, client: AdmittedClient, demand: RequestDemand) -> LocalPlace:
        """Take the place of a request that another process has given it, and that goes on."""
        prompt = min(demand.prompt, MOST_TOKENS)
        expected = self._outputs.expected(prompt, demand.limit) * demand.answers
        place = LocalPlace(self._left, demand, expected)
        cost = prompt + self._output_weight * expected
        place.entry = self._queue.restore(
            client.name, client.weight, place, cost, prompt + int(expected)
        )
        self._begin(place, self._queue.taken - 1)
        return place

    async def close(self) -> None:
        """Refuse new requests and those that wait, and return when no request is left."""
        self._closed = True
        for place in self._queue.tickets():
            place.refuse(shutting_down())
        self._spaced.release()
        self._check_drained()
        await self._drained.wait()

    def over_share(self, client: AdmittedClient) -> bool:
        """Return whether a client holds more places than its share while others wait for one."""
        return self._queue.over_share(client.name)

    def _left(self, place: LocalPlace, ended: Ended) -> None:
        """A request ends its place."""
        demand, prompt, completion, late = place.demand, ended.prompt, ended.completion, ended.late
        entry, time, now = place.out_of_queue(), place.time, self._clock.now()
        cost: float | None = None
        self._add_up(now, self._queue.taken)
        if is_known := prompt is not None or completion is not None:
            cost = demand.prompt if prompt is None else prompt
            cost += self._output_weight * (place.expected if completion is None else completion)
            self._waits.ended(now, cost, ended.seconds)
        says_time = late or (is_known and ended.answered)
        self._limit.left(
            entry.tenant.name, now - place.begun if says_time else None, time, late=late
        )
        weight = (1 if late else self._waits.learns(now)) if says_time else 0
        if weight:
            longer = self._waits.served(now, demand.prompt, ended.seconds, weight, late=late)
            served = (self._served - place.served_before) / max(now - place.begun, 1e-3)
            self._limit.ended(now, place.begun, served, longer, time, weight, late=late)
            if completion and demand.answers and not late:
                self._outputs.add(demand.prompt, completion // demand.answers)
            self._resize()
        seconds = self._waits.seconds
        if self._queue.waiting and now > self._queued_since + seconds and not self._closed:
            self._spaced.leave(now, entry, cost, seconds, self._queue.taken)
        else:
            self._give_back(entry, cost)

    def _give_back_late(self, entry: TenantRequest[LocalPlace], cost: float | None) -> None:
        """A place that was kept back is free."""
        self._add_up(self._clock.now(), self._queue.taken)
        self._give_back(entry, cost)

    def _give_back(self, entry: TenantRequest[LocalPlace], cost: float | None) -> None:
        self._queue.leave(entry, cost)
        if self._closed:
            self._check_drained()

    async def wait(self, client: AdmittedClient, place: LocalPlace) -> None:
        """Wait until a place is granted. Raises as `enter`."""
        patience = place.patience
        place.wake = asyncio.get_running_loop().create_future()
        # a client is over its share only while others wait
        self._slow_readers.evict_slow(client, self.over_share)
        # this request may have displaced the large one that the others waited for
        self._queue.fill()
        try:
            with self._clock.within(patience):
                await place.wake
        except TimeoutError:
            self._give_up(place)
            self._observers.notify(DeadlinePassed(Wait.QUEUE.value))
            if patience < self._timeout:
                raise self._too_late(client) from None
            text = f"no place came free in {self._timeout:g} s"
            raise OverloadedError(
                text, RefusalReason.QUEUE_TIMEOUT, retry_after=self._wait_of(client)
            ) from None
        except LimitError as error:
            self._give_up(place)
            error.retry_after = self._wait_of(client)
            raise
        except BaseException:
            self._give_up(place)
            raise
        finally:
            place.wake = None
            # a place that was granted to a request that no longer wants it was released
            self._check_drained()

    def _give_up(self, place: LocalPlace) -> None:
        entry = place.out_of_queue()
        if entry.has_place:
            self._add_up(self._clock.now(), self._queue.taken)
            self._limit.left(entry.tenant.name, None, place.time)
            # granted in the same turn of the loop in which the caller was cancelled
            self._queue.leave(entry)
        else:
            self._queue.stop_waiting(entry)

    def _granted(self, place: LocalPlace) -> bool:
        if still_waits := place.grant():
            self._begin(place, self._queue.taken)
        return still_waits

    def _begin(self, place: LocalPlace, taken: int) -> None:
        """A request gets its place. `taken`: those that were taken until now."""
        place.begun = now = self._clock.now()
        self._add_up(now, taken)
        place.served_before = self._served
        assert place.entry is not None
        tenant = place.entry.tenant
        self._limit.begun(tenant.name, tenant.weight, timed=place.time is not None)

    def _add_up(self, now: float, taken: int) -> None:
        self._served += taken * (now - self._served_at)
        self._served_at = now

    def _resize(self) -> None:
        places = (
            self._max_inflight
            if self._engines_places is None
            else min(self._engines_places, self._max_inflight)
        )
        places = int(min(places, self._limit.places))
        tokens = min(
            self._max_tokens or self._engines_tokens, self._engines_tokens or self._max_tokens
        )
        if (places, tokens) != (self._queue.places, self._queue.max_size):
            self._queue.resize(places, tokens)

    def _displaced(self, place: LocalPlace) -> None:
        text = "requests of other clients wait, and this client has the most of them"
        if place.refuse(LimitError(text, RefusalReason.SHARE)):
            self._observers.notify(Evicted("queue"))

    def _check(
        self,
        client: AdmittedClient,
        demand: RequestDemand,
        cost: float,
        priority: int,
        now: float,
        left: float,
    ) -> float:
        """Return how long a request may wait for a place. `left`: the seconds in which it is to be
        answered.

        Raises:
            OverloadedError: it can't be done in that time.
        """
        waiting = self._queue.waiting
        patience = may_wait(
            self._waits, self._outputs, demand, now, left, self._queued_since if waiting else None
        )
        if patience is None:
            raise self._too_late(client)
        if (
            waiting
            and patience < (self._wait_of(client, cost, priority, now + patience) or 0.0) * OPTIMISM
        ):
            raise self._too_late(client)
        return patience

    def _wait_of(
        self, client: AdmittedClient, cost: float = 0.0, priority: int = 0, until: float = math.inf
    ) -> float | None:
        """Return the predicted wait of a new request of a client, None if nothing is known.

        `cost`: its own, which stands for the request that must end before it gets a place.
        """
        now = self._clock.now()
        served = self._queue.taken if now < self._queued_since + MEAN_OVER else 0
        ahead = cost + self._queue.cost_ahead(client.name, client.weight, cost, priority, until)
        return self._waits.wait(now, ahead, served)

    def _too_late(self, client: AdmittedClient) -> OverloadedError:
        text = "the request can't be served within its X-Request-Timeout now"
        return OverloadedError(text, RefusalReason.DEADLINE, retry_after=self._wait_of(client))

    def _check_drained(self) -> None:
        if self._closed and not self._queue.taken:
            self._drained.set()


def shutting_down() -> OverloadedError:
    """Return what requests are refused with."""
    return OverloadedError("pdproxy is shutting down", RefusalReason.DRAINING)
