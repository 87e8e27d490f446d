"""What the virtual engines have in their prefix caches, as an index of exact KV events would know it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pdproxy.lab.simulate.memory import KVMemory
from pdproxy.scheduling.policy import Ask


class EngineMemories:
    """`memories`: by URL, with the tokens of a unit of that engine."""

    def __init__(self, memories: Mapping[str, tuple[KVMemory, int]]) -> None:
        self._memories = memories

    def cached(self, ask: Ask) -> Mapping[str, int]:
        """Return the tokens of a prompt that engines have, by URL."""
        keys, tokens = ask.keys, ask.tokens
        if not keys or tokens is None:
            return {}
        found = {}
        for url, (memory, unit) in self._memories.items():
            if memory.has(keys[0]):
                found[url] = memory.find(keys, (tokens - 1) // unit)[0] * unit
        return found
