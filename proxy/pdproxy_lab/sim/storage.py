"""KV outside of the engines: pages under keys. Pure; `pdproxy_lab.sim.folder` keeps them in files.

Owns the interface and the storage in memory. Nothing is ever evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from pdproxy_lab.sim.memory import Page


class Storage(Protocol):
    """Pages by key."""

    def has(self, key: str) -> bool:
        """Return whether pages are stored under a key."""

    def get(self, key: str) -> Sequence[Page] | None:
        """Return the pages under a key, None if there are none."""

    def put(self, key: str, pages: Sequence[Page]) -> None:
        """Store pages under a key, in place of those before."""


class MemoryStorage:
    """A storage in memory for the engines of one process."""

    def __init__(self) -> None:
        self._pages: dict[str, tuple[Page, ...]] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def has(self, key: str) -> bool:
        """Return whether pages are stored under a key."""
        return key in self._pages

    def get(self, key: str) -> Sequence[Page] | None:
        """Return the pages under a key, None if there are none."""
        return self._pages.get(key)

    def put(self, key: str, pages: Sequence[Page]) -> None:
        """Store pages under a key, in place of those before."""
        self._pages[key] = tuple(pages)


def key_of(*parts: object) -> str:
    """Return a key that is the same in all processes, 32 hex digits."""
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()
