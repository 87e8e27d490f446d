"""Decides whether two engines serve a prompt, or one alone. A prompt is split if no rule forbids
it.

Rules that need only the request are in `wire.request.Parsed.alone`. This module adds the one that
needs the engines: a prompt shorter than a KV block has no whole block to move.
"""

from __future__ import annotations

from pdproxy.wire.request import Parsed
from pdproxy.wire.route_form import Alone, Prompt

_SPECIALS = 2
"""Tokens a tokenizer adds around a text (BOS, EOS)."""
_TEMPLATED = ("tools", "documents", "chat_template", "chat_template_kwargs", "response_format")
"""Fields of a chat by which a template may add any number of tokens."""


def why_alone(
    parsed: Parsed,
    prompt: Prompt,
    *,
    block_size: int | None,
    template_tokens: int,
    several: bool = False,
) -> Alone | None:
    """Return the rule by which one engine serves this prompt alone, None to split it.

    `block_size`: the smallest KV block in tokens, None while unknown. `template_tokens`: the
    largest number of tokens that a chat template adds to one message. `several`: prompts of which
    several answers are wanted can be split. The number of tokens of a
    text is not known here, but a byte-level tokenizer never makes more tokens than bytes. So a text
    is served alone only if it is certainly shorter than a block.
    """
    if parsed.alone is not None and not (several and parsed.needs_loading):
        return parsed.alone
    if block_size is None or "tools" in parsed.fields:
        return None
    max_tokens = prompt.tokens
    if max_tokens is None:
        max_tokens = prompt.text_bytes + _SPECIALS + prompt.messages * template_tokens
    return Alone.SHORT_PROMPT if max_tokens < block_size else None


def may_be_too_long(
    parsed: Parsed, prompt: Prompt, tokens: int | None, longest: int, template_tokens: int
) -> bool:
    """Return whether an engine may refuse a prompt as too long, which it does unless one more token
    fits.

    `tokens`: the prompt's, None if they are not known; `longest`: the engine's `max_model_len`;
    `template_tokens`: as above.
    """
    known = prompt.tokens if tokens is None else tokens
    if known is not None:
        return known >= longest
    if prompt.media or not parsed.fields.keys().isdisjoint(_TEMPLATED):
        return True
    # Of messages, more than their content is in the prompt, such as calls of tools: their whole
    # JSON is an upper bound.
    fields = parsed.fields
    size = prompt.text_bytes
    if prompt.messages:
        names = parsed.route.form.prompt_fields
        size = sum(memoryview(fields[name]).nbytes for name in names if name in fields)
    return size + _SPECIALS + prompt.messages * template_tokens >= longest
