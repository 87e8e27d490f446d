"""Split or alone: whether a prompt gains from two engines. Everything not named here is split.

Rules that the request itself decides are in `wire.request.Parsed.alone`; this module adds the one that needs to know the
engines: a prompt under one KV block has no whole block to move.
"""

from __future__ import annotations

from pdproxy.wire.request import Alone, Parsed, Prompt

_SPECIALS = 2
"""Tokens a tokenizer adds around a text (BOS, EOS)."""


def why_alone(parsed: Parsed, prompt: Prompt, *, block_size: int | None, template_tokens: int) -> Alone | None:
    """Return the rule by which one engine serves this prompt, None to split it.

    A text's length in tokens is not known before an engine has seen it, but a byte-level tokenizer never makes more
    tokens than bytes: a text is sent alone only if it is under a block for certain.
    """
    if parsed.alone is not None:
        return parsed.alone
    if block_size is None or "tools" in parsed.fields:
        return None
    most = prompt.tokens
    if most is None:
        most = prompt.text_bytes + _SPECIALS + prompt.messages * template_tokens
    return Alone.SHORT_PROMPT if most < block_size else None
