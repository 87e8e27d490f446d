"""Lists of prompts: where each of them is in the body.

Owns the counting of prompts. A list is searched one prompt at a time, and no further than its limit. The list itself is never
made, since one of sixteen million short prompts would take a gigabyte.
"""

from __future__ import annotations

import re

import msgspec

from pdproxy.wire.body_bounds import TooManyPromptsError

Span = tuple[int, int]
"""The offsets at which something begins and ends, in bytes."""

_PROMPT = re.compile(
    rb"""[ \t\n\r]*+ ( "(?:[^"\\]++|\\.)*+" | \[[^\[\]{}"]*+\] ) [ \t\n\r]*+ ( [,\]] )""", re.VERBOSE | re.DOTALL
)
"""A text, or an array that holds no arrays, objects or strings; and the separator behind it in a list."""
_BEGIN, _END = b"[]"


def prompts_in(raw: msgspec.Raw, limit: int, name: str) -> list[Span] | None:
    """Return where each prompt of a list is in the list; None if this is not a list of texts or of arrays of numbers.

    `raw` is well-formed JSON, the value of the field `name`.

    Raises:
        TooManyPromptsError: there are more than `limit`.
    """
    listed = memoryview(raw)
    if listed[0] != _BEGIN:
        return None
    spans: list[Span] = []
    at = 1
    while (found := _PROMPT.match(listed, at)) is not None:
        if len(spans) == limit:
            raise TooManyPromptsError(limit, name)
        spans.append(found.span(1))
        at = found.end()
        if listed[at - 1] == _END:
            return spans
    return None


def part(raw: msgspec.Raw, span: Span) -> msgspec.Raw:
    """Return a part of a raw value, without copying it."""
    return msgspec.Raw(memoryview(raw)[slice(*span)])
