"""The tiny model of random weights, for machines without GPUs: its words mean nothing."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from pdproxy_lab.up.errors import CANT_START, UpError
from pdproxy_lab.up.model import Model
from pdproxy_lab.up.program import run_to_end
from pdproxy_lab.up.vllm import SCRIPTS

TINY = "tiny"
"""Its name."""


async def tiny_model(python: Path, env: Mapping[str, str], deadline: float) -> Model:
    """Return the tiny model, making it if it is not in the cache yet. `python`: vLLM's.

    Raises:
        UpError: it can't be made.
    """
    home = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = await make_tiny_model(python, home / "pdproxy", deadline)
    return Model(str(folder), TINY, local=True)


async def make_tiny_model(python: Path, cache: Path, deadline: float) -> Path:
    """Return the folder of the tiny model, making it if it is not in `cache` yet.

    Raises:
        UpError: it can't be made.
    """
    folder = cache / f"tiny-{_digest(SCRIPTS / 'tiny_model.py')}"
    if folder.is_dir():
        return folder
    half = folder.with_suffix(".half")
    try:
        await asyncio.to_thread(_make_room, half)
        await run_to_end(
            [python, SCRIPTS / "tiny_model.py", half], deadline, "making the tiny model"
        )
        await asyncio.to_thread(half.rename, folder)
    except OSError as error:
        raise UpError(
            f"the tiny model can't be kept in {cache}: {error.strerror or error}", CANT_START
        ) from error
    return folder


def _make_room(folder: Path) -> None:
    """Remove what an earlier attempt left there, and make the folder around it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
