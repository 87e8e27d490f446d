"""The sections `pools[].lmcache` and `pools[].cpu`: what engines of one connector are configured with.

Owns names, units, bounds and defaults: those of the connectors' own configuration.
"""

from __future__ import annotations

from typing import Literal

from pdproxy.settings.section import Count, Section

FirstTokenFrom = Literal["prefill", "decode"]


class LMCache(Section, frozen=True):
    """How LMCache's PD mode is configured. Names and defaults are its own."""

    first_token: FirstTokenFrom = "prefill"  # noqa: S105 - a token of text
    """Which engine makes the answer's first token. `prefill` saves a step; requests that need parsers or depend on their own
    output so far still get it from the decode engine. `decode`: all do."""

    chunk_size: Count = 256
    """Tokens in a chunk."""

    save_unfull_chunk: bool = False
    """Whether prompts shorter than a chunk are split between two engines. LMCache 0.5.6's PD mode moves partial chunks whatever
    its own setting of this name is, unless its `discard_partial_chunks` is on: then no notice of such a prompt comes, and it
    waits until `deadlines.kv_ready`."""

    first_rank_only: bool = False
    """Whether only the first rank stores KV and sends a notice (models with one latent KV for all heads)."""

    pd_buffer_size: Count | None = None
    """Bytes of a decode engine's receive buffer. With this and `kv_bytes_per_token`, a prompt waits for space in it before it
    is prefilled. None: no bound is known."""

    kv_bytes_per_token: Count | None = None
    """Bytes of KV per token, on one rank: 2 x layers x KV heads x head size x bytes of the type, divided by the ranks."""


class Cpu(Section, frozen=True):
    """For the connector cpu."""

    block_size: Count = 16
    """Tokens in a KV block of the decode engines, vLLM's `--block-size`. They load nothing of a shorter prompt."""
