"""KV in the files of a folder that engines of several processes share.

Owns the files' names and content. A file appears only when it is complete. Nothing is ever removed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pdproxy_lab.sim.memory import Page

_decode = msgspec.msgpack.Decoder(list[Page]).decode


class FolderStorage:
    """The pages in a folder, which is created if it does not exist.

    Raises:
        OSError: it can't be created or used; any method may raise it.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.mkdir(parents=True, exist_ok=True)

    def has(self, key: str) -> bool:
        """Return whether pages are stored under a key."""
        return (self._path / key).exists()

    def get(self, key: str) -> Sequence[Page] | None:
        """Return the pages under a key, None if there are none."""
        try:
            return _decode((self._path / key).read_bytes())
        except FileNotFoundError:
            return None

    def put(self, key: str, pages: Sequence[Page]) -> None:
        """Store pages under a key, in place of those before."""
        new = self._path / f".{key}.{os.getpid()}"
        new.write_bytes(msgspec.msgpack.encode(list(pages)))
        new.replace(self._path / key)
