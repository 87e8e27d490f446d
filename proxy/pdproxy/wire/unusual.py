"""What makes a generating request unusual: only the engines' own validation can judge it, so one
engine gets it whole.

Owns what is checked of fields that prefill engines never get, and of the content of messages. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdproxy.wire import lenient_json
from pdproxy.wire.body_bounds import LARGE
from pdproxy.wire.fields import Fields, is_absent, read_field
from pdproxy.wire.prompt_lists import ChatMessage

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


def content_of(messages: Sequence[ChatMessage]) -> tuple[int, bool]:
    """Return the size of a conversation's content in bytes, and whether any of it is not text.

    Raises:
        UnusualError: there is no message.
    """
    if not messages:
        raise UnusualError
    size, non_text = 0, False
    for message in messages:
        raw = bytes(message.content)
        size += len(raw)
        if raw[:1] == b"[":
            non_text = non_text or not all(_is_text(part) for part in _parts_decoder.decode(raw))
    return size, non_text


def has_media(content: msgspec.Raw) -> bool:
    """Return whether a content is a list of parts of which any is not text."""
    if bytes(memoryview(content)[:1]) != b"[":
        return False
    return not all(_is_text(part) for part in _parts_decoder.decode(content))


def _is_text(part: Fields) -> bool:
    """Return whether a content part is only text, as vLLM sees the part: it may have any other
    keys, but none of a medium.
    """
    keys = MEDIA_KEYS.intersection(part)
    if keys and not (is_absent(part, "uuid") and all(is_absent(part, key) for key in keys)):
        return False  # with a `uuid`, also a key without a value names a medium
    kind = part.get("type")
    return (
        kind is not None and memoryview(kind).nbytes <= _LONGEST_TYPE and bytes(kind) in _TEXT_TYPES
    )
