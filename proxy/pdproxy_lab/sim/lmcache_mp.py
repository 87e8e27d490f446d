"""LMCache in a server of its own (contract `lmcache-mp`), as 0.5.6 does it: P and D share its
storage. Pure.

Owns the rules. Every engine stores the full chunks of its prompts; every engine finds them for
prompts with the same beginning. `kv_transfer_params` have no effect. Each rank reports each request
that ended, however it ended and however little was stored, after its answer; requests that end in
one step are in one report. Without a healthy server there are no reports.
"""

from __future__ import annotations

from typing import Any

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.chunks import Chunk, chunks_of, read, write
from pdproxy_lab.sim.connector import Connector, ProxyNotice
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.memory import BlockPool
from pdproxy_lab.sim.storage import Storage


class LMCacheMP(Connector):
    """The connector of one engine; prefill and decode do the same."""

    def __init__(self, facts: SimFacts, pool: BlockPool, storage: Storage) -> None:
        super().__init__()
        self._facts, self._pool, self._storage = facts, pool, storage
        self._stored: dict[str, int] = {}
        self._found: dict[str, int] = {}
        self._ended: list[str] = []

    def wanted(self, one: ActiveRequest) -> tuple[int, bool]:
        """Return how many tokens the server has beyond those that are here; the last token is
        always computed.
        """
        if self._facts.lmcache.degraded:
            return 0, False
        found = 0
        for chunk in self._full(one, one.prompt):
            if not self._storage.has(chunk.key):
                break
            found = chunk.end
        self._stored[one.request.id] = self._found[one.request.id] = found
        return max(found - one.computed - (found == one.prompt), 0), False

    def load(self, one: ActiveRequest, tokens: int) -> None:
        """Put the chunks into the request's blocks."""
        for chunk in self._full(one, self._found[one.request.id]):
            if chunk.end > one.computed and (pages := self._storage.get(chunk.key)) is not None:
                write(one, chunk, pages, self._pool)

    def stepped(self, one: ActiveRequest, *, first: bool, now: float) -> None:
        """Store the chunks of the prompt that are full now (`save_decode_cache` is off by
        default).
        """
        before, upto = self._stored.get(one.request.id, 0), min(one.computed, one.prompt)
        if self._facts.lmcache.degraded or upto - before < self._facts.lmcache.chunk_size:
            return
        for chunk in self._full(one, upto):
            if chunk.end > before and not self._storage.has(chunk.key):
                self._storage.put(chunk.key, read(one, chunk, self._pool))
            self._stored[one.request.id] = chunk.end

    def ended(
        self, one: ActiveRequest, reason: str, now: float
    ) -> tuple[bool, dict[str, Any] | None]:
        """Report the request with the next step; put what was found into the answer if the request
        asks for it.
        """
        self._stored.pop(one.request.id, None)
        found = self._found.pop(one.request.id, 0)
        self._ended.append(one.request.id)
        if one.params is None or "cached_token_stats" not in one.params:
            return False, None
        stats = {
            "num_vllm_cached_tokens": one.local,
            "num_lmcache_cached_tokens": found,
            "num_lmcache_extra_cached_tokens": max(found - one.local, 0),
        }
        return False, {"cached_token_stats": stats}

    def tick(self, now: float) -> None:
        """Report the requests that have ended."""
        ended, self._ended = self._ended, []
        if not ended or self._facts.notify is None or self._facts.lmcache.degraded:
            return
        for rank in range(self._facts.tensor_parallel_size):
            message = {
                "event": "request_store_finished",
                "request_ids_set": ended,
                "model_name": self._facts.model,
                "world_size": self._facts.tensor_parallel_size,
                "kv_rank": rank,
            }
            self.outbox.append(ProxyNotice(message, rank))

    def _full(self, one: ActiveRequest, upto: int) -> list[Chunk]:
        size = self._facts.lmcache.chunk_size
        salt = (self._facts.model, self._facts.tensor_parallel_size, one.request.cache_salt or "")
        return list(chunks_of(one.keyed[: upto // size * size], size, salt))
