"""Passes KV events to the index, a bounded number of blocks in one turn of the event loop.

Owns the events that wait for it, per place. An event for many blocks is passed in parts.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from pdproxy.wire.kv_events import GPU, Cleared, ExtraKeys, Removed, Stored, Unreadable, read_event

BLOCKS_AT_ONCE = 512
"""Blocks that the index is given in one turn of the event loop, all places together: about a
millisecond.
"""
BYTES_PER_BLOCK, TOKENS_PER_BLOCK = 64, 64
"""Reading so many bytes of an event, or passing so many tokens on, takes as long as passing a block
on.
"""
BACKLOG_BYTES = 4 << 20
"""Bytes of events of one place that may wait: more is left with its engine."""
TOTAL_BYTES = 32 << 20
"""Bytes of all places' events that may wait."""


class Index(Protocol):
    """Which blocks of KV are where. A place is one data-parallel rank of one engine, as a small
    number.

    Nothing here waits or raises. Blocks are named by their engines' hashes (integers or bytes),
    `None` as the parent is the beginning of a prompt. What is announced twice is one entry.
    """

    def stored(
        self,
        place: int,
        block_hashes: Sequence[int | bytes],
        parent: int | bytes | None,
        token_ids: Sequence[int],
        block_size: int,
        medium: str,
        group: int,
        lora_name: str | None,
        extra_keys: Sequence[ExtraKeys | None] | None,
        *,
        counts: bool,
        from_start: bool = False,
    ) -> None:
        """Take note of blocks that follow each other behind `parent`.

        `token_ids`: `block_size` per block; none if only the hashes are known. `medium`: GPU, CPU
        or STORAGE. `extra_keys`: of each block a tuple or None. `counts`: whether the group's
        blocks must all be there for a hit. `from_start`: whether the event of which these are a
        part begins with a prompt's first block.
        """

    def removed(
        self, place: int, block_hashes: Sequence[int | bytes], medium: str, group: int
    ) -> object:
        """Take note that blocks are gone."""

    def cleared(self, place: int) -> None:
        """Take note that the engine has emptied its prefix cache."""

    def restart(self, place: int) -> None:
        """Forget all of a place: its engine has started again, or what is known of it may be
        wrong.
        """

    def add_place(self) -> int:
        """Return the number of a new place."""

    def remove_place(self, place: int) -> None:
        """Forget a place. Its number may be given again."""


@dataclass(slots=True)
class EventCounts:
    """What was counted: blocks by what happened to them, and what was skipped by the reason."""

    blocks: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class SourceCounts(EventCounts):
    """What was counted of all sources. `messages`: by engine and by what was done with them; `gaps`
    by engine.
    """

    messages: Counter[tuple[str, str]] = field(default_factory=Counter)
    gaps: Counter[tuple[str, str]] = field(default_factory=Counter)
    replays: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class Backlog:
    """The events of one place that wait. `resume` is called when there is room again after there
    was none. `counts`: of them.
    """

    place: int
    resume: Callable[[], None] = lambda: None
    counts: EventCounts = field(default_factory=EventCounts)
    events: deque[msgspec.Raw] = field(default_factory=deque)
    bytes: int = 0
    event: Stored | Removed | None = None
    """An event that is passed in parts, and how many blocks of it were."""
    passed: int = 0
    queued: bool = False


class Feed:
    """Passes events to `index` in the running event loop. `failed` gets each exception of the
    index: the events go on.
    """

    def __init__(self, index: Index, failed: Callable[[Exception], None]) -> None:
        self._index = index
        self._failed = failed
        self._waiting: deque[Backlog] = deque()
        self._blocked: set[Backlog] = set()
        self._bytes = 0
        self._running = False

    def __repr__(self) -> str:
        return f"<Feed {self._bytes} bytes of {len(self._waiting)} places wait>"

    @property
    def bytes(self) -> int:
        """Bytes of events that wait."""
        return self._bytes

    def room(self, backlog: Backlog) -> bool:
        """Return whether more events may be put. If not, `backlog.resume` is called once there is
        room.
        """
        if backlog.bytes < BACKLOG_BYTES and self._bytes < TOTAL_BYTES:
            return True
        self._blocked.add(backlog)
        return False

    def put(self, backlog: Backlog, events: Sequence[msgspec.Raw]) -> None:
        """Pass events to the index, behind those that wait."""
        backlog.events.extend(events)
        size = sum(map(_size, events))
        backlog.bytes += size
        self._bytes += size
        if backlog.events and not backlog.queued:
            backlog.queued = True
            self._waiting.append(backlog)
            if not self._running:
                self._running = True
                asyncio.get_running_loop().call_soon(self._turn)

    def drop(self, backlog: Backlog) -> None:
        """Drop what waits for a place."""
        self._bytes -= backlog.bytes
        backlog.events.clear()
        backlog.bytes, backlog.event = 0, None
        self._blocked.discard(backlog)

    def restart(self, backlog: Backlog) -> None:
        """Have all of a place forgotten, and what waits for it."""
        self.drop(backlog)
        self._index.restart(backlog.place)

    def _turn(self) -> None:
        budget = BLOCKS_AT_ONCE
        while budget > 0 and self._waiting:
            backlog = self._waiting.popleft()
            try:
                budget -= self._pass(backlog, budget)
            except Exception as error:  # a defect must not stop the events behind this one
                self._failed(error)
                backlog.event = None
                budget -= 1
            if backlog.event is not None or backlog.events:
                self._waiting.append(backlog)  # places take turns
            else:
                backlog.queued = False
        for backlog in [one for one in self._blocked if one.bytes < BACKLOG_BYTES // 2]:
            if self._bytes < TOTAL_BYTES:
                self._blocked.discard(backlog)
                backlog.resume()
        self._running = bool(self._waiting)
        if self._running:
            asyncio.get_running_loop().call_soon(self._turn)

    def _pass(self, backlog: Backlog, budget: int) -> int:
        """Pass an event on, or up to `budget` blocks of it. Return its cost in blocks."""
        if backlog.event is not None:
            return self._part(backlog, backlog.event, budget)
        if not backlog.events:
            return 0
        raw = backlog.events.popleft()
        size = _size(raw)
        backlog.bytes -= size
        self._bytes -= size
        cost = 1 + size // BYTES_PER_BLOCK
        event, unknown = read_event(raw)
        if unknown:
            backlog.counts.skipped["unknown_field"] += 1
        match event:
            case Stored() if not event.consistent:
                backlog.counts.skipped["inconsistent"] += 1
            case Stored() | Removed():
                if event.block_hashes:
                    backlog.event, backlog.passed = event, 0
                    if cost < budget:
                        cost += self._part(backlog, event, budget - cost)
            case Cleared():
                backlog.counts.blocks["cleared"] += 1
                self._index.cleared(backlog.place)
            case Unreadable():
                backlog.counts.skipped[event.value] += 1
        return cost

    def _part(self, backlog: Backlog, event: Stored | Removed, budget: int) -> int:
        start, count = backlog.passed, len(event.block_hashes)
        cost = 1 + event.block_size // TOKENS_PER_BLOCK if isinstance(event, Stored) else 1
        end = backlog.passed = min(start + max(1, budget // cost), count)
        if end == count:
            backlog.event = None
        all_of_it = start == 0 and end == count
        hashes = event.block_hashes if all_of_it else event.block_hashes[start:end]
        if isinstance(event, Removed):
            backlog.counts.blocks["removed"] += end - start
            self._index.removed(backlog.place, hashes, _medium(event.medium), event.group_idx or 0)
            return end - start
        size, keys = event.block_size, event.extra_keys
        # Groups that keep only some blocks name the tokens of all: they belong to no block then.
        ids = event.token_ids if len(event.token_ids) == count * size else []
        backlog.counts.blocks["stored"] += end - start
        self._index.stored(
            backlog.place,
            hashes,
            event.block_hashes[start - 1] if start else event.parent_block_hash,
            ids if all_of_it else ids[start * size : end * size],
            size,
            _medium(event.medium),
            event.group_idx or 0,
            event.lora_name,
            keys if keys is None or all_of_it else keys[start:end],
            counts=event.counts,
            from_start=event.parent_block_hash is None,
        )
        return cost * (end - start)


def _medium(name: str | None) -> str:
    """Return a medium's name in capitals: one connector of vLLM writes "cpu". Old releases have
    only the GPU.
    """
    return name.upper() if name else GPU


def _size(raw: msgspec.Raw) -> int:
    return memoryview(raw).nbytes + 32
