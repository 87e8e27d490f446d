"""LMCache's view of a prompt: chunks of tokens, each named by a hash of all tokens up to its end,
and their pages. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.memory import BlockPool, Page
from pdproxy_lab.sim.storage import key_of


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens `start` to `end` of a prompt. A last, unfilled chunk has its own name."""

    key: str
    start: int
    end: int


def chunks_of(tokens: Sequence[int], size: int, salt: object) -> Iterator[Chunk]:
    """Yield a prompt's chunks, the last one however short; `salt`: what else makes KV differ."""
    key = key_of(salt)
    for start in range(0, len(tokens), size):
        end = min(start + size, len(tokens))
        key = key_of(key, tuple(tokens[start:end]))
        yield Chunk(key, start, end)


def read(one: ActiveRequest, chunk: Chunk, pool: BlockPool) -> tuple[Page, ...]:
    """Return the pages of a chunk of a request. A chunk begins with a page."""
    size = pool.block_size
    pages = []
    for place in range(chunk.start, chunk.end, size):
        context, tokens = pool.pages[one.blocks[place // size]]
        pages.append((context, tokens[: chunk.end - place]))
    return tuple(pages)


def write(one: ActiveRequest, chunk: Chunk, pages: Sequence[Page], pool: BlockPool) -> None:
    """Put a chunk's pages into a request's blocks."""
    for place, page in zip(range(chunk.start, chunk.end, pool.block_size), pages, strict=True):
        pool.pages[one.blocks[place // pool.block_size]] = page
