"""What vLLM's own cache of KV blocks publishes where two requests load the same beginning from
another engine at the same time, without an engine. For the engines' Python.

Writes the events and the hashes of the blocks that are cached at the end, as JSON.
`test_cache_events.py` reads them. The arguments are those of vLLM 0.32.0.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

SIZE, BLOCKS = 16, 64


def manager() -> Any:
    """Return a manager of `BLOCKS` blocks that publishes events."""
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(
        config,
        max_model_len=BLOCKS * SIZE,
        scheduler_block_size=SIZE,
        hash_block_size=SIZE,
        enable_caching=True,
        enable_kv_cache_events=True,
    )


class Cache:
    """One engine's cache, and the requests that use it."""

    def __init__(self) -> None:
        init_none_hash(sha256_cbor)
        self.manager = manager()
        self.events: list[Any] = []
        self._hasher = get_request_block_hasher(SIZE, sha256_cbor)
        self._count = 0

    def request(self, tokens: list[int]) -> Any:
        """Return a request with this prompt."""
        self._count += 1
        sampling = SamplingParams(max_tokens=9)
        return Request(str(self._count), tokens, sampling, None, block_hasher=self._hasher)

    def computes(self, one: Any) -> int:
        """Compute a prompt but for what is cached of it. Return how much that is, in tokens."""
        blocks, cached, *_ = self.manager.get_computed_blocks(one)
        rest = one.num_tokens - cached
        assert self.manager.allocate_slots(one, rest, cached, blocks) is not None
        one.num_computed_tokens = one.num_tokens
        return int(cached)

    def begins_to_load(self, one: Any) -> None:
        """Wait for the KV of a prompt that another engine has computed."""
        blocks, cached, *_ = self.manager.get_computed_blocks(one)
        loaded = self.manager.allocate_slots(
            one,
            0,
            cached,
            blocks,
            num_external_computed_tokens=one.num_tokens - cached,
            delay_cache_blocks=True,
        )
        assert loaded is not None
        one.num_computed_tokens = one.num_tokens

    def loads(self, one: Any) -> None:
        """The KV of a prompt is there."""
        self.manager.cache_blocks(one, one.num_computed_tokens)

    def cached(self) -> list[int]:
        """Return the hashes of the blocks that are cached."""
        known = self.manager.block_pool.cached_block_hash_to_block._cache
        return [maybe_convert_block_hash(get_block_hash(one)) for one in known]


def main() -> dict[str, Any]:
    """Two load one beginning, one of them ends and is evicted, and a third one has it cached."""
    cache = Cache()
    beginning = list(range(20 * SIZE))
    first, second, third = (
        cache.request([*beginning, *[1000 * number] * (2 * SIZE)]) for number in (1, 2, 3)
    )
    for one in (first, second):
        cache.begins_to_load(one)
    for one in (first, second):
        cache.loads(one)
    cache.manager.free(first)
    for number in range(8):
        other = cache.request([5000 + number] * (6 * SIZE))
        cache.computes(other)
        cache.manager.free(other)
    found = cache.computes(third)
    events = cache.manager.take_events()
    plain = [{"type": type(one).__name__, **msgspec.to_builtins(one)} for one in events]
    return {"events": plain, "cached": cache.cached(), "found": found}


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
