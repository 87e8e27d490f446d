"""Profiles: a measured engine in a JSON file, its times and what they were measured on.

Owns the file's shape and the folder of the profiles that pdproxy ships. A profile is data alone:
reading one runs nothing.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import msgspec

from pdproxy.engine_model.fitted import FittedRanges
from pdproxy.engine_model.hardware import Hardware
from pdproxy.kit.regular_file import UnusableFileError, read_regular

MAX_BYTES = 1 << 20
MAX_NAME = 100
MOST = 1 << 24
"""The largest limit of an engine: a simulated engine keeps a list of its blocks."""
_MAX_ERROR = 300
_SUFFIX = ".json"


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a profile was measured on."""

    accelerator: str
    model: str
    """The model, with the type of its weights."""
    engine: str
    """The engine and its version."""
    measured: str
    """What was measured how, and when."""
    missing: list[str] = []
    """What the numbers do not cover."""
    spread: dict[str, tuple[float, float]] = {}
    """By names of `hardware`: the range of 80 % of the values that resampled measurements give."""
    assumed: list[str] = []
    """What was not measured, and why."""


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's options with which the profile was measured, by vLLM's names."""

    block_size: int = 16
    num_gpu_blocks: int = 8192
    max_model_len: int = 8192
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        for name in self.__struct_fields__:
            if not 1 <= getattr(self, name) <= MOST:
                raise ValueError(f"{name} must be 1 to {MOST}, got {getattr(self, name)}")
        if (self.num_gpu_blocks - 1) * self.block_size < self.max_model_len:
            raise ValueError(
                f"num_gpu_blocks = {self.num_gpu_blocks} blocks of {self.block_size} tokens hold "
                f"less than one request"
                f" of max_model_len = {self.max_model_len}"
            )


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine on one accelerator with one model."""

    name: str
    origin: Origin
    engine: EngineLimits = EngineLimits()
    hardware: Hardware
    fitted: FittedRanges | None = None
    """What it was fitted to. None: the profile does not say."""

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        if not self.name or not self.name.isprintable() or len(self.name) > MAX_NAME:
            raise ValueError(
                f"name must be 1 to {MAX_NAME} printable characters, got {self.name[:MAX_NAME]!r}"
            )

    def options(self) -> dict[str, Any]:
        """Return what the profile says of an engine: fields of a simulated engine's `Facts`."""
        return {**msgspec.structs.asdict(self.engine), "hardware": self.hardware}


def shipped() -> tuple[str, ...]:
    """Return the names of the profiles that pdproxy ships."""
    folder = resources.files("pdproxy.engine_model").joinpath("profiles")
    return tuple(
        sorted(
            file.name[: -len(_SUFFIX)] for file in folder.iterdir() if file.name.endswith(_SUFFIX)
        )
    )


def load(name: str) -> Profile:
    """Return a shipped profile by its name, else one in a file.

    Raises:
        ValueError: there is none, or it can't be used; one line that names it.
    """
    if name in shipped():
        return _decoded(
            name,
            resources.files("pdproxy.engine_model")
            .joinpath("profiles", name + _SUFFIX)
            .read_bytes(),
        )
    try:
        content = read_regular(name, MAX_BYTES)
    except UnusableFileError as error:
        if error.is_missing:
            raise ValueError(f"{name}: neither a file nor one of {', '.join(shipped())}") from None
        raise ValueError(f"{name!r}: {error}") from None
    return _decoded(name, content)


def _decoded(name: str, content: bytes) -> Profile:
    try:
        return msgspec.json.decode(content, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: {_one_line(str(error))}") from None


def _one_line(text: str) -> str:
    """Return an error so that a terminal can show it: a field's name may have any letters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_MAX_ERROR])
