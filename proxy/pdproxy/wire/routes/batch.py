"""`/v1/chat/completions/batch`: several conversations, each of which is a chat.

Source: vLLM 0.32.0 `entrypoints/openai/chat_completion/batch_serving.py`.
"""

from __future__ import annotations

from pdproxy.wire import client_routes
from pdproxy.wire.body_bounds import Bounds
from pdproxy.wire.fields import PROMPT_IDS, Fields
from pdproxy.wire.media import check_media
from pdproxy.wire.prompt_lists import conversations_in, part
from pdproxy.wire.route_form import Alone, Prompt, Reading, RouteForm
from pdproxy.wire.routes import openai
from pdproxy.wire.unusual import UnusualError, content_of


def read(fields: Fields, bounds: Bounds) -> Reading:
    """Read a body: see `route_form.Read`."""
    conversations = (
        conversations_in(fields["messages"], bounds.prompts, "messages")
        if "messages" in fields
        else None
    )
    check_media(fields, bounds.media)
    if not conversations or not client_routes.is_plain_batch(fields) or PROMPT_IDS in fields:
        raise UnusualError
    prompts = []
    for span, messages in conversations:
        found = content_of(messages)
        raw = part(fields["messages"], span)
        prompts.append(
            Prompt(raw, None, found.size, len(messages), found.is_alone, tuple(found.media))
        )
    return Reading(tuple(prompts), openai.why_alone(fields, is_chat=True), is_list=True)


FORM = RouteForm(
    path="/v1/chat/completions/batch",
    read=read,
    prompt_fields=("tools", "messages"),
    listed={"messages": b"["},
    limits=("max_completion_tokens", "max_tokens"),
    unseen=openai.UNSEEN,
    prefill=openai.prefill,
    goes_whole=lambda alone: alone is Alone.UNUSUAL,
    has_own_words=True,
)
