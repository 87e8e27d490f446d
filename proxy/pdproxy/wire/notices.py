"""Notices that engines push over ZMQ: KV is ready, loaded, lost. Three generations of messages end as one frozen `Notice`.

Owns the reading of three wires, each a msgpack map in a frame of its own: that of `pdproxy.notifier` (tag "PdproxyKV"), LMCache's
("ProxyNotif", in older releases "NixlProxyNotif"), and LMCache's oldest, `{"req_id": ..}` without a tag. Whoever reaches the port
can send anything: what isn't one of these is no notice, whatever its bytes, and nothing here raises.
"""

from __future__ import annotations

import enum
import math
import re
from typing import Annotated

import msgspec

from pdproxy.wire.engine import UNREADABLE

MAX_BYTES = 1 << 20
"""A longer message is no notice. The notifier's own limit is a quarter of it; without a handle a notice has some 300 bytes."""
VERSION = 1
"""Of the notifier's wire: a later one may mean something else by the same names."""

_OURS = "PdproxyKV"
_LMCACHE = ("ProxyNotif", "NixlProxyNotif", None)
_INTERNAL = re.compile(r"(?:cmpl-(?P<completion>.+)-[0-9]+|chatcmpl-(?P<chat>.+))-[0-9a-f]{8}", re.DOTALL)

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
World = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
Word = Annotated[str, msgspec.Meta(max_length=200)]


class Event(enum.Enum):
    """What happened to the KV of one prefill."""

    READY = "ready"
    """The prefill engine holds it, and the lease on it has begun."""
    LOADED = "loaded"
    """The decode engine has it: it pulled it, or found all of it in its own cache."""
    FAILED = "failed"
    """From the decode engine: the pull failed. From the prefill engine: it ended the request and holds nothing."""
    RELEASED = "released"
    """All readers are done and the prefill engine has freed its blocks."""
    EXPIRED = "expired"
    """Nobody read in time: the prefill engine has freed its blocks, and who pulls them now reads somebody else's."""
    KEPT = "kept"
    """The decode engine keeps the finished request's KV for the conversation's next turn (bidirectional transfer alone)."""


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One message of an engine. What its sender doesn't say is None."""

    event: Event
    request_id: str
    """The X-Request-Id of the prefill leg, in notices of the decode engine, too."""
    remote_request_id: str | None = None
    """The prefill engine's internal id, which a handle carries by this name."""
    role: str | None = None
    """"P" or "D": on which side of this transfer the sender is."""
    engine_id: str | None = None
    rank: int | None = None
    """The sending worker; None where one notice speaks for all of them."""
    world: int | None = None
    """How many workers will send one each."""
    at: float | None = None
    """Monotonic seconds on the sender's machine: comparable with the same engine's alone."""
    tokens: int | None = None
    """ready: of the prompt. loaded, failed: that were to be pulled."""
    cached_tokens: int | None = None
    """ready, loaded: of the prompt, that the sender had in its own cache."""
    created_cache_tokens: int | None = None
    """ready: that the prefill wrote to its prefix cache, as in its answer's usage."""
    blocks: int | None = None
    """ready: in the handle. loaded, failed: in the handle that was pulled."""
    moved_bytes: int | None = None
    """loaded: over the network, all workers together."""
    seconds: float | None = None
    """loaded: the slowest worker's transfer. released, expired: since ready."""
    params: bytes | None = None
    """ready, kept: the answer's `kv_transfer_params`, a JSON object; absent where it is very long."""
    token_ids: bytes | None = None
    """ready: the prompt's token ids, a JSON array of integers; absent where it is very long."""
    reason: str | None = None
    """failed: the status with which the request ended. expired: how many of the workers gave up."""
    dropped: int = 0
    """Notices that this sender could not send since the last one that it could."""


class _Tag(msgspec.Struct, frozen=True):
    type: str | None = None


class _LMCache(msgspec.Struct, frozen=True):
    req_id: Id


class _Ours(msgspec.Struct, frozen=True):
    v: int
    event: Event
    req_id: Id
    remote_req_id: Id | None = None
    role: Word | None = None
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
    reason: Word | None = None
    dropped: Count = 0


class _Object(msgspec.Struct):
    """Any JSON object: nothing of it is kept."""


_tag = msgspec.msgpack.Decoder(_Tag)
_lmcache = msgspec.msgpack.Decoder(_LMCache)
_ours = msgspec.msgpack.Decoder(_Ours)
_json = msgspec.json.Decoder(msgspec.Raw)
_json_object = msgspec.json.Decoder(_Object)


def decode(payload: bytes) -> Notice | None:
    """Read one message; None if it is no notice. Unknown fields are ignored, an unknown event or version is not guessed at."""
    if len(payload) > MAX_BYTES:
        return None
    try:
        kind = _tag.decode(payload).type
        if kind == _OURS:
            return _from_ours(_ours.decode(payload))
        if kind in _LMCACHE:
            return Notice(event=Event.READY, request_id=_lmcache.decode(payload).req_id)
    except UNREADABLE:
        pass
    return None


def _from_ours(said: _Ours) -> Notice | None:
    if said.v != VERSION or not _are_sane(said.t, said.seconds):
        return None
    if said.params is not None:
        _json_object.decode(said.params)
    if said.prompt_ids is not None and not _is_array_of_ids(said.prompt_ids):
        return None
    return Notice(
        event=said.event,
        request_id=said.req_id,
        remote_request_id=said.remote_req_id,
        role=said.role,
        engine_id=said.engine_id,
        rank=said.rank,
        world=said.world,
        at=said.t,
        tokens=said.tokens,
        cached_tokens=said.cached,
        created_cache_tokens=said.created,
        blocks=said.blocks,
        moved_bytes=said.moved_bytes,
        seconds=said.seconds,
        params=said.params,
        token_ids=said.prompt_ids,
        reason=said.reason,
        dropped=said.dropped,
    )


def _are_sane(*seconds: float | None) -> bool:
    return all(value is None or (math.isfinite(value) and value >= 0) for value in seconds)


def _is_array_of_ids(text: bytes) -> bool:
    """Tell whether this is a JSON array of whole numbers, without making numbers of what may be thousands."""
    inner = text[1:-1]
    if text != b"[%b]" % inner or inner.translate(None, b"0123456789,"):
        return False
    _json.decode(text)
    return True


def request_id_of(internal_id: str) -> str:
    """Return the X-Request-Id that vLLM made its internal id of; the id itself if it has another form.

    vLLM 0.32.0: `cmpl-<id>-<prompt's index>-<8 hex digits>`, `chatcmpl-<id>-<8 hex digits>`.
    """
    found = _INTERNAL.fullmatch(internal_id)
    if found is None:
        return internal_id
    return found["completion"] or found["chat"]
