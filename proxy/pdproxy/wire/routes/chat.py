"""`/v1/chat/completions`: the prompt is a conversation, in the model's chat template.

Source: vLLM 0.32.0 `entrypoints/openai/chat_completion/protocol.py`.
"""

from __future__ import annotations

import msgspec

from pdproxy.wire.body_bounds import Bounds
from pdproxy.wire.fields import Fields, read_field
from pdproxy.wire.prompt_lists import ChatMessage
from pdproxy.wire.route_form import Alone, Prompt, Reading, RouteForm
from pdproxy.wire.routes import openai
from pdproxy.wire.unusual import content_of

_messages_decoder = msgspec.json.Decoder(list[ChatMessage])


def read(fields: Fields, _bounds: Bounds) -> Reading:
    """Read a body: see `route_form.Read`."""
    messages = read_field(fields, "messages", _messages_decoder) or ()
    found = content_of(messages)
    prompts = (Prompt(None, None, found.size, len(messages), media=tuple(found.media)),)
    if found.is_alone:
        return Reading(prompts, Alone.NON_TEXT)
    return Reading(prompts, openai.why_alone(fields, is_chat=True))


FORM = RouteForm(
    path="/v1/chat/completions",
    read=read,
    prompt_fields=("tools", "messages"),
    listed={},
    limits=("max_completion_tokens", "max_tokens"),
    unseen=openai.UNSEEN,
    prefill=openai.prefill,
)
