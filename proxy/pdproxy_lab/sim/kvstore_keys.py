"""A KV store under keys that requests bring (contract `kvstore-keys`), as the `KVStoreConnector` of
vLLM PR 12957 does it. Pure.

Owns its rules, none of which checks the content under a key:

- P stores a prompt under the first of `kvcache_store_keys`, when all of it is computed; D looks
  under the first of `kvcache_load_keys`. Nothing is ever removed; a later store under the same key
  replaces the earlier one.
- Nothing there, or `prefix_prompt_ids` of another length than the prompt: D computes the prompt
  itself and reports nothing.
- Something there: D uses it as the prompt's KV. With that of a shorter or another prompt its text
  is wrong.
- An empty list of keys, or keys without `prefix_prompt_ids`: a real engine's process dies of the
  index, or of a tensor made of None.
- Params with another field, or a list that isn't flat, are refused by the API server, with a
  message that names the field.
"""

from __future__ import annotations

from typing import Any

from pdproxy_lab.sim.active import ActiveRequest
from pdproxy_lab.sim.connector import Connector
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.memory import EMPTY, BlockPool
from pdproxy_lab.sim.request import EngineDeadError
from pdproxy_lab.sim.storage import Storage, key_of

_KINDS: dict[str, tuple[type, str]] = {
    "prefix_prompt_ids": (int, "integers"),
    "kvcache_load_keys": (str, "strings"),
    "kvcache_store_keys": (str, "strings"),
}


class KVStoreKeys(Connector):
    """The connector of one engine. Producers store, consumers load; `kv_both` does both."""

    def __init__(self, facts: SimFacts, pool: BlockPool, storage: Storage) -> None:
        super().__init__()
        usual = {
            "prefill": "kv_producer",
            "decode": "kv_consumer",
            "aggregated": "kv_both",
            "any": "kv_both",
        }
        role = facts.kv_role or usual[facts.role]
        self._stores, self._loads = role != "kv_consumer", role != "kv_producer"
        self._pool, self._storage = pool, storage

    def wanted(self, one: ActiveRequest) -> tuple[int, bool]:
        """Return how many tokens the store has beyond those that are here; the last one is computed
        here in any case.

        Raises:
            EngineDeadError: the keys, or the ids that belong to them, can't be used.
        """
        key = self._key(one, "kvcache_load_keys") if self._loads else None
        if key is None or len(_ids(one)) != one.prompt or not self._storage.has(key):
            return 0, False
        return max(one.prompt - 1 - one.computed, 0), False

    def load(self, one: ActiveRequest, tokens: int) -> None:
        """Put the pages under the key into the request's blocks; missing ones are empty."""
        key = self._key(one, "kvcache_load_keys")
        stored = list((self._storage.get(key) if key is not None else None) or ())
        begun = one.computed // self._pool.block_size
        wanted = -(-(one.computed + tokens) // self._pool.block_size)
        stored += [EMPTY] * (wanted - len(stored))
        for place in range(begun, wanted):
            self._pool.pages[one.blocks[place]] = stored[place]

    def stepped(self, one: ActiveRequest, *, first: bool, now: float) -> None:
        """Store a prompt whose last token has just been computed.

        Raises:
            EngineDeadError: the keys, or the ids that belong to them, can't be used.
        """
        if not self._stores or one.generated or one.computed < one.prompt:
            return
        key = self._key(one, "kvcache_store_keys")
        if key is not None:
            _ids(one)
            count = -(-one.prompt // self._pool.block_size)
            self._storage.put(key, [self._pool.pages[block] for block in one.blocks[:count]])

    @staticmethod
    def _key(one: ActiveRequest, name: str) -> str | None:
        keys = (one.params or {}).get(name)
        if keys is None:
            return None
        if not keys:
            raise EngineDeadError
        return key_of("kvstore-keys", keys[0])  # a client's key could be any file's name


def refusal(params: dict[str, Any] | None) -> str | None:
    """Return the API server's message for `kv_transfer_params` that it refuses, None if it accepts
    them.
    """
    if params is None:
        return None
    for name, (kind, words) in _KINDS.items():
        value = params.get(name)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(one, kind) for one in value)
        ):
            return f"{name}: {value} should be a list of {words} or None."
    unknown = [name for name in params if name not in _KINDS]
    return f"Unexpected keyword argument '{unknown[0]}'" if unknown else None


def _ids(one: ActiveRequest) -> list[Any]:
    ids = (one.params or {}).get("prefix_prompt_ids")
    if ids is None:
        raise EngineDeadError
    return list(ids)
