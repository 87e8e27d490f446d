"""The KV events of one core: what vLLM's `BlockPool` puts into its queue, in the same order. Pure.

Owns the events of the current step, and which hash each block has. Two blocks with the same content
have the same hash: vLLM announces both, and reports the hash as removed when one of them is reused,
although the other one is still there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.memory import BlockPool

GROUP = 0
"""The only group of layers."""
KIND = "full_attention"


class KvEventLog(Protocol):
    """Takes note of what happens to blocks of the prefix cache."""

    def stored(self, one: ActiveRequest, start: int, end: int) -> None:
        """Note that a request's blocks from `start` to `end` are full now."""

    def reused(self, one: ActiveRequest, count: int) -> None:
        """Note that a request begins with blocks of the cache."""

    def take(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""


class NoLog:
    """Without `--kv-events-config`."""

    def stored(self, one: ActiveRequest, start: int, end: int) -> None:
        """Note nothing."""

    def reused(self, one: ActiveRequest, count: int) -> None:
        """Note nothing."""

    def take(self) -> list[dict[str, Any]]:
        """Return none."""
        return []


class EngineEventLog:
    """Events as they are sent."""

    def __init__(self, pool: BlockPool) -> None:
        self._size = pool.block_size
        self._events: list[dict[str, Any]] = []
        self._hash_of: dict[int, int] = {}
        pool.on_take, pool.on_move, pool.on_forget = self._taken, self._moved, self._cleared

    def stored(self, one: ActiveRequest, start: int, end: int) -> None:
        """Announce blocks, even those whose content another block has, too."""
        for number in range(start, end):
            self._hash_of[one.blocks[number]] = block_hash(one.keys[number])
        self._announce(one, start, end)

    def reused(self, one: ActiveRequest, count: int) -> None:
        """Announce blocks again, if the request wants it (`kv_cache_report_mode: full`)."""
        if count and one.request.kv_cache_report_mode == "full":
            self._announce(one, 0, count)

    def _announce(self, one: ActiveRequest, start: int, end: int) -> None:
        salt = one.request.cache_salt
        extra = [
            (*self._pictures(one, number), *((salt,) if salt and number == 0 else ())) or None
            for number in range(start, end)
        ]
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": [block_hash(key) for key in one.keys[start:end]],
                "parent_block_hash": block_hash(one.keys[start - 1]) if start else None,
                "token_ids": one.tokens[start * self._size : end * self._size],
                "block_size": self._size,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": extra,
                "group_idx": GROUP,
                "kv_cache_spec_kind": KIND,
            }
        )

    def _pictures(self, one: ActiveRequest, number: int) -> list[tuple[str, int]]:
        """Return the pictures in a block, each with its place there."""
        begin, end = number * self._size, (number + 1) * self._size
        return [
            (medium.picture.identifier, medium.offset - begin)
            for medium in one.request.media
            if medium.places(begin, end)
        ]

    def _taken(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if (found := self._hash_of.pop(block, None)) is not None:
                event = {
                    "type": "BlockRemoved",
                    "block_hashes": [found],
                    "medium": "GPU",
                    "group_idx": GROUP,
                }
                self._events.append(event)

    def _moved(self, block: int, other: int) -> None:
        found, others = self._hash_of.pop(block, None), self._hash_of.pop(other, None)
        if found is not None:
            self._hash_of[other] = found
        if others is not None:
            self._hash_of[block] = others

    def _cleared(self) -> None:
        self._hash_of.clear()
        self._events.append({"type": "AllBlocksCleared"})

    def take(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


def block_hash(key: int) -> int:
    """Return a block's hash as events carry it: 64 bits without a sign."""
    return key & (1 << 64) - 1


def log_of(facts: SimFacts, pool: BlockPool) -> KvEventLog:
    """Return the log of an engine's core."""
    return (
        EngineEventLog(pool)
        if facts.kv_events is not None and facts.kv_events.publishes
        else NoLog()
    )
