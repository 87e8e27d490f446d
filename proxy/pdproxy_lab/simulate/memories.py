"""What the virtual engines have in their prefix caches: as an index of exact KV events would know
it, or one of routing. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.prefix.routed import RoutedIndex
from pdproxy_lab.simulate.memory import KVMemory


class EngineMemories:
    """Those of all engines."""

    def __init__(self) -> None:
        self._memories: dict[str, tuple[KVMemory, int]] = {}

    def add(self, url: str, memory: KVMemory, unit: int) -> None:
        """Know an engine, too. `unit`: tokens of a unit of its memory."""
        self._memories[url] = memory, unit

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


class RoutedMemories:
    """What one proxy has sent there. `sizes`: by URL, the tokens that an engine holds, and those of
    a unit of it.
    """

    def __init__(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        self._index = RoutedIndex(1)
        self._units = {url: unit for url, (_, unit) in sizes.items()}
        self._urls = list(sizes)
        self._places = {url: place for place, url in enumerate(sizes)}
        for url, (tokens, unit) in sizes.items():
            self._index.set_capacity(self._places[url], tokens // unit)

    def routed(self, url: str, keys: Sequence[int]) -> None:
        """Note that a prompt was sent to an engine."""
        if keys:
            self._index.routed(self._places[url], (keys,))

    def cached(self, ask: Ask) -> Mapping[str, int]:
        """Return the tokens of a prompt that engines should have, by URL."""
        keys, tokens = ask.keys, ask.tokens
        if not keys or tokens is None:
            return {}
        found = {}
        for place, count in self._index.lookup((keys,)).anywhere.items():
            url = self._urls[place]
            unit = self._units[url]
            found[url] = min(count, (tokens - 1) // unit) * unit
        return found
