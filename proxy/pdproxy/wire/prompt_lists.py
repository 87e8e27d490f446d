"""Lists of prompts and of conversations: where each of them is in the body.

Owns the counting of both. A list of prompts is searched one prompt at a time, and no further than
its limit. The list itself is never made, since one of sixteen million short prompts would take a
gigabyte.
"""

from __future__ import annotations

import re

import msgspec

from pdproxy.wire.body_bounds import TooManyPromptsError

Span = tuple[int, int]
"""The offsets at which something begins and ends, in bytes."""

_PROMPT = re.compile(
    rb"""[ \t\n\r]*+ ( "(?:[^"\\]++|\\.)*+" | \[[^\[\]{}"]*+\] ) [ \t\n\r]*+ ( [,\]] )""",
    re.VERBOSE | re.DOTALL,
)
"""A text, or an array that holds no arrays, objects or strings; and the separator behind it in a
list.
"""
_BEGIN, _END = b"[]"
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_PLAIN = rb'[^\[\]{}"]*+ (?: %b [^\[\]{}"]*+ )*+' % _STRING
"""What holds no array or object."""
_FLAT = rb"[\[{] %b [\]}]" % _PLAIN
"""An array or object that holds no others."""
_VALUE = re.compile(rb'%b | %b | [^\[\]{}", \t\n\r]++' % (_STRING, _FLAT), re.VERBOSE | re.DOTALL)
_BRACKETS = re.compile(
    rb"%b (?: %b %b ){0,256} (?: ([\[{]++) | ([\]}]++) )?" % (_PLAIN, _FLAT, _PLAIN),
    re.VERBOSE | re.DOTALL,
)
"""All up to the next brackets that begin, or end, an array or object with others in it; or a long
part of what is before them. Python before 3.11.5 matches a possessive group wrongly that can fail
behind its first character, and any other group takes memory each time that it is repeated.
"""
_BETWEEN = re.compile(rb"[ \t\n\r,]*+")
"""The bytes between two values of a list."""


class ChatMessage(msgspec.Struct):
    """A message of a chat."""

    content: msgspec.Raw = msgspec.Raw(b"null")


Conversation = tuple[Span, list[ChatMessage]]
"""Where a conversation is in its list, and its messages."""
_conversations_decoder = msgspec.json.Decoder(list[list[ChatMessage]])
_values_decoder = msgspec.json.Decoder(list[msgspec.Raw])


def prompts_in(raw: msgspec.Raw, limit: int, name: str) -> list[Span] | None:
    """Return where each prompt of a list is in the list; None if this is not a list of texts or of
    arrays of numbers.

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


def count_in(raw: msgspec.Raw, limit: int, name: str, each: bytes = b'"[') -> int:
    """Return how many prompts are in a field of this `name`: the values of a list, whatever they
    are; 0 for null.

    `each`: how the first value of a list of several prompts begins. Any other list is one prompt:
    token ids, or messages.

    Raises:
        TooManyPromptsError: there are more than `limit`.
    """
    listed = memoryview(raw)
    if listed[0] != _BEGIN:
        return int(bytes(listed[:5]) != b"null")
    at, count = 1, 0
    while True:
        at = _end(_BETWEEN, listed, at)
        if listed[at] == _END:
            return count
        if not count and listed[at] not in each:
            return 1
        if count == limit:
            raise TooManyPromptsError(limit, name)
        count += 1
        found = _VALUE.match(listed, at)
        at = _behind(listed, at) if found is None else found.end()


def _behind(listed: memoryview, at: int) -> int:
    """Return where the array or object ends that begins at `at`."""
    depth, at = 1, at + 1
    while True:
        found = _BRACKETS.match(listed, at)
        assert found is not None
        assert found.end() > at
        at = found.end()
        if found.lastindex is None:
            continue
        if (opened := found.span(1))[0] >= 0:
            depth += at - opened[0]
        elif (closed := at - found.start(2)) >= depth:
            return at - closed + depth
        else:
            depth -= closed


def _end(pattern: re.Pattern[bytes], listed: memoryview, at: int) -> int:
    found = pattern.match(listed, at)
    assert found is not None
    return found.end()


def conversations_in(raw: msgspec.Raw, limit: int, name: str) -> list[Conversation] | None:
    """Return the conversations of a list; None if this is not a list of lists of objects, which
    every engine refuses.

    Each message becomes an object, as those of a chat do. `raw` is the value of the field `name`.

    Raises:
        TooManyPromptsError: there are more than `limit`.
    """
    try:
        conversations = _conversations_decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if len(conversations) > limit:
        raise TooManyPromptsError(limit, name)
    found: list[Conversation] = []
    at = 1
    for value, messages in zip(_values_decoder.decode(raw), conversations, strict=True):
        begin = _end(_BETWEEN, memoryview(raw), at)
        at = begin + memoryview(value).nbytes
        found.append(((begin, at), messages))
    return found


def part(raw: msgspec.Raw, span: Span) -> msgspec.Raw:
    """Return a part of a raw value, without copying it."""
    return msgspec.Raw(memoryview(raw)[slice(*span)])
