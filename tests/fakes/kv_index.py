"""An index of KV blocks that only takes note, and messages with KV events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

Hash = int | bytes


class PlainIndex:
    """Which blocks each place has, by hash, and all calls in their order."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[Hash, tuple[int, ...]]] = {}
        """By place: the token ids of each block."""
        self.calls: list[tuple[Any, ...]] = []
        self.fails = 0
        """How many calls fail."""

    def _call(self, *call: Any) -> None:
        self.calls.append(call)
        if self.fails:
            self.fails -= 1
            raise ValueError("made to fail")

    def stored(
        self,
        place: int,
        block_hashes: Sequence[Hash],
        parent: Hash | None,
        token_ids: Sequence[int],
        block_size: int,
        medium: str,
        group: int,
        lora_name: str | None,
        extra_keys: Sequence[object] | None,
        *,
        counts: bool,
        from_start: bool = False,
    ) -> None:
        self._call(
            "stored",
            place,
            list(block_hashes),
            parent,
            list(token_ids),
            block_size,
            medium,
            group,
            counts,
        )
        for number, found in enumerate(block_hashes):
            self.blocks[place][found] = tuple(
                token_ids[number * block_size : (number + 1) * block_size]
            )

    def removed(self, place: int, block_hashes: Sequence[Hash], medium: str, group: int) -> None:
        self._call("removed", place, list(block_hashes), medium, group)
        for found in block_hashes:
            self.blocks[place].pop(found, None)

    def cleared(self, place: int) -> None:
        self._call("cleared", place)
        self.blocks[place].clear()

    def restart(self, place: int) -> None:
        self._call("restart", place)
        self.blocks[place].clear()

    def add_place(self) -> int:
        place = next(number for number in range(len(self.blocks) + 1) if number not in self.blocks)
        self.blocks[place] = {}
        return place

    def remove_place(self, place: int) -> None:
        self._call("remove_place", place)
        del self.blocks[place]

    def count(self, name: str) -> int:
        """How often a method was called."""
        return sum(call[0] == name for call in self.calls)

    @property
    def hashes(self) -> set[Hash]:
        """The hashes of all places."""
        return {found for blocks in self.blocks.values() for found in blocks}


def stored(*hashes: Hash, parent: Hash | None = None, size: int = 4, **more: Any) -> dict[str, Any]:
    """An event: blocks with token ids that count up."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(range(size * len(hashes))),
        "block_size": size,
        **more,
    }


def removed(*hashes: Hash, **more: Any) -> dict[str, Any]:
    """An event."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), **more}


def payload(*events: object, ts: float = 1.0) -> bytes:
    """The payload of a message."""
    return msgspec.msgpack.encode([ts, events, 0])


def raws(*events: object) -> list[msgspec.Raw]:
    """Events as a batch holds them."""
    return [msgspec.Raw(msgspec.msgpack.encode(event)) for event in events]
