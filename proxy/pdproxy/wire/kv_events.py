"""KV events of vLLM's engines: which blocks of KV an engine has stored and removed. Reads both
encodings that vLLM has had.

A message has three frames: `[topic, sequence number (8 bytes, big-endian), payload]`. A payload is
a msgpack array `[seconds since the epoch, events, data-parallel rank]`; the rank may be missing. An
event is a map with its name as `type`, or (older releases) an array with its name first. Source:
vLLM's `distributed/kv_events.py`.

Engines may be of any release, and anybody may reach a socket that is bound here: what is not known
is skipped, what can't be read is reported as `Unreadable`, and nothing here raises.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from pdproxy.kit.addresses import is_any

MAX_BYTES = 4 << 20
"""A longer message is refused: this is a prefix of 800,000 tokens that is announced again. Usual
ones have some KB.
"""
MAX_EVENTS = 1 << 16
"""Events of a message. A step that evicts its whole batch's blocks has some thousand."""
MAX_BLOCKS = 1 << 16
"""Blocks of an event: a prompt of a million tokens, 16 in each block."""
MAX_TOKENS = 1 << 20
MAX_PARTS = 1 << 10
"""Extra keys of a block, and parts of one of them. Even a block of 1,024 tokens has no more
media.
"""
MAX_HASH = 64
"""Bytes of a block's hash: 32 with SHA-256."""
MAX_NAME = 1024
END = b"\xff" * 8
"""The sequence number that ends the answer to a replay: -1."""
GPU = "GPU"
"""The medium of events of releases that name none."""

BlockHash = int | Annotated[bytes, msgspec.Meta(max_length=MAX_HASH)]
"""A block's hash as its engine names it: 64 bits as an integer, or
(`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`) all its bytes.
"""
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Scalar = str | bytes | int | float | None
ExtraKeys = tuple[Scalar | tuple[Scalar, ...], ...]
"""What else is in a block's hash: the LoRA adapter's name if there is one, (item, offset) of each
medium, the cache's salt, digests of embeddings, in this order.
"""

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
_Group = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
_Hashes = Annotated[list[BlockHash], msgspec.Meta(max_length=MAX_BLOCKS)]
_Tokens = Annotated[list[TokenId], msgspec.Meta(max_length=MAX_TOKENS)]
_Extra = Annotated[tuple[Any, ...], msgspec.Meta(max_length=MAX_PARTS)]
_FULL = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of groups in which each block of a prefix must be there for a hit (vLLM's subclasses of
`FullAttentionSpec`).
"""


class Stored(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    """Blocks were stored, or (`kv_cache_report_mode: full`) used again. They follow each other,
    behind `parent_block_hash`.

    `token_ids`: those of all blocks, `block_size` per block; of offloaded blocks there may be none.
    `extra_keys`: one entry per block. `group_idx`: the group of layers; `kv_cache_spec_kind`: how
    these layers read KV.
    """

    block_hashes: _Hashes
    parent_block_hash: BlockHash | None
    token_ids: _Tokens
    block_size: _Size
    lora_id: msgspec.Raw = msgspec.Raw()
    medium: _Name | None = None
    lora_name: _Name | None = None
    extra_keys: Annotated[list[_Extra | None], msgspec.Meta(max_length=MAX_BLOCKS)] | None = None
    """`ExtraKeys` of each block: hashable."""
    group_idx: _Group | None = None
    kv_cache_spec_kind: _Name | None = None
    kv_cache_spec_sliding_window: msgspec.Raw = msgspec.Raw()
    locality: msgspec.Raw = msgspec.Raw()
    ownership: msgspec.Raw = msgspec.Raw()
    session_id: msgspec.Raw = msgspec.Raw()

    @property
    def counts(self) -> bool:
        """Whether a prefix is cached only if this group has all of its blocks. Others (sliding
        windows, state) keep a few.
        """
        return self.kv_cache_spec_kind in _FULL

    @property
    def consistent(self) -> bool:
        """Whether the numbers of hashes, token ids and extra keys belong together."""
        count = len(self.block_hashes)
        if self.extra_keys is not None and len(self.extra_keys) != count:
            return False
        return (
            not self.token_ids or not self.counts or len(self.token_ids) == count * self.block_size
        )


class Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    """Blocks were evicted."""

    block_hashes: _Hashes
    medium: _Name | None = None
    group_idx: _Group | None = None
    locality: msgspec.Raw = msgspec.Raw()
    ownership: msgspec.Raw = msgspec.Raw()


class Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    """The prefix cache was emptied. vLLM publishes this with its next step: a cache that was just
    emptied says nothing.
    """


class _StrictStored(Stored, tag="BlockStored", forbid_unknown_fields=True, gc=False):
    pass


class _StrictRemoved(Removed, tag="BlockRemoved", forbid_unknown_fields=True, gc=False):
    pass


class _StrictCleared(Cleared, tag="AllBlocksCleared", forbid_unknown_fields=True, gc=False):
    pass


class _StoredArray(Stored, tag="BlockStored", array_like=True, gc=False):
    pass


class _RemovedArray(Removed, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedArray(Cleared, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _StrictStoredArray(
    Stored, tag="BlockStored", array_like=True, forbid_unknown_fields=True, gc=False
):
    pass


class _StrictRemovedArray(
    Removed, tag="BlockRemoved", array_like=True, forbid_unknown_fields=True, gc=False
):
    pass


class _StrictClearedArray(
    Cleared, tag="AllBlocksCleared", array_like=True, forbid_unknown_fields=True, gc=False
):
    pass


class _Type(msgspec.Struct):
    type: str


class _Outer(msgspec.Struct, array_like=True):
    ts: float
    events: msgspec.Raw
    data_parallel_rank: int | None = None


Event = Stored | Removed | Cleared


class Unreadable(enum.Enum):
    """Why an event is skipped."""

    UNKNOWN = "unknown_event"
    """Of a type that is not known here."""
    UNDECODABLE = "undecodable"


class EventBatch(msgspec.Struct, frozen=True):
    """A payload: the seconds since the epoch at which the engine published it, its events, each for
    `read_event`, its rank.
    """

    ts: float
    events: list[msgspec.Raw]
    rank: int | None


_SCALARS = frozenset({str, bytes, int, bool, float, type(None)})
_NAMES = {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
_FAILURES = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError)
_outer = msgspec.msgpack.Decoder(_Outer).decode
_raws = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_strict_map = msgspec.msgpack.Decoder(_StrictStored | _StrictRemoved | _StrictCleared).decode
_map = msgspec.msgpack.Decoder(Stored | Removed | Cleared).decode
_strict_array = msgspec.msgpack.Decoder(
    _StrictStoredArray | _StrictRemovedArray | _StrictClearedArray
).decode
_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray).decode
_type = msgspec.msgpack.Decoder(_Type).decode


def read_batch(payload: bytes) -> EventBatch | None:
    """Return what a payload holds, None if it is none."""
    try:
        outer = _outer(payload)
        if _array_length(bytes(memoryview(outer.events)[:5])) > MAX_EVENTS:
            return None
        return EventBatch(outer.ts, _raws(outer.events), outer.data_parallel_rank)
    except _FAILURES:
        return None


def read_event(raw: bytes | msgspec.Raw) -> tuple[Event | Unreadable, bool]:
    """Return an event, or why there is none; and whether it has fields that are not known here."""
    strict, tolerant = (_strict_array, _array) if _is_array(raw) else (_strict_map, _map)
    event: Event
    unknown = False
    try:
        event = strict(raw)
    except _FAILURES:
        try:
            event, unknown = tolerant(raw), True
        except _FAILURES:
            name = _name(raw)
            return (
                Unreadable.UNDECODABLE if name is None or name in _NAMES else Unreadable.UNKNOWN
            ), False
    if (
        isinstance(event, Stored)
        and event.extra_keys is not None
        and not _make_hashable(event.extra_keys)
    ):
        return Unreadable.UNDECODABLE, unknown
    return event, unknown


def _make_hashable(keys: list[tuple[Any, ...] | None]) -> bool:
    """Turn arrays in extra keys into tuples. Return False if there is something else than
    `ExtraKeys`.
    """
    for at, one in enumerate(keys):
        if one is None or _SCALARS.issuperset(map(type, one)):
            continue  # nearly all: checked without a loop of Python's over the parts
        keys[at] = found = tuple([tuple(key) if isinstance(key, list) else key for key in one])
        for key in found:
            parts = key if isinstance(key, tuple) else (key,)
            if len(parts) > MAX_PARTS or not _SCALARS.issuperset(map(type, parts)):
                return False
    return True


def _name(raw: bytes | msgspec.Raw) -> str | None:
    try:
        if not _is_array(raw):
            return _type(raw).type
        items = _raws(raw)
        return msgspec.msgpack.decode(items[0], type=str) if items else None
    except _FAILURES:
        return None


def _is_array(raw: bytes | msgspec.Raw) -> bool:
    head = memoryview(raw)[0] if len(memoryview(raw)) else 0
    return 0x90 <= head <= 0x9F or head in (0xDC, 0xDD)


def _array_length(head: bytes) -> int:
    """Return the length of a msgpack array by its first five bytes, 0 if it is none (which its
    decoder then refuses).
    """
    if not head:
        return 0
    if 0x90 <= head[0] <= 0x9F:
        return head[0] & 0x0F
    if head[0] == 0xDC:
        return int.from_bytes(head[1:3], "big")
    return int.from_bytes(head[1:5], "big") if head[0] == 0xDD else 0


def read_sequence(frame: bytes) -> int | None:
    """Return a message's sequence number, None if the frame is none (or ends a replay)."""
    number = int.from_bytes(frame, "big") if len(frame) == 8 else -1
    return number if 0 <= number < 1 << 63 else None


class EventPublisher(msgspec.Struct, frozen=True):
    """Where one data-parallel rank of an engine publishes: vLLM's `KVEventsConfig`, as `GET
    /kv_event_sources` answers it.

    An endpoint with a wildcard as its host is bound by the engine; to any other the engine connects
    (or it was `tcp://*:0`: vLLM then names the address that it has bound).
    """

    endpoint: _Name = "tcp://*:5557"
    replay_endpoint: _Name | None = None
    topic: _Name = ""
    enable_kv_cache_events: bool = True
    publisher: _Name | None = "zmq"


Sources = dict[int, EventPublisher]
"""By data-parallel rank."""
MAX_RANKS = 64
"""Ranks behind one URL whose events are read."""
_sources = msgspec.json.Decoder(
    dict[Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)], EventPublisher]
).decode


def read_sources(body: bytes) -> Sources | None:
    """Return what an engine has answered, None if it is something else. Ranks that publish nothing
    are left out.
    """
    try:
        found = _sources(body)
    except _FAILURES:
        return None
    return {
        rank: found[rank]
        for rank in sorted(found)[:MAX_RANKS]
        if found[rank].enable_kv_cache_events and found[rank].publisher == "zmq"
    }


def address_of(endpoint: str, host: str) -> tuple[str, int, bool] | None:
    """Return the host and the port of an endpoint `tcp://host:port`, and whether its host is a
    wildcard: then `host` replaces it.

    None: it is no such endpoint.
    """
    scheme, found, place = endpoint.partition("://")
    name, colon, port = place.rpartition(":")
    if (
        scheme != "tcp"
        or not found
        or not colon
        or not name
        or not port.isdecimal()
        or len(port) > 5
    ):
        return None
    if not 0 < int(port) < 1 << 16 or any(letter.isspace() or letter in "/;" for letter in name):
        return None
    wildcard = name == "*" or is_any(name)
    return (host if wildcard else name.removeprefix("[").removesuffix("]")), int(port), wildcard


def zmq_address(host: str, port: int) -> str:
    """Return the address of a host and a port for ZMQ."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def replayed(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Return a sequence number and its payload from an answer to a replay; None at the end.

    Answers are `["", topic, number, payload]`; up to vLLM 0.25, without the topic.

    Raises:
        ValueError: it is no such answer.
    """
    if len(frames) not in (3, 4) or frames[0]:
        raise ValueError("no answer to a replay")
    if frames[-2] == END:
        return None
    number = read_sequence(frames[-2])
    if number is None:
        raise ValueError("no sequence number")
    return number, frames[-1]
