"""LMCache's telemetry over HTTP: a rank reports which requests' KV it has stored.

Source: LMCache 0.5.6, `request_telemetry` and `examples/disagg_prefill_mp`. One post names several
requests by the engine's internal ids, and the rank that sends it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdproxy.wire.engine import UNREADABLE
from pdproxy.wire.notices import Notice, NoticeEvent, request_id_of

PATH = "/api/v1/telemetry"
STORED = "request_store_finished"
MAX_BYTES = 1 << 20
"""A longer post is not read."""

MAX_NAMES = 4096
"""Requests of one post: more than an engine ends in one step, and each costs microseconds."""

_MAX_QUOTES = 2 * MAX_NAMES + 256
"""Quotes of a post: two per name, and a dozen in the rest of it."""

_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
_World = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
_Names = Annotated[list[str], msgspec.Meta(max_length=MAX_NAMES)]


class _Telemetry(msgspec.Struct, frozen=True):
    event: str
    request_ids_set: _Names = []
    world_size: _World | None = None
    kv_rank: _Rank | None = None


_decoder = msgspec.json.Decoder(_Telemetry)


def notices(body: bytes) -> list[Notice] | None:
    """Return the notices of a post, an empty list for an event about something else; None: it is
    not telemetry.
    """
    if body.count(b'"') > _MAX_QUOTES:
        return None  # before a string is made of each name
    try:
        post = _decoder.decode(body)
    except UNREADABLE:
        return None
    if post.event != STORED:
        return []
    return [
        Notice(
            event=NoticeEvent.READY,
            request_id=request_id_of(name),
            rank=post.kv_rank,
            world=post.world_size,
        )
        for name in post.request_ids_set
        if 0 < len(name) <= 1024
    ]
