"""An engine's KV memory as numbers: blocks in use, and the prefix cache of whole units of a prompt.
Pure.

A unit is a part of a prompt with a key; equal keys are equal tokens behind equal tokens. As in
vLLM, blocks that nobody uses keep their content until they are taken again, in the order in which
they were released.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class KVMemory:
    """`blocks` KV blocks; a unit of the prefix cache has `unit_blocks` of them."""

    def __init__(self, blocks: int, unit_blocks: int) -> None:
        self.blocks = blocks
        self.available = blocks
        """Blocks that can be taken now, those of the cache that nobody uses included."""
        self.least_available = blocks
        self._unit_blocks = unit_blocks
        self._fresh = blocks
        """Available blocks without content that anybody could use."""
        self._used: dict[int, int] = {}
        """The number of users of each cached unit that is in use."""
        self._idle: OrderedDict[int, int] = OrderedDict()
        """Blocks of what was released, oldest first: by the key of a unit, or below 0 what has no
        key.
        """
        self._released = 0

    def has(self, key: int) -> bool:
        """Return whether a unit is cached."""
        return key in self._idle or key in self._used

    def find(self, keys: Sequence[int], limit: int) -> tuple[int, int]:
        """Return how many units at the beginning are cached, at most `limit`, and how many
        available blocks they have.
        """
        used, idle, found, unused = self._used, self._idle, 0, 0
        for key in keys[:limit]:
            if key in idle:
                unused += 1
            elif key not in used:
                break
            found += 1
        return found, unused * self._unit_blocks

    def hold(self, keys: Sequence[int]) -> None:
        """Use cached units."""
        used, idle = self._used, self._idle
        for key in keys:
            if key in idle:
                self.available -= idle.pop(key)
                used[key] = 1
            else:
                used[key] += 1

    def take(self, count: int) -> None:
        """Take so many blocks; the caller has checked that they are available. What they held is
        forgotten.
        """
        self.available -= count
        if self.available < self.least_available:
            self.least_available = self.available
        fresh = self._fresh - count
        while fresh < 0:
            key, blocks = self._idle.popitem(last=False)
            fresh += blocks
            if fresh > 0 and key < 0:  # a part of it is left, still the oldest
                self._idle[key] = fresh
                self._idle.move_to_end(key, last=False)
                fresh = 0
        self._fresh = fresh

    def remember(self, key: int) -> bool:
        """Put a unit that was computed into the cache. Return whether it is this one: another one
        with its key may be there.
        """
        if key in self._used or key in self._idle:
            return False
        self._used[key] = 1
        return True

    def release(self, blocks: int, held: Sequence[int]) -> None:
        """Release a request's blocks, of which the units `held` are cached. The last ones are
        reused first.
        """
        used, idle = self._used, self._idle
        own = blocks - len(held) * self._unit_blocks
        self.available += own
        if idle or held:
            if own:
                self._released -= 1
                idle[self._released] = own
        else:
            self._fresh += own
        for key in reversed(held):
            if used[key] > 1:
                used[key] -= 1
            else:
                del used[key]
                idle[key] = self._unit_blocks
                self.available += self._unit_blocks
