"""A request inside the core: its state, its blocks, its tokens. Pure.

Owns the facts of one request and its statistics; only the core changes them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from pdproxy.engine_model.hardware import Hardware, attended
from pdproxy_lab.sim.media import keyed
from pdproxy_lab.sim.memory import Attention
from pdproxy_lab.sim.request import EngineRequest
from pdproxy_lab.sim.stats import Stats


class RequestState(Enum):
    """The state of a request."""

    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request inside the core."""

    request: EngineRequest
    attention: Attention
    arrived: float
    tokens: list[int]
    """The prompt's, then the generated ones."""
    salt: int
    params: dict[str, Any] | None
    chance: random.Random | None
    ec_params: dict[str, Any] = field(default_factory=dict)
    """`ec_transfer_params`."""
    thoughts: int | None = None
    """As of `Language.thoughts_begun`."""
    state: RequestState = RequestState.WAITING
    generated: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    remembered: int = 0
    """The number of its blocks that are in the prefix cache."""
    computed: int = 0
    """Tokens whose KV is in the blocks."""
    local: int = 0
    """Prompt tokens found in the prefix cache."""
    external: int = 0
    """Prompt tokens whose KV came from elsewhere."""
    created: int = 0
    """Prompt tokens that its prefill has added to the prefix cache: whole blocks."""
    never_loads: bool = False
    """Its KV can never be loaded: the handle lacks a key."""
    scheduled_before: bool = False
    begun: bool = False
    """A step has computed a part of it."""
    started: float = 0.0
    last_token: float | None = None
    keyed: list[int] = field(init=False)
    """Its tokens as caches of KV know them."""

    def __post_init__(self) -> None:
        """Put pictures in the places of their tokens."""
        self.keyed = keyed(self.tokens, self.request.media)

    def append(self, token: int) -> None:
        """Add a token that was generated."""
        self.generated.append(token)
        self.tokens.append(token)
        if self.keyed is not self.tokens:
            self.keyed.append(token)

    @property
    def prompt(self) -> int:
        """The number of its prompt's tokens."""
        return len(self.request.prompt)

    def blocks_missing(self, block_size: int) -> int:
        """Return how many blocks it lacks for all tokens that it has now."""
        return max(-(-len(self.tokens) // block_size) - len(self.blocks), 0)

    @property
    def cached_tokens(self) -> int:
        """The usage's cached tokens: P's own hits if the handle has them, else all tokens that were
        not computed here.
        """
        p_hits = (self.params or {}).get("remote_prefill_cached_tokens")
        if self.external and isinstance(p_hits, int):
            return p_hits
        return self.local + self.external

    def count_start(self, stats: Stats, queried: int, wanted: int, now: float) -> None:
        """Count a request that is scheduled for the first time: `wanted` of `queried` tokens should
        come from elsewhere.
        """
        self.started = now
        stats.queue.observe(now - self.arrived)
        stats.prefix_cache_queries += self.prompt
        stats.prefix_cache_hits += self.local
        stats.external_prefix_cache_queries += queried
        stats.external_prefix_cache_hits += wanted

    def count_output(self, stats: Stats, now: float, tokens: int = 1) -> None:
        """Count an output of so many tokens; with the first one, the sources of the prompt's KV."""
        stats.generation_tokens += tokens
        if self.last_token is None:
            stats.prompt_tokens += self.prompt
            sources = stats.prompt_tokens_by_source
            sources["external_kv_transfer"] += self.external
            sources["local_cache_hit"] += self.local
            sources["local_compute"] += self.prompt - self.local - self.external
            stats.ttft.observe(now - self.arrived)
            stats.prefill.observe(now - self.started)
        else:
            stats.itl.observe(now - self.last_token)
        self.last_token = now


@dataclass(slots=True)
class Step:
    """The work of the next step and its duration."""

    work: list[tuple[ActiveRequest, int]]
    seconds: float


def step_of(
    work: list[tuple[ActiveRequest, int]], pulls: Sequence[int], hardware: Hardware
) -> Step:
    """Return the step in which each request computes so many tokens, and KV transfers of `pulls`
    tokens begin.
    """
    decoding = [sequence.computed for sequence, count in work if count == 1]
    chunks = [(count, sequence.computed) for sequence, count in work if count > 1]
    tokens, pairs = (
        sum(count for count, _ in chunks),
        sum(attended(count, before) for count, before in chunks),
    )
    begun = sum(
        count > 1 and sequence.computed == sequence.local + sequence.external
        for sequence, count in work
    )
    seconds = hardware.step_s(
        tokens, len(decoding), sum(decoding), pairs, len(pulls), begun, sum(pulls)
    )
    return Step(work, seconds)
