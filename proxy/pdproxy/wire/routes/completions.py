"""`/v1/completions`: a prompt is a text or token ids; a body may have a list of prompts.

Source: vLLM 0.32.0 `entrypoints/openai/completion/protocol.py`.
"""

from __future__ import annotations

import re

import msgspec

from pdproxy.wire.body_bounds import Bounds
from pdproxy.wire.fields import Fields, is_absent
from pdproxy.wire.prompt_lists import part, prompts_in
from pdproxy.wire.route_form import Alone, Prompt, Reading, RouteForm
from pdproxy.wire.routes import openai
from pdproxy.wire.unusual import UnusualError

MAX_TOKENS = 16
"""`max_tokens` of a completion that names none (vLLM 0.32.0)."""
_HUGE_INT = re.compile(rb"(?<![0-9])[0-9]{4301}")
"""Python's parser accepts no integer of more than 4300 digits. Matched only where digits begin: at
each digit, the time would be quadratic.
"""


def read(fields: Fields, bounds: Bounds) -> Reading:
    """Read a body: see `route_form.Read`."""
    spans = prompts_in(fields["prompt"], bounds.prompts, "prompt") if "prompt" in fields else None
    if not is_absent(fields, "prompt_embeds"):
        return Reading((), Alone.NON_TEXT)
    raw = fields.get("prompt")
    if raw is None:
        raise UnusualError
    if spans is None:
        return Reading((_one_prompt(raw),), openai.why_alone(fields, is_chat=False))
    if _HUGE_INT.search(raw):
        raise UnusualError  # engines would already work on the prompts before it when it is refused
    prompts = tuple(_one_prompt(part(raw, span)) for span in spans)
    if len({prompt.tokens is None for prompt in prompts}) != 1:
        raise UnusualError  # texts and token ids mixed
    return Reading(prompts, openai.why_alone(fields, is_chat=False), is_list=True)


def prefill(fields: Fields) -> None:
    """Make the fields those of a prefill leg. No template prints the `response_format`."""
    openai.prefill(fields)
    fields.pop("response_format", None)


def _one_prompt(raw: msgspec.Raw) -> Prompt:
    """Return a text or an array of token ids as a prompt."""
    view = bytes(raw)
    if view[:1] == b'"':
        if len(view) == 2:
            raise UnusualError  # empty
        return Prompt(raw, None, len(view) - 2)
    return openai.ids(raw)


FORM = RouteForm(
    path="/v1/completions",
    read=read,
    prompt_fields=("prompt",),
    listed={"prompt": b'"[', "prompt_embeds": b'"'},
    limits=("max_tokens",),
    limit_if_absent=MAX_TOKENS,
    unseen=openai.UNSEEN,
    keeps_prompt_ids=False,
    prefill=prefill,
)
