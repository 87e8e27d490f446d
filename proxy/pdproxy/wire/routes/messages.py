"""`/v1/messages`: Anthropic's Messages API. Engines serve a request as the chat that they make of
it, and answer in this API's own events.

Answers never have the prompt's ids, so that both engines render the prompt: with the same chat
template, since they serve the same model. Source: vLLM 0.32.0 `entrypoints/anthropic/protocol.py`,
`serving.py`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pdproxy.wire.api_errors import Dialect
from pdproxy.wire.body_bounds import Bounds
from pdproxy.wire.engine import UNREADABLE, PrefillAnswer, PrefillChoice, TokensDetails
from pdproxy.wire.fields import Fields, is_absent, read_field
from pdproxy.wire.passed_usage import usage_in
from pdproxy.wire.prompt_lists import ChatMessage
from pdproxy.wire.route_form import Alone, Medium, Prompt, Reading, RouteForm
from pdproxy.wire.unusual import LIST, NOTHING, Content, UnusualError

_TEXT_BLOCKS = frozenset(
    {
        "text",
        "tool_use",
        "tool_result",
        "tool_reference",
        "thinking",
        "redacted_thinking",
        "tool_addition",
        "tool_removal",
    }
)
_QUOTE = b'"'
_LONGEST_TYPE = 128
"""Bytes of JSON."""
_ONE, _FALSE = msgspec.Raw(b"1"), msgspec.Raw(b"false")
_NULL = msgspec.Raw(b"null")
_JPEG = msgspec.Raw(b'"image/jpeg"')
"""The type of a picture that names none (vLLM 0.32.0)."""


class _Block(msgspec.Struct):
    type: str = ""
    content: msgspec.Raw = _NULL
    source: msgspec.Raw = _NULL


class _Source(msgspec.Struct):
    type: str = ""
    media_type: msgspec.Raw = _JPEG
    data: msgspec.Raw = _NULL


class _Thinking(msgspec.Struct):
    type: str = ""
    budget_tokens: int | None = None


class _Cached(msgspec.Struct):
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Answer(msgspec.Struct):
    type: Literal["message"]
    stop_reason: str | None = None
    kv_transfer_params: msgspec.Raw = _NULL
    usage: _Cached | None = None


_messages_decoder = msgspec.json.Decoder(list[ChatMessage])
_blocks_decoder = msgspec.json.Decoder(list[_Block])
_source_decoder = msgspec.json.Decoder(_Source)
_thinking_decoder = msgspec.json.Decoder(_Thinking | None)
_int_decoder = msgspec.json.Decoder(int)
_answers = msgspec.json.Decoder(_Answer)


def read(fields: Fields, _bounds: Bounds) -> Reading:
    """Read a body: see `route_form.Read`."""
    if is_absent(fields, "max_tokens") or is_absent(fields, "model"):
        raise UnusualError
    limit = _int_decoder.decode(fields["max_tokens"])
    thinking = read_field(fields, "thinking", _thinking_decoder)
    budget = None if thinking is None else thinking.budget_tokens
    if limit < 1 or (budget is not None and budget >= limit):
        raise UnusualError  # every engine refuses it: a prefill would be wasted
    messages = read_field(fields, "messages", _messages_decoder)
    if not messages:
        raise UnusualError
    found = Content()
    contents = [message.content for message in messages]
    if not is_absent(fields, "system"):
        contents.append(fields["system"])
    for content in contents:
        view = memoryview(content)
        found.size += view.nbytes
        if view[0] == NOTHING:
            raise UnusualError  # every engine refuses it
        if view[0] == LIST:
            _look_at(content, found)
    prompts = (Prompt(None, None, found.size, len(contents), media=tuple(found.media)),)
    return Reading(prompts, Alone.NON_TEXT if found.is_alone else None)


def _look_at(blocks: msgspec.Raw, found: Content, *, in_result: bool = False) -> None:
    """Look at the blocks of a content. A tool's result has blocks of its own, but no results."""
    for block in _blocks_decoder.decode(blocks):
        if found.is_alone:
            return
        if block.type == "image":
            medium = _picture(_source_decoder.decode(block.source))
            if medium is None:
                found.is_alone = True
            else:
                found.add_medium(medium, memoryview(block.source).nbytes)
        elif block.type not in _TEXT_BLOCKS or (in_result and block.type == "tool_result"):
            found.is_alone = True
        elif block.type == "tool_result" and memoryview(block.content)[0] == LIST:
            _look_at(block.content, found, in_result=True)


def _picture(source: _Source) -> Medium | None:
    """Return a picture whose bytes are in the body, as the chat has it that engines make."""
    kind, data = bytes(memoryview(source.media_type)[:_LONGEST_TYPE]), memoryview(source.data)
    if source.type != "base64" or kind[-1:] != _QUOTE or bytes(data[:1]) != _QUOTE:
        return None
    head = b'{"type":"image_url","image_url":{"url":"data:' + kind[1:-1] + b";base64,"
    return Medium(head, msgspec.Raw(data[1:]), b"}}")


def prefill(fields: Fields) -> None:
    """Make the fields those of a prefill leg: one token, not streamed.

    A thinking budget must be smaller than `max_tokens`, and is no part of the prompt. That thinking
    is off, or adaptive, may be.
    """
    thinking = read_field(fields, "thinking", _thinking_decoder)
    if thinking is not None and thinking.budget_tokens is not None:
        del fields["thinking"]
    fields["max_tokens"] = _ONE
    fields["stream"] = _FALSE


def prefill_answer(body: bytes) -> PrefillAnswer | None:
    """Read a prefill engine's answer; None if it is not one."""
    try:
        answer = _answers.decode(body)
    except UNREADABLE:
        return None
    usage = usage_in(body)
    if usage is None:
        return None
    # An answer that was given up has no reason.
    finish = {"max_tokens": "length", None: "abort"}.get(answer.stop_reason, "stop")
    if (cached := answer.usage) is not None:
        details = TokensDetails(cached.cache_read_input_tokens, cached.cache_creation_input_tokens)
        usage = msgspec.structs.replace(usage, prompt_tokens_details=details)
    return PrefillAnswer(
        answer.kv_transfer_params, choices=[PrefillChoice(finish_reason=finish)], usage=usage
    )


FORM = RouteForm(
    path="/v1/messages",
    dialect=Dialect.MESSAGES,
    read=read,
    prompt_fields=("system", "tools", "messages"),
    listed={},
    limits=("max_tokens",),
    answers=(),
    stops=("stop_sequences",),
    has_min_tokens=False,
    has_usage_event=False,
    checks_all_media=True,
    prefill=prefill,
    prefill_answer=prefill_answer,
    returns_ids=False,
    takes_ids=False,
    is_named=True,
    goes_whole=lambda _: True,
    has_own_words=True,
)
