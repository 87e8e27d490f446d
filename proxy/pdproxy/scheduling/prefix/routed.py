"""What was routed to engines that report no KV events, as far as they may still hold it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from pdproxy.scheduling.prefix.matches import Bits, KeyBits, Matches, Steps, ended_runs

_AT_ONCE = 64


class RoutedIndex:
    """Per place the keys that were routed to it last, `capacity` at most unless the place has its
    own (`set_capacity`).

    Engines say themselves how much they hold, so all places together have `max_keys` at most: then
    the largest one loses some. Engines forget the least recently used blocks, of one prompt the
    last ones first. So does this. A place needs no registration.
    """

    def __init__(self, capacity: int, max_keys: int = 2_000_000) -> None:
        self.capacity = capacity
        """In keys: the engine's KV blocks, where a key is a block."""
        self.max_keys = max_keys
        self._bits = Bits()
        self._held = KeyBits()
        self._places: dict[int, tuple[int, dict[int, None]]] = {}
        self._capacities: dict[int, int] = {}
        self._size = 0
        self._leaving: deque[tuple[int, dict[int, None]]] = deque()
        """Bits that are retired, with their keys."""

    def __len__(self) -> int:
        """The number of keys of all places."""
        return self._size

    def set_capacity(self, place: int, keys: int) -> None:
        """Set how many keys a place can hold. It takes effect when the next prompt is routed
        there.
        """
        self._capacities[place] = keys

    def routed(self, place: int, steps: Steps) -> None:
        """Note that a prompt with these keys was sent to a place. Keys beyond the place's capacity
        are left out.
        """
        capacity = self._capacities.get(place, self.capacity)
        known = self._places.get(place)
        if known is None:
            known = self._places[place] = (self._bits.take(place), {})
        bit, keys = known
        prompt: list[int] = []
        for step in steps:
            prompt.extend(step)
            if len(prompt) >= capacity:
                del prompt[capacity:]
                break
        self._held.add(prompt, bit)
        before = len(keys)
        for key in reversed(prompt):  # the first block is the last one to go
            keys.pop(key, None)
            keys[key] = None
        self._size += len(keys) - before
        self._evict(bit, keys, len(keys) - capacity)
        while (excess := self._size - self.max_keys) > 0:
            bit, keys = max(self._places.values(), key=lambda one: len(one[1]))
            self._evict(bit, keys, min(excess, len(keys)))

    def _evict(self, bit: int, keys: dict[int, None], count: int) -> None:
        while count > 0:
            # In batches: a dict finds its first key slowly when many before it were deleted.
            oldest = list(islice(keys, min(count, _AT_ONCE)))
            for key in oldest:
                del keys[key]
            self._held.discard(oldest, bit)
            self._size -= len(oldest)
            count -= len(oldest)

    def forget(self, place: int) -> None:
        """Forget what was sent to a place. Its capacity stays."""
        known = self._places.pop(place, None)
        if known is not None:
            self._bits.retire(known[0])
            self._size -= len(known[1])
            self._leaving.append(known)

    def remove_place(self, place: int) -> None:
        """Forget a place, because it is gone or was started again."""
        self._capacities.pop(place, None)
        self.forget(place)

    def gone(self, place: int, prompt: Iterable[int]) -> None:
        """Note that a place turned out not to hold these keys."""
        known = self._places.get(place)
        if known is not None:
            bit, keys = known
            wrong = [key for key in prompt if key in keys]
            for key in wrong:
                del keys[key]
            self._held.discard(wrong, bit)
            self._size -= len(wrong)

    def tidy(self, limit: int) -> bool:
        """Remove up to `limit` keys of places that are gone. They match nothing already. Return
        whether there are more.
        """
        while self._leaving and limit > 0:
            bit, keys = self._leaving[0]
            some = [keys.popitem()[0] for _ in range(min(limit, len(keys)))]
            self._held.discard(some, bit)
            limit -= len(some) + 1
            if not keys:
                self._leaving.popleft()
                self._bits.free(bit)
        return bool(self._leaving)

    def lookup(self, steps: Steps) -> Matches:
        """Return how much of a prompt's beginning each place holds, as far as routing tells."""
        runs = self._bits.runs(ended_runs(steps, self._held, self._bits.live))
        return Matches(runs, runs)
