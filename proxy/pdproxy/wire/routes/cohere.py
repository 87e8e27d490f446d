"""`/cohere/v2/chat`: Cohere's chat. Engines have it with `VLLM_ENABLE_COHERE_API=1`, serve a
request as the chat that they make of it, and answer in this API's own events.

Answers never have the prompt's ids: both engines render the prompt, as for Messages. Source: vLLM
0.32.0 `entrypoints/cohere`.
"""

from __future__ import annotations

import msgspec

from pdproxy.wire.api_errors import Dialect
from pdproxy.wire.body_bounds import Bounds
from pdproxy.wire.engine import UNREADABLE, PrefillAnswer, PrefillChoice, TokensDetails
from pdproxy.wire.fields import Fields, is_absent, read_field
from pdproxy.wire.passed_usage import usage_in
from pdproxy.wire.prompt_lists import ChatMessage
from pdproxy.wire.route_form import Alone, Prompt, Reading, RouteForm
from pdproxy.wire.unusual import UnusualError, content_of

_TEXT_TYPES = frozenset({b'"document"'})
"""Types of parts that are text on this route alone."""
_ONE, _FALSE = msgspec.Raw(b"1"), msgspec.Raw(b"false")
_NULL = msgspec.Raw(b"null")


class _Usage(msgspec.Struct):
    cached_tokens: float | None = None


class _Answer(msgspec.Struct):
    id: str
    message: msgspec.Raw
    finish_reason: str
    kv_transfer_params: msgspec.Raw = _NULL
    usage: _Usage | None = None


_messages_decoder = msgspec.json.Decoder(list[ChatMessage])
_int_decoder = msgspec.json.Decoder(int | None)
_bool_decoder = msgspec.json.Decoder(bool | None)
_answers = msgspec.json.Decoder(_Answer)


def read(fields: Fields, _bounds: Bounds) -> Reading:
    """Read a body: see `route_form.Read`."""
    if is_absent(fields, "model"):
        raise UnusualError
    limit = read_field(fields, "max_tokens", _int_decoder)
    if limit is not None and limit < 1:
        raise UnusualError  # every engine refuses it: a prefill would be wasted
    read_field(fields, "logprobs", _bool_decoder)
    messages = read_field(fields, "messages", _messages_decoder)
    if not messages:
        raise UnusualError
    found = content_of(messages, _TEXT_TYPES)
    documents = 0 if is_absent(fields, "documents") else memoryview(fields["documents"]).nbytes
    size = found.size + documents
    prompts = (Prompt(None, None, size, len(messages), media=tuple(found.media)),)
    return Reading(prompts, Alone.NON_TEXT if found.is_alone else None)


def prefill(fields: Fields) -> None:
    """Make the fields those of a prefill leg: one token, not streamed. `response_format` stays,
    since Cohere's templates print it.
    """
    fields.pop("logprobs", None)
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
    cached = None if answer.usage is None else answer.usage.cached_tokens
    if cached is not None:
        usage = msgspec.structs.replace(usage, prompt_tokens_details=TokensDetails(int(cached)))
    finish = "length" if answer.finish_reason == "MAX_TOKENS" else "stop"
    return PrefillAnswer(
        answer.kv_transfer_params, choices=[PrefillChoice(finish_reason=finish)], usage=usage
    )


FORM = RouteForm(
    path="/cohere/v2/chat",
    dialect=Dialect.COHERE,
    read=read,
    prompt_fields=("documents", "tools", "messages"),
    listed={},
    limits=("max_tokens",),
    answers=(),
    stops=("stop_sequences",),
    has_min_tokens=False,
    has_usage_event=False,
    has_salt=False,
    prefill=prefill,
    prefill_answer=prefill_answer,
    returns_ids=False,
    takes_ids=False,
    is_named=True,
)
