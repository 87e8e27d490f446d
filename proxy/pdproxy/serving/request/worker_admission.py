"""Admission of one of several workers: places, tokens in flight and the queue's length are those of
all together.

A request waits in the queue of its own worker, and shares of tenants are kept there. Of the
requests that are next in the workers' queues, the one that has waited for the longest comes first.
Where one worker has found that fewer places are better, that holds for all.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from pdproxy.kit.clock import Clock
from pdproxy.kit.fair_queue import TenantRequest
from pdproxy.kit.shared_places import MORE, MOST_SIZE, SINCE, SIZE, TAKEN, SharedPlaces
from pdproxy.observe.events import Observers
from pdproxy.serving.access.clients import Client, Clients
from pdproxy.serving.request.admission import Admission, Place
from pdproxy.serving.request.demand import NO_DEMAND, RequestDemand
from pdproxy.settings.limits import Deadlines, Limits, Overload

# For each request: a method of the base class as a function of this module takes half the time of
# `super()`.
_enter, _begin, _give_back = Admission.enter, Admission._begin, Admission._give_back  # noqa: SLF001


class WorkerAdmission(Admission):
    """An `Admission` whose places are shared. `shared`: what the other workers have of them."""

    def __init__(
        self,
        limits: Limits,
        deadlines: Deadlines,
        overload: Overload,
        observers: Observers,
        clock: Clock,
        clients: Clients,
        shared: SharedPlaces,
    ) -> None:
        super().__init__(limits, deadlines, overload, observers, clock, clients)
        self._shared = shared
        self._began: dict[Place, float] = {}
        """Since when the requests wait that do."""
        self._own_places = self._queue.places
        """What this worker shows the others: places that the settings and deadlines leave. What
        engines can take, each knows.
        """
        self._learned: float | None = None
        """When the number of places was last found to be right by this worker, None: never."""
        self._bounds: tuple[int, int | None, int, int] | None = None
        """Those from which the queue's were made last."""
        self._rows, self._row = shared.others, shared.row
        self._plain = False
        """Whether the others' places and sizes are all that was to be read."""
        self._quiet = False
        """Whether nobody waits here, and this worker's own are all that is to be shown."""

    @property
    def everywhere(self) -> int:
        """Requests that all workers serve, or have waiting."""
        self._shared.read()
        return self.inflight + self.waiting + self._shared.taken + self._shared.waiting

    def start(self) -> None:
        """Follow the other workers, in the running loop."""
        self._shared.start(self.look)
        self._show()

    def stop(self) -> None:
        """Follow them no more."""
        self._shared.stop()

    def look(self) -> None:
        """Take over what the others have, grant what is free, and show what is taken here."""
        self._quiet = False
        self._read()
        self._queue.fill()
        self._show()

    def enter(
        self, client: Client, demand: RequestDemand = NO_DEMAND, deadline: float | None = None
    ) -> Coroutine[Any, Any, Place]:
        """See `Admission`. It is called for each request: a coroutine around another one would cost
        more than what it reads.
        """
        if self._plain:
            taken = size = 0
            for other in self._rows:
                if other[MORE]:
                    break
                taken += other[TAKEN]
                size += other[SIZE]
            else:
                queue = self._queue
                queue.taken_elsewhere = self._elsewhere = taken
                queue.size_elsewhere = size
                return _enter(self, client, demand, deadline)
        self._read()
        return _enter(self, client, demand, deadline)

    def _read(self) -> None:
        """Take over what the others have. No place is free here for as long as a request of theirs
        comes first.
        """
        shared, queue = self._shared, self._queue
        shared.read()
        places, taken = self._own_places, shared.taken
        self._elsewhere = taken
        if shared.places is not None:
            places = min(places, shared.places)
        if self._engines_places is not None:
            places = min(places, self._engines_places)
        if shared.first is not None and shared.yields(self._since):
            taken = max(taken, places)
        queue.taken_elsewhere, queue.size_elsewhere, queue.waiting_elsewhere = (
            taken,
            shared.size,
            shared.waiting,
        )
        tokens = min(
            self._max_tokens or self._engines_tokens, self._engines_tokens or self._max_tokens
        )
        if places != queue.places or tokens != queue.max_size:
            queue.resize(places, tokens)
        self._plain = shared.first is None and shared.places is None and not shared.waiting
        self._quiet = self._quiet and shared.first is None

    def _show(self, taken: int | None = None, size: int | None = None) -> None:
        """Show the others what is taken here, and wake the one whose turn it is if a place is
        free.
        """
        shared, queue = self._shared, self._queue
        taken = queue.taken if taken is None else taken
        size = queue.size if size is None else size
        if not queue.waiting:
            shared.write(taken, size, 0, None, self._own_places, self._learned)
            self._quiet = shared.is_quiet
            if shared.first is not None and taken + self._elsewhere < queue.places:
                shared.wake()
            return
        self._quiet = False
        full = taken + self._elsewhere
        # A worker that would take no place, because it has found fewer of them right, asks for
        # none.
        since = self._since if full <= queue.places + 1 else None
        shared.write(taken, size, queue.waiting, since, self._own_places, self._learned)
        if full < queue.places and shared.yields(self._since):
            shared.wake()
        shared.look_again(self.look)

    @property
    def _since(self) -> float | None:
        """Since when the request waits here that is next, None if nobody waits."""
        first = self._queue.first()
        return None if first is None else self._began.get(first)

    def _give_back(self, entry: TenantRequest[Place], cost: float | None) -> None:
        # nearly always: what `Admission` does, without a call of it
        if self._quiet and not self._closed:
            queue, row = self._queue, self._row
            queue.leave(entry, cost)
            size = queue.size
            row[TAKEN] = queue.taken
            row[SIZE] = min(MOST_SIZE, size)
        elif self._queue.waiting:
            self._read()
            _give_back(self, entry, cost)
            self._read()  # whoever waits here may come first now, or last
            self._show()
            return
        else:
            _give_back(self, entry, cost)
            self._show()
        # read behind the write: a request that begins to wait now sees the free place
        for other in self._rows:
            if other[SINCE]:
                self.look()
                return

    async def _wait(self, client: Client, place: Place, patience: float) -> None:
        self._began[place] = self._clock.now()
        self._quiet = False
        self._read()
        self._show()
        try:
            await super()._wait(client, place, patience)
        finally:
            del self._began[place]
            self.look()

    def _begin(self, place: Place, taken: int) -> None:
        _begin(self, place, taken)
        size = self._queue.size
        if self._quiet:  # nobody waits here, so the queue has counted it already
            row = self._row
            row[TAKEN] = taken + 1
            row[SIZE] = min(MOST_SIZE, size)
            return
        entry = place.entry
        assert entry is not None
        self._show(taken + 1, size if entry.has_place else size + entry.size)

    def _resize(self) -> None:
        places = int(min(self._max_inflight, self._limit.places))
        bounds = places, self._engines_places, self._engines_tokens, self._max_tokens
        if bounds == self._bounds:  # what others have found is read with each request
            return
        self._bounds = bounds
        if places != self._own_places:
            self._own_places, self._learned = places, self._clock.now()
            self._quiet = False
        self._read()
