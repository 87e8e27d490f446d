"""LMCache's telemetry over HTTP: a rank tells which requests' KV it has stored.

Source: LMCache 0.5.6, `request_telemetry` and `examples/disagg_prefill_mp`. One post names several requests by the engine's
internal ids, and the rank that speaks.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdproxy.wire.engine import UNREADABLE
from pdproxy.wire.notices import Event, Notice, request_id_of

PATH = "/api/v1/telemetry"
STORED = "request_store_finished"
MAX_BYTES = 1 << 20
"""A longer post is not read."""

MOST_NAMES = 4096
"""Requests of one post: more than an engine ends in one step, and each costs microseconds."""

_MOST_QUOTES = 2 * MOST_NAMES + 256
"""Quotes of a post: names have none in them, and the rest of it has a dozen."""

_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
_World = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
_Names = Annotated[list[str], msgspec.Meta(max_length=MOST_NAMES)]


class _Telemetry(msgspec.Struct, frozen=True):
    event: str
    request_ids_set: _Names = []
    world_size: _World | None = None
    kv_rank: _Rank | None = None


_decoder = msgspec.json.Decoder(_Telemetry)


def notices(body: bytes) -> list[Notice] | None:
    """Return the notices of a post: none for an event that tells nothing of stored KV. None: it is no telemetry."""
    if body.count(b'"') > _MOST_QUOTES:
        return None  # before all of its names are made
    try:
        said = _decoder.decode(body)
    except UNREADABLE:
        return None
    if said.event != STORED:
        return []
    return [
        Notice(event=Event.READY, request_id=request_id_of(name), rank=said.kv_rank, world=said.world_size)
        for name in said.request_ids_set
        if 0 < len(name) <= 1024
    ]
