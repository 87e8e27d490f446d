"""The section `pools[].prefixes`: what is kept of engines' prefix caches, where a policy asks for it.

Owns names, units, bounds and defaults.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pdproxy.settings.section import Count, Seconds, Section


class Prefixes(Section, frozen=True):
    """What the proxy knows of engines' prefix caches: for policy prefix and placements that ask for it. Else nothing is kept."""

    unit: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Tokens by which prompts are compared: the engines' block size, or a whole part of it."""

    max_blocks: Annotated[int, Meta(ge=1024, le=10**9)] = 2_000_000
    """Blocks of unit tokens of all engines that are kept of their KV events, some 150 bytes each; and as many of the prompts that
    were sent to engines without events. Beyond that the engines with the most lose some."""

    ttl: Seconds = 2.0
    """Seconds for which a prompt that was sent to an engine counts as cached there, before its events say so."""

    engine_blocks: Count = 8192
    """KV blocks of an engine that sends no events and does not report their number: its own prompts are known up to these."""

    refresh: bool = True
    """Whether a request asks its engine to report the blocks that it reuses (vllm_xargs), once the engine had more in its cache
    than its events have said: a message was lost, or came before the proxy listened."""
