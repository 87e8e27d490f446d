"""Limits on what a body may hold, and which bodies are quick to read: in a few milliseconds at
most.

Owns the limits and the counting. The time to read JSON depends on its strings, arrays and objects
more than on its bytes: 64 MiB of text take 70 ms, 64 MiB of `[],` take seconds and gigabytes. So a
body is counted before it is parsed, and counting makes no object per item.
"""

from __future__ import annotations

import json
from array import array
from itertools import accumulate

import msgspec

from pdproxy.kit.errors import BadRequestError
from pdproxy.wire.media_rule import ANY, Media

Body = bytes | bytearray
"""A request's body. A large one stays in the buffer that received it."""
SMALL = 72 * 1024
"""Bytes of a body that is quick to read, whatever it holds: 4 ms at most (`messages` of empty
objects). 64 KiB of prompt fit.
"""
LARGE = 512 * 1024
"""Bytes above which no body is quick to read: text takes 1 ms per MiB, token ids 3 ms, a list of
texts with escapes 10 ms.
"""
MAX_QUICK_ITEMS = 12_000
"""Strings, arrays and objects of a body that is quick to read: up to 0.25 us each."""
MAX_QUICK_DIGITS = 300
"""Digits in a row of a body that is quick to read: the time to read an integer grows with their
square, 0.2 ms for 4300.
"""
MAX_FIELDS = 1024
"""Fields at a body's top level, of which vLLM knows fewer than a hundred. Each leg to an engine
copies them all.
"""

_QUOTE = ord('"')
_ALL_BUT_MARKS = bytes(byte for byte in range(256) if byte not in b'"[]{},')
_BEGIN = (b"[", b"{")
_COMMAS = b","
_ONLY_DIGITS = bytes(ord("0") if byte in b"0123456789" else ord(" ") for byte in range(256))
_FEW = 32
"""Occurrences of a byte that are searched one by one, without a copy of the body."""
_THREE_DIGITS = b"000"
_MANY_DIGITS = b"0" * (MAX_QUICK_DIGITS + 1)
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


class Bounds(msgspec.Struct, frozen=True):
    """What one body may hold: `prompts` of one request; `items` are strings (names included),
    arrays and objects together.

    `media`: which URLs of media.
    """

    prompts: int = 2048
    items: int = 500_000
    media: Media = ANY


DEFAULT = Bounds()


class TooManyPromptsError(BadRequestError):
    """A list of prompts is longer than `limits.max_prompts`."""

    def __init__(self, limit: int, param: str) -> None:
        super().__init__(
            f"`{param}` is a list of more than {limit} prompts, the most that one request may have",
            param=param,
        )


class TooManyItemsError(BadRequestError):
    """A body holds more than `limits.max_body_items`."""

    def __init__(self, limit: int, what: str = "strings, arrays and objects") -> None:
        super().__init__(
            f"The body holds more than {limit} {what}, the most that one request may have",
            param="body",
        )


class TooManyFieldsError(BadRequestError):
    """A body's top level has more than `MAX_FIELDS` fields."""

    def __init__(self) -> None:
        super().__init__(f"The body has more than {MAX_FIELDS} fields", param="body")


def is_quick(body: Body) -> bool:
    """Return whether a body of plain JSON is surely read within a few milliseconds.

    Brackets and digits in strings are counted as well, so the count may be too high, but never too
    low.
    """
    size = len(body)
    if size <= SMALL:
        return True
    if size > LARGE:
        return False
    strings = (_count(body, b'"', 2 * MAX_QUICK_ITEMS + 1) + 1) // 2
    if strings + sum(_count(body, mark, MAX_QUICK_ITEMS + 1) for mark in _BEGIN) > MAX_QUICK_ITEMS:
        return False
    # Three samples lie in each run of too many digits. Few prompts have such samples: only those
    # are searched whole.
    samples = body[:: MAX_QUICK_DIGITS // 3].translate(_ONLY_DIGITS)
    return _THREE_DIGITS not in samples or _MANY_DIGITS not in body.translate(_ONLY_DIGITS)


def _count(body: Body, mark: bytes, most: int) -> int:
    """Return how often a byte occurs, `most` at most. Of a rare byte this is ten times as fast as
    `count` or `translate`, and of one that occurs a few times faster still.
    """
    at = -1
    for count in range(_FEW):
        at = body.find(mark, at + 1)
        if at < 0:
            return count
    return len(body) - len(body.replace(mark, b"", most))


def count_items(body: Body, limit: int) -> int:
    """Return how many strings, arrays and objects a body holds, in any encoding that JSON may have.

    In a body that is not JSON, at least those before the first mistake are counted. A body that is
    not text holds none: the parser refuses it, in the words of its route.

    Raises:
        TooManyItemsError: more than `limit`.
    """
    try:
        text = _utf8(body)
    except UnicodeError:
        return 0
    marks = _marks(text).translate(None, _COMMAS)
    strings = (marks.count(_QUOTE) + 1) // 2
    if strings > limit:
        raise TooManyItemsError(limit)
    brackets = _outside_strings(marks)
    items = strings + brackets.count(b"[") + brackets.count(b"{")
    if items > limit:
        raise TooManyItemsError(limit)
    return items


def check_values(body: Body, limit: int) -> None:
    """Refuse a body that holds more than `limit` values, numbers included, since all of them have
    to become objects.

    A body that is not text holds none.

    Raises:
        TooManyItemsError: it does.
    """
    try:
        text = _utf8(body)
    except UnicodeError:
        return
    marks = _outside_strings(_marks(text))
    if marks.count(_COMMAS) + marks.count(b"[") + marks.count(b"{") > limit:
        raise TooManyItemsError(limit, "values in a form that is not plain JSON")


def depth(raw: Body) -> int:
    """Return how many levels of arrays and objects a piece of well-formed JSON has."""
    brackets = _outside_strings(_marks(raw)).translate(None, _COMMAS)
    return max(accumulate(array("b", brackets.translate(_STEPS))), default=0)


def _utf8(body: Body) -> Body:
    encoding = json.detect_encoding(body)
    if encoding.startswith("utf-8"):
        return body
    return body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")


def _marks(text: Body) -> Body:
    """Return quotes that begin or end a string, and all brackets and commas, those in strings
    included.
    """
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return text.translate(None, _ALL_BUT_MARKS)


def _outside_strings(marks: Body) -> bytes:
    return b"".join(marks.split(b'"')[::2])
