"""KV and encoder outputs in the files of a folder that engines of several processes share.

Owns the files' names and content. Nothing is ever removed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pdproxy_lab.sim.ec_connector import EncoderOutput
from pdproxy_lab.sim.memory import Page

_decode = msgspec.msgpack.Decoder(list[Page]).decode
_decode_output = msgspec.msgpack.Decoder(EncoderOutput).decode
_IN_NAMES = str.maketrans({"/": "%2F", ".": "%2E"})
"""How a client's `uuid` can't leave the folder. In vLLM it can."""


class FolderStorage:
    """The pages in a folder, which is created if it does not exist. A file appears only when it is
    complete.

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


class OutputFolder:
    """The encoder outputs in a folder, each in a folder of its own, which as in vLLM also appears
    when it is looked for.

    Raises:
        OSError, ValueError: the folder can't be used, or the identifier can't be a name in it; any
            method may raise them.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def has(self, identifier: str) -> bool:
        """Return whether there is an output."""
        return self._file(identifier).exists()

    def get(self, identifier: str) -> EncoderOutput:
        """Return an output. One that is not whole is a `ValueError`, too."""
        data = self._file(identifier).read_bytes()
        try:
            return _decode_output(data)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from error

    def put(self, identifier: str, output: EncoderOutput) -> None:
        """Store an output, in place of the one before."""
        self._file(identifier).write_bytes(msgspec.msgpack.encode(output))

    def _file(self, identifier: str) -> Path:
        folder = self._path / identifier.translate(_IN_NAMES)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / "encoder_cache.safetensors"
