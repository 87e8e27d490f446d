"""Lists of prompts and of conversations: where each of them is in the body.

Owns the counting of both. A list of prompts is searched one prompt at a time, and no further than its limit. The list itself is
never made, since one of sixteen million short prompts would take a gigabyte.
"""

from __future__ import annotations

import json
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
_BETWEEN = re.compile(rb"[ \t\n\r,]*+")
"""The bytes between two values of a list."""


class Message(msgspec.Struct):
    """A message of a chat."""

    content: msgspec.Raw = msgspec.Raw(b"null")


Conversation = tuple[Span, list[Message]]
"""Where a conversation is in its list, and its messages."""
_conversations_decoder = msgspec.json.Decoder(list[list[Message]])
_values_decoder = msgspec.json.Decoder(list[msgspec.Raw])


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


def conversations_in(raw: msgspec.Raw, limit: int, name: str) -> list[Conversation] | None:
    """Return the conversations of a list; None if this is not a list of lists of objects, which every engine refuses.

    Each message becomes an object, as those of a chat do. `raw` is the value of the field `name`.

    Raises:
        TooManyPromptsError: there are more than `limit`.
    """
    try:
        conversations = _conversations_decoder.decode(raw)
    except (msgspec.ValidationError, UnicodeDecodeError, RecursionError):
        return None
    except msgspec.DecodeError:  # with NaN, which the engines' own parser accepts, and which was parsed by it before
        values = json.loads(bytes(raw))
        if isinstance(values, list) and len(values) > limit:
            raise TooManyPromptsError(limit, name) from None
        return None
    if len(conversations) > limit:
        raise TooManyPromptsError(limit, name)
    found: list[Conversation] = []
    at = 1
    for value, messages in zip(_values_decoder.decode(raw), conversations, strict=True):
        between = _BETWEEN.match(memoryview(raw), at)
        assert between is not None
        at = between.end() + memoryview(value).nbytes
        found.append(((between.end(), at), messages))
    return found


def part(raw: msgspec.Raw, span: Span) -> msgspec.Raw:
    """Return a part of a raw value, without copying it."""
    return msgspec.Raw(memoryview(raw)[slice(*span)])
