"""What engines report that a request has used, on the routes that one engine serves whole, in the
form of each API.

Only a field at the top of an answer, or of the part of an event that has it, is read: objects below
may be the model's own words. Sources: vLLM 0.33.0 `entrypoints/openai/responses`,
`entrypoints/anthropic`, `entrypoints/cohere`, `entrypoints/pooling`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from pdproxy.wire.engine import UNREADABLE, Tokens, Usage
from pdproxy.wire.fields import Fields

_Number = Annotated[float, Meta(ge=0, le=2**40)]
METADATA = b"metadata"
"""The header in which vLLM describes an answer of `encoding_format: "bytes"`."""


class _Sides(msgspec.Struct, frozen=True):
    """The `tokens` of Cohere's `usage`, which are no integers."""

    input_tokens: _Number = 0
    output_tokens: _Number = 0


class _Counts(msgspec.Struct, frozen=True):
    """A `usage`, with the names of all APIs. Messages leave cached tokens out of `input_tokens`
    where they name these.
    """

    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    total_tokens: Tokens | None = None
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    cache_read_input_tokens: Tokens | None = None
    cache_creation_input_tokens: Tokens | None = None
    tokens: _Sides | None = None

    def usage(self) -> Usage | None:
        """Return the counts by their names in completions; None if there are none."""
        made = self.completion_tokens or self.output_tokens or 0
        if self.tokens is not None:
            prompt, made = int(self.tokens.input_tokens), int(self.tokens.output_tokens)
        elif self.input_tokens is not None:
            prompt = (
                self.input_tokens
                + (self.cache_read_input_tokens or 0)
                + (self.cache_creation_input_tokens or 0)
            )
        elif self.prompt_tokens is not None:
            prompt = self.prompt_tokens
        elif self.total_tokens is not None:
            prompt = max(self.total_tokens - made, 0)
        else:
            return None
        return Usage(prompt, prompt + made, made)


class _Answer(msgspec.Struct, frozen=True):
    usage: _Counts | None = None


class _Event(msgspec.Struct, frozen=True):
    """`response`: of the last event of a response; `message`: of the first event of a message,
    whose last one has `usage`.
    """

    usage: _Counts | None = None
    response: _Answer | None = None
    message: _Answer | None = None


_fields = msgspec.json.Decoder(Fields)
_integer = msgspec.json.Decoder(Tokens)
_integer_or_none = msgspec.json.Decoder(Tokens | None)
_answers = msgspec.json.Decoder(_Answer)
_events = msgspec.json.Decoder(_Event)


def usage_in(answer: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> Usage | None:
    """Return the usage of a whole answer, None if it has none, or none that can be read. One in
    bytes has it in a header.
    """
    described = next((value for name, value in headers if name == METADATA), answer)
    try:
        counts = _answers.decode(described).usage
    except UNREADABLE:
        return None
    return None if counts is None else counts.usage()


def usage_in_event(event: bytes) -> Usage | None:
    """Return the usage that the JSON of an event has, None if it has none, or none that can be
    read.
    """
    try:
        found = _events.decode(event)
    except UNREADABLE:
        return None
    inner = found.response or found.message
    counts = found.usage if inner is None else inner.usage
    return None if counts is None else counts.usage()


def with_cache_of_message(json: bytes, *, cached: int | None, created: int | None) -> bytes:
    """Return a message, or the event at its end, with the prefix cache counts of the prefill
    engine, as `usage.with_cache` does for other answers. None leaves a count unchanged.

    Messages leave these tokens out of `input_tokens`.
    """
    if cached is created is None:
        return json
    try:
        fields = _fields.decode(json)
        usage = _fields.decode(fields["usage"])
        asked = _integer.decode(usage["input_tokens"])
        for name, count in (
            ("cache_read_input_tokens", cached),
            ("cache_creation_input_tokens", created),
        ):
            if count is not None and name in usage:  # else it is counted in `input_tokens`
                asked += (_integer_or_none.decode(usage[name]) or 0) - count
                usage[name] = msgspec.Raw(b"%d" % count)
    except (*UNREADABLE, KeyError):
        return json
    usage["input_tokens"] = msgspec.Raw(b"%d" % max(asked, 0))
    fields["usage"] = msgspec.Raw(msgspec.json.encode(usage))
    return msgspec.json.encode(fields)
