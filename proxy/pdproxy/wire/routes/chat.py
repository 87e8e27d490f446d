"""`/v1/chat/completions`: the prompt is a conversation, in the model's chat template.

Source: vLLM 0.32.0 `entrypoints/openai/chat_completion/protocol.py`.
"""

from __future__ import annotations

import msgspec

from pdproxy.wire import long_strings
from pdproxy.wire.body_bounds import Bounds
from pdproxy.wire.fields import Fields, read_field
from pdproxy.wire.prompt_lists import ChatMessage
from pdproxy.wire.route_form import Alone, Prompt, Reading, RouteForm
from pdproxy.wire.routes import openai
from pdproxy.wire.unusual import Content, UnusualError, content_of

_LONG = 32 << 10
"""Bytes of messages whose long texts are not parsed once more."""
_messages_decoder = msgspec.json.Decoder(list[ChatMessage])


def read(fields: Fields, _bounds: Bounds) -> Reading:
    """Read a body: see `route_form.Read`."""
    count, found = _texts(fields) or _contents(fields)
    prompts = (Prompt(None, None, found.size, count, media=tuple(found.media)),)
    if found.is_alone:
        return Reading(prompts, Alone.NON_TEXT)
    return Reading(prompts, openai.why_alone(fields, is_chat=True))


def _contents(fields: Fields) -> tuple[int, Content]:
    messages = read_field(fields, "messages", _messages_decoder) or ()
    return len(messages), content_of(messages)


def _texts(fields: Fields) -> tuple[int, Content] | None:
    """Return how many long messages there are, and what is known of their content; None if they are
    short, or not only text.
    """
    raw = fields.get("messages")
    if raw is None or memoryview(raw).nbytes < _LONG:
        return None
    short = long_strings.shortened(bytes(raw))
    if short is None:
        return None
    try:
        messages = _messages_decoder.decode(short)
        found = content_of(messages)
    except (msgspec.MsgspecError, UnicodeDecodeError, UnusualError):
        return None
    if found.media or found.is_alone:
        return None
    found.size += sum([long_strings.missing(bytes(message.content)) for message in messages])
    return len(messages), found


FORM = RouteForm(
    path="/v1/chat/completions",
    read=read,
    prompt_fields=("tools", "messages"),
    listed={},
    limits=("max_completion_tokens", "max_tokens"),
    unseen=openai.UNSEEN,
    prefill=openai.prefill,
)
