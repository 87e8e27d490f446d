"""An engine's KV memory: pages that hold what was written last by any request, and the pool that
allocates them. Pure.

Owns the pages, their reference counts and the prefix cache. A freed page keeps its content until it
is written again, as on a GPU: a reader with an old block id gets what is there now. This causes the
silently wrong answers of a real engine, and of the simulator.

A real engine under load writes freed blocks again at once. A simulated one does so with the blocks
that another engine knows (`lend`): when they are freed, their ids get the content of another
prompt. The prefix cache keeps its pages under other ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from pdproxy_lab.sim.language import fold, mix

Page = tuple[int, tuple[int, ...]]
"""What the writer's attention had read before this page, and the page's tokens."""
EMPTY: Page = (0, ())
_UNWRITTEN = -2
"""The token that is read where nothing was written."""


class BlockPool:
    """Blocks 1 to n - 1 (0 is vLLM's null block). Blocks are reused in the order in which they were
    freed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pages: list[Page] = [EMPTY] * num_blocks
        self._references = [0] * num_blocks
        self._fresh = 1
        """This block and those behind it were never taken. They are free, and come before all in
        `_free`.
        """
        self._free: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._lent: set[int] = set()
        self._strangers = 0
        self.on_take: Callable[[Sequence[int]], None] = lambda blocks: None
        """Called with blocks that will be written again."""
        self.on_move: Callable[[int, int], None] = lambda block, other: None
        """Called when two blocks have exchanged their places in the prefix cache."""
        self.on_forget: Callable[[], None] = lambda: None
        """Called when the prefix cache was emptied."""

    @property
    def usage(self) -> float:
        """The share of blocks in use, 0 to 1."""
        return 1.0 - self.available / (len(self.pages) - 1)

    @property
    def available(self) -> int:
        """The number of blocks that can be allocated now."""
        return len(self.pages) - self._fresh + len(self._free)

    def find(self, keys: Sequence[int], limit: int) -> list[int]:
        """Return the blocks that hold a prefix, at most `limit`. They are not held yet: see
        `hold`.
        """
        found = []
        for key in keys[:limit]:
            block = self._cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def unused(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks are free now (holding them takes from what is
        available).
        """
        return sum(not self._references[block] for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Take blocks that the prefix cache found."""
        for block in blocks:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def take(self, count: int) -> list[int]:
        """Take free blocks; the caller has checked that there are enough. Their content stays until
        it is overwritten.
        """
        taken = []
        for _ in range(count):
            block = self._oldest()
            del self._free[block]
            key = self._key_of.pop(block, None)
            if key is not None:
                self._cached.pop(key, None)
            self._references[block] = 1
            taken.append(block)
        self.on_take(taken)
        return taken

    def _oldest(self) -> int:
        """Return the free block that is reused next."""
        if self._fresh == len(self.pages):
            return next(iter(self._free))
        block, self._fresh = self._fresh, self._fresh + 1
        self._free[block] = None
        self._free.move_to_end(block, last=False)
        return block

    def lend(self, blocks: Iterable[int]) -> None:
        """Take note that another engine knows the ids of these blocks: they are written again as
        soon as they are free.
        """
        self._lent.update(blocks)

    def unlend(self, blocks: Iterable[int]) -> None:
        """Let these blocks keep their content when they are freed, as on an engine without other
        work.
        """
        self._lent.difference_update(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Release a request's blocks, its last ones being reused first."""
        spare, lent = self.available, []
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
                if block in self._lent:
                    lent.append(block)
        for block in lent:
            self._lent.discard(block)
            if block in self._key_of and spare:
                spare -= 1
                self._exchange(block, self._oldest())
            elif block in self._key_of:
                del self._cached[self._key_of.pop(block)]
                self.on_take((block,))
            if block not in self._key_of:
                self._strangers += 1
                self.pages[block] = (mix(self._strangers, 5), ())

    def _exchange(self, block: int, other: int) -> None:
        """Exchange two free blocks in the prefix cache, with their pages; they are the last ones to
        be reused.
        """
        self.pages[block], self.pages[other] = self.pages[other], self.pages[block]
        key, other_key = self._key_of.pop(block), self._key_of.pop(other, None)
        self._key_of[other], self._cached[key] = key, other
        if other_key is not None:
            self._key_of[block], self._cached[other_key] = other_key, block
        self._free.move_to_end(other)
        self.on_move(block, other)

    def remember(self, blocks: Sequence[int], keys: Sequence[int]) -> None:
        """Put full blocks into the prefix cache under the hashes of their tokens (not of their
        content).
        """
        for block, key in zip(blocks, keys, strict=True):
            if key not in self._cached and block not in self._key_of:
                self._cached[key] = block
                self._key_of[block] = key

    def forget_all(self) -> None:
        """Empty the prefix cache."""
        self._cached.clear()
        self._key_of.clear()
        self.on_forget()

    def reset(self) -> bool:
        """Empty the prefix cache, unless blocks are in use. Return whether that was done."""
        if self.available < len(self.pages) - 1:
            return False
        self.forget_all()
        return True


class Attention:
    """What one request's attention reads: the digest of all positions before `_position`, folded
    token by token.

    A page that another request wrote after another text changes the digest, because its writer had
    read something else before it.
    """

    def __init__(self, pool: BlockPool, seed: int) -> None:
        self._pool = pool
        self._seed = seed
        self._digest, self._position = seed, 0

    def reset(self) -> None:
        """Forget what was read, since the pages will change."""
        self._digest, self._position = self._seed, 0

    def write(self, blocks: Sequence[int], tokens: Sequence[int], start: int, end: int) -> int:
        """Compute the KV of tokens[start:end] into the pages; return the digest of all positions up
        to `end`.
        """
        size, pages = self._pool.block_size, self._pool.pages
        digest, place = self._read_to(blocks, start), start
        while place < end:
            page, offset = divmod(place, size)
            until = min(end, (page + 1) * size)
            new = tuple(tokens[place:until])
            context, old = pages[blocks[page]] if offset else (digest, ())
            pages[blocks[page]] = (context, _exactly(old, offset) + new)
            for token in new:
                digest = fold(digest, token)
            place = until
        self._digest, self._position = digest, end
        return digest

    def _read_to(self, blocks: Sequence[int], end: int) -> int:
        size, pages = self._pool.block_size, self._pool.pages
        digest, place = self._digest, self._position
        while place < end:
            page, offset = divmod(place, size)
            until = min(end, (page + 1) * size)
            context, tokens = pages[blocks[page]]
            if not offset and context != digest:
                digest = fold(digest, context)
            for token in _exactly(tokens, until - page * size)[offset:]:
                digest = fold(digest, token)
            place = until
        return digest


def _exactly(tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    return (
        tokens[:count] if len(tokens) >= count else tokens + (_UNWRITTEN,) * (count - len(tokens))
    )


def block_keys(known: list[int], tokens: Sequence[int], block_size: int, salt: int) -> list[int]:
    """Extend `known` to the prefix-cache keys of all full blocks of `tokens`; return it."""
    while (len(known) + 1) * block_size <= len(tokens):
        start = len(known) * block_size
        known.append(hash((known[-1] if known else salt, *tokens[start : start + block_size])))
    return known
