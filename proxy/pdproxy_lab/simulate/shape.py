"""What the simulated engines are: how many of which role, and what an operator sets with vLLM's
flags.
"""

from __future__ import annotations

import msgspec

MAX_ENGINES = 4096
MAX_KV_TOKENS = 1_000_000_000


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. Names are vLLM's flags where it has one."""

    max_num_batched_tokens: int = 8192
    """The chunk size: the most tokens in one step."""
    max_num_seqs: int = 1024
    """The most requests in one step; never more than `max_num_batched_tokens`."""
    kv_tokens: int = 800_000
    """Tokens whose KV fits into the engine's memory."""
    block_size: int = 16
    """Tokens in a KV block."""
    unit_tokens: int = 512
    """Tokens of a prompt that share a key of the prefix cache: those of a trace's hash id."""
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        for name, upper in (
            ("max_num_batched_tokens", 10_000_000),
            ("max_num_seqs", 1_000_000),
            ("kv_tokens", MAX_KV_TOKENS),
            ("block_size", 4096),
        ):
            if not 1 <= getattr(self, name) <= upper:
                raise ValueError(f"{name} must be 1 to {upper}, got {getattr(self, name)}")
        if self.unit_tokens < 1 or self.unit_tokens % self.block_size:
            raise ValueError(f"block_size must divide {self.unit_tokens}, got {self.block_size}")
        if self.kv_tokens < self.unit_tokens:
            raise ValueError(f"kv_tokens must be at least {self.unit_tokens}, got {self.kv_tokens}")

    @property
    def blocks(self) -> int:
        """KV blocks."""
        return self.kv_tokens // self.block_size

    def fits(self, prompt: int, output: int) -> bool:
        """Return whether a request fits into an empty engine."""
        return -(-(prompt + output) // self.block_size) <= self.blocks


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """How many engines of each role."""

    prefill: int = 0
    decode: int = 0
    aggregated: int = 0
    any: int = 0
    """Engines that a placement gives any of these roles."""

    def __post_init__(self) -> None:
        """Refuse what can't serve."""
        for name in ("prefill", "decode", "aggregated", "any"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 1 <= self.engines <= MAX_ENGINES:
            raise ValueError(f"there must be 1 to {MAX_ENGINES} engines, got {self.engines}")
        if self.prefill and not self.decode:
            raise ValueError("prefill engines need decode engines")

    @property
    def engines(self) -> int:
        """All of them."""
        return self.prefill + self.decode + self.aggregated + self.any
