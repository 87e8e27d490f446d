"""What a model needs: the bytes of its weights, from its folder or from the cache of downloads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from pdproxy_lab.up.errors import CANT_START, UpError

MAX_JSON = 64 << 20
"""Bytes of a file of a model that is read here. The index of a model of 600 GB has 10 MB."""
_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
"""Files of weights. A folder may have them in several forms: the first one counts."""


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Model:
    """The served model: `source` is a name or a folder, `name` is its name for clients.

    `weights`: bytes; None: not known, because it is not on this machine. `heads`: of its attention,
    which tensor parallel ranks share out; None: not known.
    """

    source: str
    name: str
    local: bool = False
    """Whether it is on this machine, so that nothing is downloaded."""
    weights: int | None = None
    heads: int | None = None


class _Total(msgspec.Struct):
    total_size: int | float


class _Index(msgspec.Struct):
    metadata: _Total


class _Text(msgspec.Struct):
    num_attention_heads: int | None = None


class _Config(msgspec.Struct):
    num_attention_heads: int | None = None
    text_config: _Text | None = None


def read_model(named: str, env: Mapping[str, str]) -> Model:
    """Return what is known of a model. `named`: a folder, or a name on the hub.

    Raises:
        UpError: it is a folder without a model.
    """
    folder = Path(named)
    # a name on the hub has one slash, and may look like a path that is not there
    if folder.is_dir() or named.startswith(("/", ".", "~")):
        folder = folder.expanduser()
        if not (folder / "config.json").is_file():
            what = "has no config.json" if folder.is_dir() else "is no folder"
            raise UpError(f"{named} {what}: give the folder of a model, or a name", CANT_START)
        return _of_folder(folder, str(folder.resolve()), named.rstrip("/").rpartition("/")[2])
    cached = cached_folder(named, env)
    if cached is None:
        return Model(named, named)
    # vLLM gets the name, under which it finds the same folder
    return _of_folder(cached, named, named)


def cached_folder(name: str, env: Mapping[str, str]) -> Path | None:
    """Return the folder of a model in the cache of downloads; None if it is not there."""
    home = Path(
        env.get("HF_HOME")
        or Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    )
    cache = Path(env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or home / "hub")
    model = cache / f"models--{name.replace('/', '--')}"
    try:
        revision = (model / "refs" / "main").read_text()[:256].strip()
    except OSError:
        return None
    folder = model / "snapshots" / revision
    return folder if (folder / "config.json").is_file() else None


def _of_folder(folder: Path, source: str, name: str) -> Model:
    weights = _weights(folder)
    config = _read(folder / "config.json", _Config)
    heads = None
    if config is not None:
        text = config.text_config
        heads = config.num_attention_heads or (None if text is None else text.num_attention_heads)
    return Model(source, name or source, local=weights is not None, weights=weights, heads=heads)


def _weights(folder: Path) -> int | None:
    """Return the bytes of the weights. None: there are none, as in half a download."""
    index = _read(folder / _INDEX, _Index)
    if index is not None and index.metadata.total_size > 0:
        return int(index.metadata.total_size)
    for pattern in _WEIGHTS:
        if size := sum(path.stat().st_size for path in folder.glob(pattern) if path.is_file()):
            return size
    return None


def _read(path: Path, form: type[_T]) -> _T | None:
    """Return what a JSON file holds; None if there is no such file, or it is another thing."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_JSON:
                return None
            return msgspec.json.decode(file.read(), type=form)
    except (OSError, msgspec.MsgspecError):
        return None
