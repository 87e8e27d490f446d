"""KV in files of a folder that engines share: what `pdproxy.sim.storage` is, across processes.

Owns the files' names and content. A file appears whole or not at all; nothing is ever removed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pdproxy.sim.memory import Page

_decode = msgspec.msgpack.Decoder(list[Page]).decode


class FolderStorage:
    """The pages in a folder, which is made if it is not there.

    Raises:
        OSError: it can't be made or used, from any method.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.mkdir(parents=True, exist_ok=True)

    def has(self, key: str) -> bool:
        """Tell whether something was put under a key."""
        return (self._path / key).exists()

    def get(self, key: str) -> Sequence[Page] | None:
        """Return what was put under a key, None for nothing."""
        try:
            return _decode((self._path / key).read_bytes())
        except FileNotFoundError:
            return None

    def put(self, key: str, pages: Sequence[Page]) -> None:
        """Put pages under a key, over what was there."""
        new = self._path / f".{key}.{os.getpid()}"
        new.write_bytes(msgspec.msgpack.encode(list(pages)))
        new.replace(self._path / key)
