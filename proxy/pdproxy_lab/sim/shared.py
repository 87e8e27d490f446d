"""Storage that engines share (contract `shared`), as vLLM's `ExampleConnector` does it, with its
errors. Pure.

Owns the rules of 0.32.0, none of which uses `kv_transfer_params`:

- A prompt that is not found is stored in its first step, without its last block, filled or not: `(n
  - 1) // block_size` blocks. Nothing is ever evicted, and the key is the token ids alone: not the
  model, not the salt.
- It is found if its first `(n - 2) // block_size` blocks were stored as a whole prompt: a longer
  prompt's prefix is not enough.
- Lookup and load round differently. With n = 1 more than whole blocks, one block fewer is looked
  for than is loaded: such a prompt never finds itself; if the shorter one is there, the load reads
  a missing file and the engine dies.
- A prompt of more tokens than `max_num_batched_tokens` is stored as far as its first step went,
  under the whole prompt's key: an engine that loads it dies of the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.connector import Connector
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.memory import BlockPool
from pdproxy_lab.sim.request import EngineDeadError
from pdproxy_lab.sim.storage import Storage, key_of


class SharedStorage(Connector):
    """The connector of one engine; prefill and decode do the same."""

    def __init__(self, facts: SimFacts, pool: BlockPool, storage: Storage) -> None:
        super().__init__()
        self._size, self._pool, self._storage = facts.block_size, pool, storage

    def wanted(self, one: ActiveRequest) -> tuple[int, bool]:
        """Return how many tokens the storage has beyond those that are here."""
        looked_for = self._floor(one.prompt - 1)
        if not self._storage.has(self._key(one.keyed, looked_for)):
            return 0, False
        return max(looked_for - one.computed, 0), False

    def load(self, one: ActiveRequest, tokens: int) -> None:
        """Put the stored pages into the request's blocks.

        Raises:
            EngineDeadError: there is no such file, or it holds another number of tokens.
        """
        count = self._blocks(one)
        pages = self._storage.get(self._key(one.keyed, self._floor(one.prompt)))
        if pages is None or len(pages) != count:
            raise EngineDeadError
        for block, page in zip(one.blocks, pages, strict=False):
            self._pool.pages[block] = page

    def stepped(self, one: ActiveRequest, *, first: bool, now: float) -> None:
        """Store a prompt that was not found."""
        prompt = one.keyed
        if not first or self._storage.has(self._key(prompt, self._floor(one.prompt - 1))):
            return
        pages = [self._pool.pages[block] for block in one.blocks[: self._blocks(one)]]
        self._storage.put(self._key(prompt, self._floor(one.prompt)), pages)

    def _blocks(self, one: ActiveRequest) -> int:
        """Return how many blocks of it are stored or loaded: those that it has, except the last one
        of the prompt.
        """
        return min(self._floor(one.prompt) // self._size, len(one.blocks))

    def _floor(self, tokens: int) -> int:
        return max(tokens - 1, 0) // self._size * self._size

    @staticmethod
    def _key(prompt: Sequence[int], tokens: int) -> str:
        return key_of(tuple(prompt[:tokens]))
