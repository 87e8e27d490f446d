"""The section `pools[].turns`: KV of a conversation's turn that its decode engine keeps for the next prompt.

Owns names, units, bounds and defaults. Names and defaults of engines' options are vLLM's.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pdproxy.settings.section import Count, Seconds, Section


class Turns(Section, frozen=True):
    """Conversations whose next turn hands the decode engine's KV back to a prefill engine (connector nixl)."""

    bidirectional: bool = False
    """Whether all engines of the pool are started with bidirectional_kv_xfer. A prefill engine without it never answers a prompt
    with such KV: run `pdproxy check` first. Needs token ids: tokenize auto or always. For streams, the engines need the notifier
    (kv_ready.notifier)."""

    decoder_kv_blocks_ttl: Seconds = 480.0
    """Seconds for which decode engines keep the KV: their option of this name."""

    margin: Seconds = 10.0
    """Seconds before that time is over in which the KV is not used any more. A prefill engine itself refuses it in the last 5."""

    min_tokens: Count = 64
    """Fewer tokens of KV are not transferred: vLLM's kv_recompute_threshold."""

    min_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """The share of a turn's tokens that a prompt must have in common with it to use its KV, which can be used once: a prompt that
    only begins alike (a common system prompt) should leave it to the conversation itself."""

    max_kept: Count = 4096
    """Turns that are kept at the same time. The oldest is released for one more."""

    max_blocks: Count = 4096
    """KV blocks that are kept per decode engine, where other requests miss them. The oldest turns are released for more. Blocks
    that turns share count more than once."""

    max_bytes: Annotated[int, Meta(ge=2**16, le=2**40)] = 128 << 20
    """Bytes of token ids and handles that are held here, 4 to 7 per token."""
