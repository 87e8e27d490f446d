"""The requests that wait for a step, in vLLM's order: first those that hold KV blocks because their
KV came from elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.memory import BlockPool


class WaitingRequests:
    """Two queues. One that holds blocks never waits behind one that needs some: both could wait for
    ever.
    """

    def __init__(self) -> None:
        self._with_blocks: deque[ActiveRequest] = deque()
        self._others: deque[ActiveRequest] = deque()
        self._skipped: list[ActiveRequest] = []
        self.deferred: set[ActiveRequest] = set()
        """Those that were skipped when it was their turn."""

    def __len__(self) -> int:
        return len(self._with_blocks) + len(self._others)

    def add(self, sequence: ActiveRequest) -> None:
        """Queue a new request by priority, lower numbers first, then by arrival."""
        queue = self._others
        place = len(queue)
        while place and queue[place - 1].request.priority > sequence.request.priority:
            place -= 1
        queue.insert(place, sequence)

    def put_back(self, sequence: ActiveRequest) -> None:
        """Queue a request that was scheduled before: before all others, or behind those that hold
        blocks if it holds some.
        """
        if sequence.blocks:
            self._with_blocks.append(sequence)
        else:
            self._others.appendleft(sequence)

    @property
    def first(self) -> ActiveRequest:
        """The next one. There must be one."""
        return self._with_blocks[0] if self._with_blocks else self._others[0]

    def skip(self, sequence: ActiveRequest) -> None:
        """Let the others come before the next one, until `unskip`."""
        self.remove(sequence)
        self._skipped.append(sequence)
        self.deferred.add(sequence)

    def unskip(self) -> None:
        """Put those that were skipped back where they were."""
        while self._skipped:
            sequence = self._skipped.pop()
            (self._with_blocks if sequence.blocks else self._others).appendleft(sequence)

    def remove(self, sequence: ActiveRequest) -> None:
        """Remove a request.

        Raises:
            ValueError: it does not wait.
        """
        queue = self._with_blocks if sequence in self._with_blocks else self._others
        queue.remove(sequence)
        self.deferred.discard(sequence)


def fits_whole(sequence: ActiveRequest, running: Iterable[ActiveRequest], pool: BlockPool) -> bool:
    """Return whether a waiting request may begin: all of it must fit (vLLM's
    `scheduler_reserve_full_isl`, on by default).

    `running`: requests whose missing blocks stay free. A request whose KV comes from elsewhere
    can't be preempted meanwhile.
    """
    size = pool.block_size
    return (
        sequence.blocks_missing(size) + sum(other.blocks_missing(size) for other in running)
        <= pool.available
    )
