"""What a model needs: the bytes of its weights, from its folder, from the cache of downloads, or
from its description at the hub.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from pdproxy_lab.up.errors import CANT_START, UpError
from pdproxy_lab.up.gpus import gib
from pdproxy_lab.up.program import run_to_end
from pdproxy_lab.up.vllm import SCRIPTS
from pdproxy_lab.up.weights import estimate

MAX_JSON = 64 << 20
"""Bytes of a file of a model that is read here. The index of a model of 600 GB has 10 MB."""
DESCRIBE_DEADLINE = 30.0
"""Seconds to download a model's description."""
_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
"""Files of weights. A folder may have them in several forms: the first one counts."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Model:
    """The served model: `source` is a name or a folder, `name` is its name for clients.

    `weights`: bytes; None: not known. `heads`: of its attention, which tensor parallel ranks share
    out; None: not known.
    """

    source: str
    name: str
    local: bool = False
    """Whether it is on this machine, so that nothing is downloaded."""
    weights: int | None = None
    heads: int | None = None
    is_estimate: bool = False
    """Whether the bytes follow from its config.json alone."""

    @property
    def size(self) -> str:
        """Its weights' bytes, in words; nothing if they are not known."""
        if self.weights is None:
            return ""
        about = "about " if self.is_estimate else ""
        return f"weights of {about}{gib(self.weights)}"


class _Total(msgspec.Struct):
    total_size: int | float


class _Index(msgspec.Struct):
    metadata: _Total
    weight_map: dict[str, str] = {}


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


async def describe(
    model: Model, python: Path, revision: str | None, env: Mapping[str, str]
) -> Model:
    """Return what is known of a model once its description was downloaded from the hub; `model`
    itself if its size is known, if it is a folder, or if the hub does not answer in time.

    vLLM downloads the same files a moment later, to the same place. `python`: vLLM's, whose library
    and settings it uses.
    """
    other_hub = env.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true")
    if model.weights is not None or model.source.startswith("/") or other_hub:
        return model
    command: list[str | Path] = [python, SCRIPTS / "describe.py", model.source]
    if revision is not None:
        command.append(revision)
    try:
        said = await run_to_end(command, DESCRIBE_DEADLINE, "asking the hub")
        folder = msgspec.json.decode(said.splitlines()[-1] if said else b"", type=str)
    except (UpError, msgspec.MsgspecError):
        return model
    return await asyncio.to_thread(_of_folder, Path(folder), model.source, model.name)


def _of_folder(folder: Path, source: str, name: str) -> Model:
    index = _read(folder / _INDEX, _Index)
    there = _there(folder, index)
    weights = there
    if index is not None and index.metadata.total_size > 0:
        weights = int(index.metadata.total_size)
    heads = None
    config = _read(folder / "config.json", _Config)
    if config is not None:
        text = config.text_config
        heads = config.num_attention_heads or (None if text is None else text.num_attention_heads)
    is_estimate = weights is None
    if is_estimate:
        weights = estimate(_content(folder / "config.json"))
    return Model(
        source,
        name or source,
        local=there is not None,
        weights=weights,
        heads=heads,
        is_estimate=is_estimate and weights is not None,
    )


def _there(folder: Path, index: _Index | None) -> int | None:
    """Return the bytes of the files of weights. None: there are none, or not all, as in half a
    download.
    """
    if index is not None and index.weight_map:
        files = [folder / name for name in set(index.weight_map.values())]
        if all(path.is_file() for path in files):
            return sum(path.stat().st_size for path in files)
        return None
    for pattern in _WEIGHTS:
        if size := sum(path.stat().st_size for path in folder.glob(pattern) if path.is_file()):
            return size
    return None


def _read(path: Path, form: type[_T]) -> _T | None:
    """Return what a JSON file holds; None if there is no such file, or it is another thing."""
    try:
        return msgspec.json.decode(_content(path), type=form)
    except msgspec.MsgspecError:
        return None


def _content(path: Path) -> bytes:
    """Return a file's content; nothing if there is no such file, or it is too large."""
    try:
        with path.open("rb") as file:
            return b"" if os.fstat(file.fileno()).st_size > MAX_JSON else file.read()
    except OSError:
        return b""
