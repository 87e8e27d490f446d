"""What an engine's event says of its blocks, as keys. Source: vLLM 0.32.0
`distributed/kv_events.py`, `v1/core/block_pool.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pdproxy.scheduling.prefix.keys import MASK, TOKEN_BYTES, behind, chain, pack, root

GPU = "GPU"
_MEDIA = frozenset({GPU, "CPU", "STORAGE"})
_OTHER = "OTHER"
"""All kinds of memory that vLLM itself doesn't have."""

BlockHash = int | bytes
"""As events carry it: 64 bits as an integer, or all bytes of the hash."""

Value = int | tuple[int, ...]
"""The keys that end in a block: one; several if the engine's block has several units; none if it
ends inside a unit.
"""


class BlockEnd(NamedTuple):
    """Where a block ends: behind `key`, and behind `carried` packed token ids of a unit that isn't
    whole yet.
    """

    key: int
    carried: bytes


class BlockEntries(NamedTuple):
    """Blocks for an index: their hashes, the keys of each, and where those end that end inside a
    unit, by their position.
    """

    hashes: list[int]
    values: Sequence[Value]
    ends: dict[int, BlockEnd]


class OddEventError(Exception):
    """An event whose blocks have no keys here: sizes that don't fit, or ids that are none."""


def folded(hashes: Sequence[BlockHash]) -> list[int]:
    """Return block hashes in the size of keys. Both forms of one hash give the same."""
    try:
        return [one & MASK for one in hashes]  # type: ignore[operator]
    except TypeError:
        return [
            one & MASK if isinstance(one, int) else int.from_bytes(one[-8:], "big") & MASK
            for one in hashes
        ]


def medium_of(name: str) -> str:
    """Return a kind of memory: one of four."""
    name = name.upper()
    return name if name in _MEDIA else _OTHER


def first(lora_name: str | None, extra_keys: Sequence[Any] | None) -> BlockEnd:
    """Return where the blocks of an event without a parent begin."""
    rest = _rest(extra_keys[0], lora_name) if extra_keys else ()
    salt = rest[-1] if rest and isinstance(rest[-1], str) else None
    return BlockEnd(root(lora_name, salt), b"")


def read(
    begin: BlockEnd,
    hashes: list[int],
    token_ids: Sequence[int],
    block_size: int,
    unit: int,
    lora_name: str | None,
    extra_keys: Sequence[Any] | None,
    *,
    at_start: bool,
) -> BlockEntries:
    """Return the blocks of these hashes, which follow `begin`. `at_start`: the first one is a
    prompt's first block.

    Raises:
        OddEventError: the blocks have no keys.
    """
    count = len(hashes)
    if len(token_ids) != count * block_size:
        raise OddEventError("token ids that aren't whole blocks")
    try:
        data = pack(token_ids)
        extras = None
        if extra_keys is not None and extra_keys.count(None) < len(extra_keys):
            extras = _extras(extra_keys, count, lora_name, at_start=at_start)
        if block_size == unit and not begin.carried and extras is None:
            return BlockEntries(hashes, chain(begin.key, data, unit * TOKEN_BYTES), {})
        values, ends = _uneven(
            begin, data, block_size * TOKEN_BYTES, unit * TOKEN_BYTES, extras or [()] * count
        )
        return BlockEntries(hashes, values, ends)
    except (OverflowError, TypeError, RecursionError) as error:
        raise OddEventError(str(error)) from None


def _rest(extra: Sequence[object] | None, lora_name: str | None) -> tuple[object, ...]:
    """Return a block's extra keys without the adapter's name."""
    if not extra:
        return ()
    return tuple(extra[1:] if lora_name is not None and extra[0] == lora_name else extra)


def _extras(
    extra_keys: Sequence[Any], count: int, lora_name: str | None, *, at_start: bool
) -> list[tuple[Any, ...]] | None:
    """Return what else than adapter and salt the blocks depend on, None if nothing.

    Extra keys are untagged, in this order: the adapter's name, pairs of a media item's id and its
    offset (in older versions ids alone), the salt as a string (first block only), digests of prompt
    embeddings.
    """
    if len(extra_keys) != count:
        raise OddEventError("extra keys that aren't one for each block")
    extras = [_rest(one, lora_name) for one in extra_keys]
    if at_start and extras[0] and isinstance(extras[0][-1], str):
        extras[0] = extras[0][:-1]  # the root has it
    return extras if any(extras) else None


def _uneven(
    begin: BlockEnd, data: bytes, block: int, unit: int, extras: Sequence[tuple[Any, ...]]
) -> tuple[list[tuple[int, ...]], dict[int, BlockEnd]]:
    """Return the keys of blocks that aren't one unit each, or that depend on more than their
    tokens. All sizes in bytes.
    """
    if block % unit and unit % block:
        raise OddEventError("a block size that is no multiple of the unit, nor a part of it")
    key, carried = begin
    values: list[tuple[int, ...]] = []
    ends = {}
    for at, extra in enumerate(extras):
        if extra:
            key = behind(key, (len(carried), extra))
        carried += data[at * block : (at + 1) * block]
        whole = len(carried) - len(carried) % unit
        if whole and whole < len(carried):
            raise OddEventError("blocks of different sizes that overlap units")
        keys = tuple(chain(key, carried[:whole], unit))
        if keys:
            key, carried = keys[-1], b""
        else:
            ends[at] = BlockEnd(key, carried)
        values.append(keys)
    return values, ends
