"""The place of a request among those that are served at once. See `admission`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from pdproxy.kit.fair_tenants import Entry
from pdproxy.serving.request.demand import Demand


class Ended(msgspec.Struct, frozen=True):
    """How a request ended its place.

    `seconds`: for how long the place was taken. `prompt`, `completion`: the tokens that the request had, None where no engine has
    reported any. `late`: whether it missed a deadline. `answered`: whether it got a whole answer.
    """

    seconds: float = 0.0
    prompt: int | None = None
    completion: int | None = None
    late: bool = False
    answered: bool = True


class Place(msgspec.Struct, eq=False):
    """A request's place, or its wait for one. Released by one `leave`, which calls `left`."""

    left: Callable[[Place, Ended], None]
    demand: Demand
    expected: float
    """How many tokens its answers are likely to have."""
    entry: Entry[Place] | None = None
    """None before it is in the queue, and after its end."""
    begun: float = 0.0
    served_before: float = 0.0
    """When it got its place, and for how many seconds in sum requests had had places until then."""
    time: float | None = None
    """The seconds that it had from its arrival on, None if its client named none."""
    wake: asyncio.Future[None] | None = None
    """Done once the place is granted or refused. None if it was free."""

    def out_of_queue(self) -> Entry[Place]:
        """Return its entry, and refer to it no more: they refer to each other."""
        entry, self.entry = self.entry, None
        assert entry is not None
        return entry

    def grant(self) -> bool:
        """Grant the place to a request that waits for it. Return False if it was cancelled or refused, and has not run since."""
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
        """Release the place: it is granted to a request that waits, if there is one. The arguments: see `Ended`."""
        self.left(self, Ended(seconds, prompt, completion, late, answered))
