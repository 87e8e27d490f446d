"""The file with the engines that sources found last: a proxy that begins while nobody can say where
engines are has them from there.

One file has those of all sources, by their URLs.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from pdproxy.fleet.sources import FoundEngine
from pdproxy.kit.regular_file import UnusableFileError, read_regular

MAX_FILE = 16 << 20
"""Bytes of the file. An engine has 400."""
MAX_SOURCES = 64
"""Sources whose engines are kept: those that were written last."""
_LATEST = 1e11
"""Seconds since 1970: a time that a calendar has."""


class Kept(msgspec.Struct, frozen=True):
    """The engines of a source. `at`: when they were found, in seconds since 1970."""

    at: Annotated[float, msgspec.Meta(ge=0, le=_LATEST)]
    engines: list[FoundEngine]


_DECODER = msgspec.json.Decoder(dict[str, Kept])


class FoundFile:
    """The engines of one source in the file. `name`: of the source."""

    def __init__(self, path: str, name: str) -> None:
        self._path = Path(path)
        self._name = name

    def __repr__(self) -> str:
        return f"<FoundFile {self._path}>"

    def read(self) -> Kept | None:
        """Return what was written last, None if there is nothing that can be used."""
        return self._read().get(self._name)

    def write(self, engines: Sequence[FoundEngine], now: float) -> None:
        """Have these engines in the file, which is whole at each moment. Raises OSError."""
        kept = {**self._read(), self._name: Kept(now, list(engines))}
        newest = sorted(kept, key=lambda name: kept[name].at)[-MAX_SOURCES:]
        content = msgspec.json.encode({name: kept[name] for name in newest})
        handle, path = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(path).replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                Path(path).unlink()
            raise

    def _read(self) -> dict[str, Kept]:
        try:
            return _DECODER.decode(read_regular(self._path, MAX_FILE))
        except (UnusableFileError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return {}
