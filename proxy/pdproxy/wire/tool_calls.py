"""The ids of tool calls in a chat's events. Pure. Source of the shape: vLLM 0.32.0
`DeltaToolCall`.
"""

from __future__ import annotations

import msgspec

from pdproxy.wire.sse import END, payload

MARK = b'"tool_calls"'
"""In an event of a chat only where it has calls: a quote in a model's text is escaped."""
MAX_CALLS, MAX_ID = 128, 256
"""Calls of one answer, and characters of an id, that are kept."""


class _Call(msgspec.Struct):
    id: str | None = None


class _Delta(msgspec.Struct):
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Event(msgspec.Struct):
    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Event)


def ids_in(batch: bytes) -> list[str] | None:
    """Return the ids of calls in whole events, in order; None if they can't be read."""
    found: list[str] = []
    for event in batch.split(END):
        if MARK not in event:
            continue
        try:
            choices = _decoder.decode(payload(event + END)).choices
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        found += [
            call.id for one in choices for call in one.delta.tool_calls or () if call.id is not None
        ]
    return found if len(found) <= MAX_CALLS and all(len(one) <= MAX_ID for one in found) else None
