"""The sections `pools[].lmcache` and `pools[].cpu`: what engines of one connector are configured with.

Owns names, units, bounds and defaults: those of the connectors' own configuration.
"""

from __future__ import annotations

from typing import Literal

from pdproxy.settings.section import Count, Section

FirstTokenFrom = Literal["prefill", "decode"]


class LMCache(Section, frozen=True):
    """Settings of lmcache-pd: names and defaults are those of LMCache's own configuration."""

    first_token: FirstTokenFrom = "prefill"  # noqa: S105 - a token of text
    """Which engine makes the answer's first token. prefill saves a step, but the decode engine still makes it for requests that
    need the parsers or depend on their own output (stop strings, penalties, seeds, grammars). decode: for all requests."""

    chunk_size: Count = 256
    """Tokens per chunk."""

    save_unfull_chunk: bool = False
    """Whether two engines serve a prompt that is shorter than a chunk. LMCache 0.5.6's PD mode moves partial chunks whatever its
    own setting says, unless its discard_partial_chunks is on: then no notice would come, and the prompt would wait in vain."""

    first_rank_only: bool = False
    """Whether the first rank stores the KV of all ranks (models with one latent KV for all heads) and sends the only notice."""

    pd_buffer_size: Count | None = None
    """Bytes of a decode engine's receive buffer. If this and kv_bytes_per_token are set, a prompt waits (deadlines.queue) for
    space in the buffer before its prefill. null: not known, no wait."""

    kv_bytes_per_token: Count | None = None
    """Bytes of KV per token on one rank: 2 x layers x KV heads x head size x bytes of the type, divided by the ranks."""


class Cpu(Section, frozen=True):
    """Settings of cpu."""

    block_size: Count = 16
    """Tokens per KV block of the decode engines (--block-size): a shorter prompt is not loaded, and served by one engine."""
