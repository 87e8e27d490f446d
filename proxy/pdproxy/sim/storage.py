"""KV outside of any engine: pages under keys, put by whoever computed them. Pure; `pdproxy.sim.folder` keeps them in files.

Owns the interface and the storage in this process's memory. Nothing is ever evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from pdproxy.sim.memory import Page


class Storage(Protocol):
    """Pages by key."""

    def has(self, key: str) -> bool:
        """Tell whether something was put under a key."""

    def get(self, key: str) -> Sequence[Page] | None:
        """Return what was put under a key, None for nothing."""

    def put(self, key: str, pages: Sequence[Page]) -> None:
        """Put pages under a key, over what was there."""


class MemoryStorage:
    """A storage for the engines that are given it."""

    def __init__(self) -> None:
        self._pages: dict[str, tuple[Page, ...]] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def has(self, key: str) -> bool:
        """Tell whether something was put under a key."""
        return key in self._pages

    def get(self, key: str) -> Sequence[Page] | None:
        """Return what was put under a key, None for nothing."""
        return self._pages.get(key)

    def put(self, key: str, pages: Sequence[Page]) -> None:
        """Put pages under a key, over what was there."""
        self._pages[key] = tuple(pages)


def key_of(*parts: object) -> str:
    """Return a key that is the same in all processes, 32 hex digits."""
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()
