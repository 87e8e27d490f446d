"""Notices that engines push over ZMQ: KV is ready, loaded, lost. Three formats of messages become
one frozen `Notice`.

Owns the reading of these formats, each a msgpack map in one frame: that of `pdproxy.notifier` (tag
"PdproxyKV"), that of LMCache ("ProxyNotif", in older releases "NixlProxyNotif"), and LMCache's
oldest, `{"req_id": ..}` without a tag. Anybody who reaches the port can send any bytes: everything
else is not a notice, and nothing here raises.
"""

from __future__ import annotations

import enum
import math
import re
from typing import Annotated

import msgspec

from pdproxy.wire.engine import UNREADABLE

MAX_BYTES = 1 << 20
"""A longer message is not a notice. The notifier's own limit is a quarter of it; without a handle a
notice has some 300 bytes.
"""
VERSION = 1
"""The version of the notifier's format: in a later one the same names may have another meaning."""

_NOTIFIER = "PdproxyKV"
_LMCACHE = ("ProxyNotif", "NixlProxyNotif", None)
_INTERNAL = re.compile(
    r"(?:cmpl-(.+)-[0-9]+|chatcmpl-(.+)|generate-tokens-(.+)|(.+)_0)-[0-9a-f]{8}", re.DOTALL
)

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
World = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
Text = Annotated[str, msgspec.Meta(max_length=200)]


class NoticeEvent(enum.Enum):
    """What happened to the KV of one prefill."""

    READY = "ready"
    """The prefill engine holds it, and the lease on it has begun."""
    LOADED = "loaded"
    """The decode engine has the KV: it pulled it, or had all of it in its own cache."""
    FAILED = "failed"
    """From the decode engine: the pull failed. From the prefill engine: it ended the request and
    holds nothing.
    """
    RELEASED = "released"
    """All readers are done and the prefill engine has freed its blocks."""
    EXPIRED = "expired"
    """Nobody read in time: the prefill engine has freed its blocks. An engine that pulls them now
    reads other requests' KV.
    """
    KEPT = "kept"
    """The decode engine keeps the finished request's KV for the conversation's next turn
    (bidirectional transfer alone).
    """


class Notice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of an engine. Fields that its sender doesn't send are None."""

    event: NoticeEvent
    request_id: str
    """The X-Request-Id of the prefill leg, also in notices of the decode engine."""
    remote_request_id: str | None = None
    """The prefill engine's internal id, which a handle carries by this name."""
    role: str | None = None
    """"P" or "D": on which side of this transfer the sender is."""
    engine_id: str | None = None
    rank: int | None = None
    """The sending rank; None if one notice is for all of them."""
    world: int | None = None
    """How many ranks send a notice each."""
    at: float | None = None
    """Monotonic seconds on the sender's machine: comparable only with those of the same engine."""
    tokens: int | None = None
    """ready: tokens of the prompt. loaded, failed: tokens that had to be pulled."""
    cached_tokens: int | None = None
    """ready, loaded: tokens of the prompt that the sender had in its own cache."""
    created_cache_tokens: int | None = None
    """ready: tokens that the prefill wrote to its prefix cache, as in its answer's usage."""
    blocks: int | None = None
    """ready: blocks in the handle. loaded, failed: blocks in the handle that was pulled."""
    moved_bytes: int | None = None
    """loaded: bytes over the network, of all ranks together."""
    seconds: float | None = None
    """loaded: duration of the slowest rank's transfer. released, expired: seconds since ready."""
    params: bytes | None = None
    """ready, kept: the answer's `kv_transfer_params`, a JSON object; absent if it is very long."""
    token_ids: bytes | None = None
    """ready: the prompt's token ids, a JSON array of integers; absent if it is very long."""
    reason: str | None = None
    """failed: the status with which the request ended. expired: for how many ranks the lease
    ended.
    """
    dropped: int = 0
    """Notices that this sender could not send since the one before."""


class _Tag(msgspec.Struct, frozen=True):
    type: str | None = None


class _LMCacheMessage(msgspec.Struct, frozen=True):
    req_id: Id


class _NotifierMessage(msgspec.Struct, frozen=True):
    v: int
    event: NoticeEvent
    req_id: Id
    remote_req_id: Id | None = None
    role: Text | None = None
    engine_id: Id | None = None
    rank: Rank | None = None
    world: World | None = None
    t: float | None = None
    tokens: Count | None = None
    cached: Count | None = None
    created: Count | None = None
    blocks: Count | None = None
    moved_bytes: Count | None = msgspec.field(default=None, name="bytes")
    seconds: float | None = None
    params: bytes | None = None
    prompt_ids: bytes | None = None
    reason: Text | None = None
    dropped: Count = 0


class _Object(msgspec.Struct):
    """Any JSON object. Nothing of it is kept."""


_tag = msgspec.msgpack.Decoder(_Tag)
_lmcache = msgspec.msgpack.Decoder(_LMCacheMessage)
_notifier = msgspec.msgpack.Decoder(_NotifierMessage)
_json = msgspec.json.Decoder(msgspec.Raw)
_json_object = msgspec.json.Decoder(_Object)


def decode(payload: bytes) -> Notice | None:
    """Read one message; None if it is not a notice. Unknown fields are ignored. Unknown events and
    versions are not notices.
    """
    if len(payload) > MAX_BYTES:
        return None
    try:
        kind = _tag.decode(payload).type
        if kind == _NOTIFIER:
            return _notice(_notifier.decode(payload))
        if kind in _LMCACHE:
            return Notice(event=NoticeEvent.READY, request_id=_lmcache.decode(payload).req_id)
    except UNREADABLE:
        pass
    return None


def _notice(message: _NotifierMessage) -> Notice | None:
    if message.v != VERSION or not _are_sane(message.t, message.seconds):
        return None
    if message.params is not None:
        _json_object.decode(message.params)
    if message.prompt_ids is not None and not _is_array_of_ids(message.prompt_ids):
        return None
    return Notice(
        event=message.event,
        request_id=message.req_id,
        remote_request_id=message.remote_req_id,
        role=message.role,
        engine_id=message.engine_id,
        rank=message.rank,
        world=message.world,
        at=message.t,
        tokens=message.tokens,
        cached_tokens=message.cached,
        created_cache_tokens=message.created,
        blocks=message.blocks,
        moved_bytes=message.moved_bytes,
        seconds=message.seconds,
        params=message.params,
        token_ids=message.prompt_ids,
        reason=message.reason,
        dropped=message.dropped,
    )


def _are_sane(*seconds: float | None) -> bool:
    return all(value is None or (math.isfinite(value) and value >= 0) for value in seconds)


def _is_array_of_ids(text: bytes) -> bool:
    """Return whether this is a JSON array of whole numbers, without making thousands of objects."""
    inner = text[1:-1]
    if text != b"[%b]" % inner or inner.translate(None, b"0123456789,"):
        return False
    _json.decode(text)
    return True


def request_id_of(internal_id: str) -> str:
    """Return the leg's id from which vLLM made its internal id; the id itself if it has another
    form.

    vLLM 0.32.0: `cmpl-<id>-<prompt's index>`, `chatcmpl-<id>` (chats, messages, Cohere's chat),
    `generate-tokens-<id>` or `<id>_0` (responses), and `-<8 hex digits>`.
    """
    found = _INTERNAL.fullmatch(internal_id)
    return internal_id if found is None else found[found.lastindex or 0]
