"""Finds the sequences that have the longest beginning in common with another one. Pure.

A sorted list: of all its sequences, a neighbour of the place where another one would be inserted
has the longest common beginning with it. So a search compares a dozen sequences of thousands,
whatever they are: no hash can be made to collide.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


def common_prefix(one: bytes, other: bytes) -> int:
    """Return how many bytes two sequences have in common at their beginning."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    low, high = 0, size - 1  # the first different byte is in [low, high]
    while low < high:
        middle = (low + high) // 2
        if one[low : middle + 1] == other[low : middle + 1]:
            low = middle + 1
        else:
            high = middle
    return low


class PrefixIndex(Generic[_T]):
    """Values by sequences of bytes. Several values may have the same sequence."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._values: list[_T] = []

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: bytes, value: _T) -> None:
        """Add a value."""
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self._values.insert(at, value)

    def remove(self, key: bytes, value: _T) -> None:
        """Remove a value that was added with this key.

        Raises:
            KeyError: there is none.
        """
        at = bisect_left(self._keys, key)
        while at < len(self._keys) and self._keys[at] == key:
            if self._values[at] is value:
                del self._keys[at], self._values[at]
                return
            at += 1
        raise KeyError(key[:16])

    def nearest(self, key: bytes, limit: int) -> Iterator[tuple[int, _T]]:
        """Yield up to `limit` values with the bytes that their keys have in common with this one,
        the most first.

        The index must not change meanwhile.
        """
        keys, values = self._keys, self._values
        after = bisect_left(keys, key)
        before = after - 1
        left = common_prefix(keys[before], key) if before >= 0 else -1
        right = common_prefix(keys[after], key) if after < len(keys) else -1
        for _ in range(limit):
            if left < 0 and right < 0:
                return
            if left >= right:
                yield left, values[before]
                before -= 1
                left = common_prefix(keys[before], key) if before >= 0 else -1
            else:
                yield right, values[after]
                after += 1
                right = common_prefix(keys[after], key) if after < len(keys) else -1
