"""What a place holds, by the engine's hashes of blocks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdproxy.scheduling.prefix.matches import KeyBits
from pdproxy.scheduling.prefix.reading import BlockEnd, BlockEntries, Value


class Held:
    """What a place holds in one memory."""

    __slots__ = ("copies", "ends", "in_several", "size", "values")

    def __init__(self) -> None:
        self.values: dict[int, Value] = {}
        """The keys that end in a block, by its hash."""
        self.size = 0
        """The sizes of all its blocks (`size_of`)."""
        self.ends: dict[int, BlockEnd] = {}
        """Where blocks end that end inside a unit."""
        self.copies: dict[int, int] = {}
        """How many more blocks with the same hash the engine has: each is removed by itself."""
        self.in_several: dict[int, int] = {}
        """How many more blocks have a key: those of several units whose tokens begin alike, and
        differ behind that key.
        """

    def pop(self) -> Value:
        """Take the newest block out. Return those of its keys that no other one has."""
        block, value = self.values.popitem()
        self.ends.pop(block, None)
        self.copies.pop(block, None)
        self.size -= size_of(value)
        return value if isinstance(value, int) else tuple(self.released(value))

    def share(self, key_bits: KeyBits, values: Sequence[Value], bit: int) -> None:
        """Note the keys of new blocks that others have, too. Call it before they are added."""
        own: set[int] = set()
        for value in values:
            if isinstance(value, tuple):
                for key in value:
                    if key in own or key_bits.has(key, bit):
                        self.in_several[key] = self.in_several.get(key, 0) + 1
                    own.add(key)

    def released(self, value: Value) -> Sequence[int]:
        """Return the keys that no block has any more once a block with these is gone."""
        if isinstance(value, int):
            return (value,)
        if not self.in_several:
            return value
        gone = []
        for key in value:
            others = self.in_several.get(key, 0)
            if not others:
                gone.append(key)
            elif others == 1:
                del self.in_several[key]
            else:
                self.in_several[key] = others - 1
        return gone


class IndexPlace:
    """One place of the index, with its present bit."""

    __slots__ = ("asked", "bit", "group", "held", "reports")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.group: int | None = None
        """The group whose blocks are entered: the first one that counts. A second one would hold
        the same tokens.
        """
        self.held: dict[str, Held] = {}
        self.asked: dict[int, None] = {}
        """The first keys of prompts whose requests ask for a report that has not come."""
        self.reports = False
        """Whether the last event that began with a prompt's first block is such a report."""

    def has_come(self, key: int) -> bool:
        """Return whether a report was to come of a prompt with this first key. Now it has come."""
        if key not in self.asked:
            return False
        del self.asked[key]
        return True

    def blocks(self) -> int:
        """Return how many blocks it holds, in all its memories."""
        return sum(len(held.values) for held in self.held.values())

    def size(self) -> int:
        """Return the sizes of all its blocks."""
        return sum(held.size for held in self.held.values())

    def find(self, block: int) -> tuple[Value, BlockEnd] | None:
        """Return the keys that end in a block, and where it ends; None if it isn't known."""
        for held in self.held.values():
            value = held.values.get(block)
            if value is not None:
                if isinstance(value, int):
                    return value, BlockEnd(value, b"")
                return value, BlockEnd(value[-1], b"") if value else held.ends[block]
        return None


def size_of(value: Value) -> int:
    """Return what a block counts for: one, or its keys if it has several. One event can bring a
    block of 60,000 keys.
    """
    return 1 if isinstance(value, int) else len(value) or 1


def sizes_of(values: Iterable[Value]) -> int:
    """Return the sizes of these blocks together."""
    return sum(map(size_of, values))


def known_of(one: IndexPlace, hashes: Sequence[int]) -> BlockEntries:
    """Return those of these blocks that a place holds in any memory."""
    known: list[int] = []
    values: list[Value] = []
    ends: dict[int, BlockEnd] = {}
    for block in hashes:
        if found := one.find(block):
            value, end = found
            if value == ():
                ends[len(known)] = end
            known.append(block)
            values.append(value)
    return BlockEntries(known, values, ends)


def all_keys(values: Sequence[Value]) -> Sequence[int]:
    """Return the keys of these blocks, one after another."""
    if set(map(type, values)) == {int}:
        return values  # type: ignore[return-value]
    return [key for value in values for key in ((value,) if isinstance(value, int) else value)]
