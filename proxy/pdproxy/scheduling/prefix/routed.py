"""What was routed to engines that report no KV events, as far as they may still hold it. Pure."""

from __future__ import annotations

from itertools import islice

from pdproxy.scheduling.prefix.matches import Bits, KeyBits, Matches, Steps, ended_runs

_AT_ONCE = 64


class RoutedIndex:
    """Per place the keys that were routed to it last, `capacity` at most unless the place has its own (`set_capacity`).

    Engines forget the least recently used blocks, of one prompt the last ones first. So does this. A place needs no registration.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """In keys: the engine's KV blocks, where a key is a block."""
        self._bits = Bits()
        self._held = KeyBits()
        self._places: dict[int, tuple[int, dict[int, None]]] = {}
        self._capacities: dict[int, int] = {}

    def __len__(self) -> int:
        """The number of keys of all places."""
        return sum(len(keys) for _, keys in self._places.values())

    def set_capacity(self, place: int, keys: int) -> None:
        """Set how many keys a place can hold. It takes effect when the next prompt is routed there."""
        self._capacities[place] = keys

    def routed(self, place: int, steps: Steps) -> None:
        """Note that a prompt with these keys was sent to a place. Keys beyond the place's capacity are left out."""
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
        for key in reversed(prompt):  # the first block is the last one to go
            keys.pop(key, None)
            keys[key] = None
        while (excess := len(keys) - capacity) > 0:
            # In batches: a dict finds its first key slowly when many before it were deleted.
            oldest = list(islice(keys, min(excess, _AT_ONCE)))
            for key in oldest:
                del keys[key]
            self._held.discard(oldest, bit)

    def remove_place(self, place: int) -> None:
        """Forget what was sent to a place, because it is gone or was started again."""
        self._capacities.pop(place, None)
        known = self._places.pop(place, None)
        if known is not None:
            bit, keys = known
            self._held.discard(keys, bit)
            self._bits.retire(bit)
            self._bits.free(bit)

    def lookup(self, steps: Steps) -> Matches:
        """Return how much of a prompt's beginning each place holds, as far as routing tells."""
        runs = self._bits.runs(ended_runs(steps, self._held, self._bits.live))
        return Matches(runs, runs)
