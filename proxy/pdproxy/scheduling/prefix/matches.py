"""What all indexes share: places as bits of integers, keys to places, and the search for the
longest beginnings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

Steps = Iterable[Sequence[int]]
"""A prompt's keys in order, in one or more lists (`keys.PromptKeys`)."""

SHARDS = 256
"""One dict of millions of keys takes 0.1 s when it grows; a part of it less than a millisecond. A
power of 2.
"""
_SHARD = SHARDS - 1
_MASKS = 4096


@dataclass(frozen=True, slots=True)
class Matches:
    """How much of a prompt's beginning places hold, in units (`keys`). Places that hold nothing are
    missing.

    `gpu`: in the engine's GPU memory. `anywhere`: in any memory of it, GPU included; never less.
    """

    gpu: Mapping[int, int]
    anywhere: Mapping[int, int]

    def joined(self, other: Matches) -> Matches:
        """Return the longer one of both for each place."""
        return Matches(_longer(self.gpu, other.gpu), _longer(self.anywhere, other.anywhere))


def _longer(one: Mapping[int, int], other: Mapping[int, int]) -> Mapping[int, int]:
    if not other:
        return one
    longest = dict(one)
    for place, units in other.items():
        if units > longest.get(place, 0):
            longest[place] = units
    return longest


class Bits:
    """One bit per place. A bit is taken, then retired (it matches nothing), then free for another
    place.
    """

    def __init__(self) -> None:
        self.live = 0
        """The bits that are taken and not retired. Read only."""
        self._owners: list[int] = []
        self._free: list[int] = []

    def take(self, place: int) -> int:
        """Return the lowest free bit, as an integer with this bit alone."""
        at = heappop(self._free) if self._free else len(self._owners)
        if at == len(self._owners):
            self._owners.append(place)
        else:
            self._owners[at] = place
        bit = 1 << at
        self.live |= bit
        return bit

    def retire(self, bit: int) -> None:
        """Let a bit match nothing any more."""
        self.live &= ~bit

    def free(self, bit: int) -> None:
        """Give a retired bit back: no key has it any more."""
        heappush(self._free, bit.bit_length() - 1)

    def runs(self, ended: Iterable[tuple[int, int]]) -> dict[int, int]:
        """Return the length of each place's run from (length, bits of the places whose run ended
        there).
        """
        runs = {}
        for length, bits in ended:
            while bits:
                low = bits & -bits
                runs[self._owners[low.bit_length() - 1]] = length
                bits ^= low
        return runs


class KeyBits:
    """Keys with the bits of the places that hold them."""

    def __init__(self) -> None:
        self.shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        """By the lowest bits of the key. Read only."""
        self._masks: dict[int, int] = {}
        """Each combination of bits once: they take more memory than keys do."""

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def add(self, keys: Iterable[int], bit: int) -> None:
        """Note that a place holds these keys."""
        shards = self.shards
        for key in keys:
            shard = shards[key & _SHARD]
            bits = shard.setdefault(key, bit)
            if not bits & bit:
                shard[key] = self._shared(bits | bit)

    def has(self, key: int, bit: int) -> bool:
        """Return whether a place holds a key."""
        return bool(self.shards[key & _SHARD].get(key, 0) & bit)

    def discard(self, keys: Iterable[int], bit: int) -> bool:
        """Note that a place holds these keys no longer. Return whether it held any of them."""
        shards = self.shards
        held = False
        for key in keys:
            shard = shards[key & _SHARD]
            bits = shard.get(key, 0)
            if bits == bit:
                del shard[key]
                held = True
            elif bits & bit:
                shard[key] = self._shared(bits ^ bit)
                held = True
        return held

    def _shared(self, bits: int) -> int:
        if len(self._masks) >= _MASKS:
            self._masks.clear()
        return self._masks.setdefault(bits, bits)


def ended_runs(steps: Steps, held: KeyBits, live: int) -> list[tuple[int, int]]:
    """Return where the runs of places from a prompt's beginning end: (length, bits), for
    `Bits.runs`.

    It stops at the first key that no place holds behind all keys before it.
    """
    ended: list[tuple[int, int]] = []
    if not live:
        return ended
    shards = held.shards
    length = 0
    last: int | None = None
    for step in steps:
        for key in step:
            bits = shards[key & _SHARD].get(key, 0)
            if bits is not last:  # neighbours mostly have the same object
                last = bits
                gone = live & ~bits
                if gone:
                    ended.append((length, gone))
                    live ^= gone
                    if not live:
                        return _not_empty(ended)
            length += 1
    ended.append((length, live))
    return _not_empty(ended)


def ended_runs_anywhere(
    steps: Steps, gpu: KeyBits, others: Sequence[KeyBits], live: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the same for the GPU, and for the GPU and other memories together, in one pass."""
    in_gpu: list[tuple[int, int]] = []
    anywhere: list[tuple[int, int]] = []
    live_in_gpu, length = live, 0
    if not live:
        return in_gpu, anywhere
    for step in steps:
        for key in step:
            at = key & _SHARD
            bits = gpu.shards[at].get(key, 0)
            gone = live_in_gpu & ~bits
            if gone:
                in_gpu.append((length, gone))
                live_in_gpu ^= gone
            if live & ~bits:
                for other in others:
                    bits |= other.shards[at].get(key, 0)
                gone = live & ~bits
                if gone:
                    anywhere.append((length, gone))
                    live ^= gone
                    if not live:
                        return _not_empty(in_gpu), _not_empty(anywhere)
            length += 1
    in_gpu.append((length, live_in_gpu))
    anywhere.append((length, live))
    return _not_empty(in_gpu), _not_empty(anywhere)


def _not_empty(ended: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [one for one in ended if one[0] and one[1]]
