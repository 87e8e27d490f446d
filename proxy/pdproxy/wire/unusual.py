"""What makes a generating request unusual: only the engines' own validation can judge it, so one
engine gets it whole.

Owns what is checked of fields that prefill engines never get, and of the content of messages. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import msgspec

from pdproxy.wire import lenient_json
from pdproxy.wire.body_bounds import LARGE
from pdproxy.wire.fields import Fields, is_absent, read_field
from pdproxy.wire.prompt_lists import ChatMessage
from pdproxy.wire.route_form import Medium

_LONGEST_TYPE = 32
"""Bytes of JSON."""


class UnusualError(Exception):
    """A field that the prefill leg rewrites has another type than in its schema."""


class NotQuickError(Exception):
    """More bytes of a body than `SMALL` have to become objects."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


MEDIA_KEYS = frozenset(
    {
        "image_url",
        "image_pil",
        "image_embeds",
        "input_image",
        "audio_url",
        "audio_embeds",
        "input_audio",
        "video_url",
        "video_embeds",
        "prompt_embeds",
    }
)
"""Keys that make a content part a medium, whatever its `type` is (vLLM 0.32.0)."""
_TEXT_TYPES = frozenset(
    f'"{name}"'.encode()
    for name in ("text", "input_text", "output_text", "refusal", "thinking", "tool_reference")
)
LIST, NOTHING = b"[n"
"""How a list begins, and how null does."""
MAX_MEDIA = 128
"""Media of a request that are looked at one by one."""
MEDIUM = 4096
"""Bytes of text that a medium counts as, whatever its own size is: some thousand tokens."""
_INSIDE = {
    "image_url": (b'"image_url"', b'"input_image"'),
    "audio_url": (b'"audio_url"',),
    "video_url": (b'"video_url"',),
    "input_audio": (b'"input_audio"',),
}
"""The keys of media that may be within the body, and the types of their parts."""
_DATA_URL = b'"data:'
_QUOTE = b'"'
_NULL = msgspec.Raw(b"null")
_fields_decoder = msgspec.json.Decoder(Fields)
_parts_decoder = msgspec.json.Decoder(list[Fields])
_stream_options_decoder = msgspec.json.Decoder(_StreamOptions | None)


def check_unseen(fields: Fields, unseen_names: Sequence[str], limit: int) -> None:
    """Check that decode engines can parse the fields that prefill engines never get: otherwise a
    prefill would be wasted.

    Raises:
        UnusualError: they can't; NotQuickError: more than `limit` bytes would have to become
            objects to find out.
    """
    if fields.keys().isdisjoint(unseen_names):
        return
    unseen = [fields[name] for name in unseen_names if name in fields]
    size = sum(memoryview(raw).nbytes for raw in unseen)
    if size > LARGE:
        raise UnusualError  # no schema is so long, and reading it would take time and memory
    if size > limit:
        raise NotQuickError
    if not all(lenient_json.readable(bytes(raw)) for raw in unseen):
        raise UnusualError


def wants_usage_event(fields: Fields, stream: bool) -> bool:
    """Return whether a client asks for the usage event of a stream.

    Raises:
        UnusualError: it asks for a stream's options without a stream.
    """
    options = read_field(fields, "stream_options", _stream_options_decoder)
    if options is not None and not stream:
        raise UnusualError  # a decode engine would refuse it after the prefill
    return options is not None and bool(options.include_usage)


class Content:
    """What is known of a conversation's content. `size`: bytes, with `MEDIUM` for each medium;
    `media`: those found; `is_alone`: some of it is no text, and no medium that two engines surely
    see alike, or it has more than `MAX_MEDIA`. What is behind that is not looked at.
    """

    __slots__ = ("is_alone", "media", "size")

    def __init__(self) -> None:
        self.size = 0
        self.media: list[Medium] = []
        self.is_alone = False

    def add_parts(self, parts: msgspec.Raw, text_types: AbstractSet[bytes] = frozenset()) -> None:
        """Look at a list of parts, whose bytes are counted. `text_types`: types of parts, in JSON,
        that are text besides the usual ones.
        """
        if self.is_alone:
            return
        for part in _parts_decoder.decode(parts):
            if _is_text(part, text_types):
                continue
            medium = _medium_in(part)
            if medium is None:
                self.is_alone = True
                return
            self.add_medium(medium, _size(part))

    def add_medium(self, medium: Medium, size: int) -> None:
        """Add a medium that two engines see alike. `size`: its bytes that are counted."""
        self.media.append(medium)
        self.is_alone = self.is_alone or len(self.media) > MAX_MEDIA
        self.size += MEDIUM - size


def content_of(
    messages: Sequence[ChatMessage], text_types: AbstractSet[bytes] = frozenset()
) -> Content:
    """Return what is known of a conversation's content. `text_types`: as above.

    Raises:
        UnusualError: there is no message.
    """
    if not messages:
        raise UnusualError
    found = Content()
    size = 0
    for message in messages:
        content = memoryview(message.content)
        size += content.nbytes
        if content[0] == LIST:
            found.add_parts(message.content, text_types)
    found.size += size
    return found


def _size(part: Fields) -> int:
    return sum([memoryview(value).nbytes for value in part.values()])


def _medium_in(part: Fields) -> Medium | None:
    """Return the medium in a part, None if its bytes are not in the body, or a name stands for it:
    engines take what they know by a name (`uuid`), whatever the bytes are (vLLM 0.32.0).
    """
    if not is_absent(part, "uuid"):
        return None
    keys = [key for key in MEDIA_KEYS.intersection(part) if not is_absent(part, key)]
    kind = part.get("type")
    if len(keys) != 1 or kind is None or memoryview(kind).nbytes > _LONGEST_TYPE:
        return None
    (key,) = keys
    if bytes(kind) not in _INSIDE.get(key, ()):
        return None
    value = part[key]
    if key == "input_audio":
        data = _fields_decoder.decode(value).get("data", _NULL)
        head = b'{"type":"input_audio","input_audio":'
        return Medium(head, value, b"}") if bytes(memoryview(data)[:1]) == _QUOTE else None
    if bytes(memoryview(value)[:1]) == b"{":
        value = _fields_decoder.decode(value).get("url", _NULL)
    is_inside = bytes(memoryview(value)[: len(_DATA_URL)]) == _DATA_URL
    head = b'{"type":"%b","%b":{"url":' % (key.encode(), key.encode())
    return Medium(head, value, b"}}") if is_inside else None


def _is_text(part: Fields, text_types: AbstractSet[bytes]) -> bool:
    """Return whether a content part is only text, as vLLM sees the part: it may have any other
    keys, but none of a medium. `text_types`: as in `Content.add_parts`.
    """
    keys = MEDIA_KEYS.intersection(part)
    if keys and not (is_absent(part, "uuid") and all(is_absent(part, key) for key in keys)):
        return False  # with a `uuid`, also a key without a value names a medium
    kind = part.get("type")
    if kind is None or memoryview(kind).nbytes > _LONGEST_TYPE:
        return False
    name = bytes(kind)
    return name in _TEXT_TYPES or name in text_types
