"""What was routed in the last seconds: engines report blocks only once they have computed them.
Pure.

Requests with the same beginning often come together. Without this all but the first one would seem
to match nothing yet. It is apart from the index that events keep (`block_index`), so that nothing
that did not happen stays there.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdproxy.scheduling.prefix.matches import Bits, KeyBits, Matches, Steps, ended_runs


class SpeculativeIndex:
    """Keys are held for `ttl` seconds at least and for less than twice as long, `max_keys` in each
    of two generations.

    A place needs no registration.
    """

    def __init__(self, ttl: float, max_keys: int) -> None:
        self.ttl = ttl
        self.max_keys = max_keys
        self.no_space = 0
        """Prompts that were not entered as a whole, for `max_keys`. Read only."""
        self._bits = Bits()
        self._places: dict[int, int] = {}
        self._young, self._old = KeyBits(), KeyBits()
        self._size = self._old_size = 0
        self._turned = float("-inf")
        self._retired: list[list[int]] = [[], []]
        """Bits of places that were removed, in the present generation and in the one before."""

    def __len__(self) -> int:
        """The number of keys; a key that several places hold counts at each."""
        return self._size + self._old_size

    def routed(self, place: int, steps: Steps, now: float) -> None:
        """Note that a prompt with these keys was sent to a place."""
        self._turn(now)
        bit = self._places.get(place)
        if bit is None:
            bit = self._places[place] = self._bits.take(place)
        for step in steps:
            if self._size + len(step) > self.max_keys:
                self.no_space += 1
                break  # what follows would be of no use
            # Keys of several places, or of one place several times, count several times: the bound
            # errs on the safe side.
            self._size += len(step)
            self._young.add(step, bit)

    def gone(self, place: int, keys: Iterable[int]) -> None:
        """Note that a place does not hold these keys any more."""
        bit = self._places.get(place)
        if bit is not None and (self._size or self._old_size):
            keys = list(keys)
            self._young.discard(keys, bit)
            self._old.discard(keys, bit)

    def remove_place(self, place: int) -> None:
        """Forget what was sent to a place, because it is gone or was started again."""
        bit = self._places.pop(place, None)
        if bit is not None:
            self._bits.retire(bit)
            self._retired[0].append(bit)

    def lookup(self, steps: Steps, now: float) -> Matches:
        """Return how much of a prompt's beginning was sent to each place within the time to
        live.
        """
        self._turn(now)
        live = self._bits.live
        young = self._bits.runs(ended_runs(steps, self._young, live))
        old = self._bits.runs(ended_runs(steps, self._old, live))
        return Matches(young, young).joined(Matches(old, old))

    def _turn(self, now: float) -> None:
        if now - self._turned < self.ttl:
            return
        late = now - self._turned >= 2 * self.ttl
        self._turned = now if late else self._turned + self.ttl
        for _ in range(2 if late else 1):
            if self._size or self._old_size:
                self._old, self._young = self._young, KeyBits()
            self._old_size, self._size = self._size, 0
            for bit in self._retired.pop():
                self._bits.free(bit)
            self._retired.insert(0, [])
