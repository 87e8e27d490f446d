"""The parts of engines' answers that pdproxy reads. Unknown fields are ignored here; other modules
forward them.
"""

from __future__ import annotations

from typing import Annotated, cast

import msgspec
from msgspec import Meta, structs

from pdproxy.wire import tokens

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What a decoder raises for other data than it was made for, deeply nested data included."""
_ABSENT = msgspec.Raw(b"null")  # a union of Raw with None is not decoded as Raw
Tokens = Annotated[int, Meta(ge=0, le=2**40)]
"""More, of hundreds of digits perhaps, is no count: what adds it up or shares it with other workers
could not hold it.
"""


class TokensDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: Tokens | None = None
    created_cache_tokens: Tokens | None = None


class Usage(msgspec.Struct, frozen=True):
    """Token counts of an answer, in tokens."""

    prompt_tokens: Tokens = 0
    total_tokens: Tokens = 0
    completion_tokens: Tokens | None = 0
    prompt_tokens_details: TokensDetails | None = None


class PrefillChoice(msgspec.Struct, frozen=True):
    """One choice of a prefill engine's answer."""

    prompt_token_ids: msgspec.Raw = _ABSENT
    finish_reason: str | None = None
    stop_reason: msgspec.Raw = _ABSENT
    text: str = ""


class PrefillAnswer(msgspec.Struct, frozen=True):
    """A prefill engine's answer to the prefill leg (completions or chat)."""

    kv_transfer_params: msgspec.Raw = _ABSENT
    prompt_token_ids: msgspec.Raw = _ABSENT
    choices: list[PrefillChoice] = msgspec.field(default_factory=list)
    usage: Usage = Usage()

    def details(self) -> TokensDetails:
        """Return what the engine reports of its prefix cache; nothing, if it doesn't."""
        return self.usage.prompt_tokens_details or TokensDetails()

    def token_ids(self) -> bytes | None:
        """Return the prompt's token ids as a JSON array, or None if the engine does not send them.

        Completions have them in the choice, chats at the top (vLLM 0.32.0).
        """
        candidates = [
            self.prompt_token_ids,
            *(choice.prompt_token_ids for choice in self.choices[:1]),
        ]
        for raw in candidates:
            if (ids := bytes(raw)) not in (b"null", b"[]"):
                return ids
        return None


class DecodeAnswer(msgspec.Struct, frozen=True):
    """The part of a decode engine's whole answer, or of its last stream event, that is read
    here.
    """

    usage: Usage | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    message: str = ""
    type: str = ""
    param: str | None = None
    code: int | str | None = None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """An OpenAI-shaped error, in a body or in a stream event. Older engines put its fields at the
    top.
    """

    error: _ErrorBody | None = None
    object: str = ""
    message: str = ""
    type: str = ""
    param: str | None = None
    code: int | str | None = None

    def detail(self) -> _ErrorBody:
        """Return the error wherever the engine put it."""
        return self.error or _ErrorBody(self.message, self.type, self.param, self.code)


MAX_OBJECTS = 4096
"""Objects in a prefill's answer, which has one choice, a usage and a handle. Choices take 25 bytes
of memory per byte.
"""

_NO_IDS = (b'"', b"{", b":")
"""What no list of ids has, and what could make another body of the one that the list is put into.
"""
_prefill = msgspec.json.Decoder(PrefillAnswer)
_decode = msgspec.json.Decoder(DecodeAnswer)
_error = msgspec.json.Decoder(ErrorAnswer)


def prefill_answer(body: bytes) -> PrefillAnswer | None:
    """Read a prefill engine's answer; None if it is not one. The ids of a long prompt are not
    parsed: they are cut out as bytes.
    """
    ids = b""
    if len(body) > MAX_OBJECTS:
        body, ids = tokens.split_prompt(body)
        if body.count(b"{") > MAX_OBJECTS or any(mark in ids for mark in _NO_IDS):
            return None
    try:
        answer = _prefill.decode(body)
    except UNREADABLE:
        return None
    # As bytes, since each reading of a `Raw` is a copy.
    return structs.replace(answer, prompt_token_ids=cast("msgspec.Raw", ids)) if ids else answer


def usage_of(body: bytes) -> Usage | None:
    """Return the usage of an answer or event, None if it has none or is unreadable."""
    try:
        return _decode.decode(body).usage
    except UNREADABLE:
        return None


def error_of(body: bytes) -> _ErrorBody | None:
    """Return the error an engine describes in `body`, None if it describes none."""
    try:
        detail = _error.decode(body).detail()
    except UNREADABLE:
        return None
    return detail if detail.message or detail.type else None
