"""Finds vLLM: its program, its Python interpreter, and the hardware that it can use.

Owns the words for what is missing and how to get it.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pdproxy_lab.demo.options import CANT_START, DemoError
from pdproxy_lab.demo.vllm.process import run_to_end

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
LOOK_DEADLINE = 180.0
"""Seconds. Importing torch for the first time on a slow disk takes long."""

HOW_TO_GET = (
    "Install it in an environment of its own: `python -m venv vllm && vllm/bin/pip install vllm "
    "nixl`, then give"
    " `--vllm vllm/bin/vllm`. Or take `--engine sim`, which needs neither vLLM nor a GPU."
)


class FoundVllm(msgspec.Struct, frozen=True):
    """An installed vLLM: its version, whether NIXL is installed, the number of GPUs, and whether it
    is built for CPUs.
    """

    version: str | None
    nixl: bool
    gpus: int
    cpu: bool


def find_program(name: str) -> Path:
    """Return vLLM's program.

    Raises:
        DemoError: there is none; says how to get it.
    """
    path = shutil.which(name)
    if path is None:
        where = "no vllm is on the PATH" if name == "vllm" else f"--vllm: {name} is no program"
        raise DemoError(f"{where}. {HOW_TO_GET}", CANT_START)
    return Path(path).absolute()


def interpreter_of(program: Path) -> Path:
    """Return the Python that a console script belongs to, from its first line, else the one in the
    same folder.

    Raises:
        DemoError: neither is there.
    """
    real = program.resolve()
    with real.open("rb") as script:
        first = script.readline(4096)
    if first.startswith(b"#!") and b"python" in first:
        named = first[2:].split()[0].decode("utf-8", "replace")
        if Path(named).is_file() and not named.endswith("/env"):
            return Path(named)
    beside = real.parent / "python"
    if beside.is_file():
        return beside
    raise DemoError(
        f"can't tell which Python {program} belongs to: give vLLM's own console script as --vllm",
        CANT_START,
    )


async def look(python: Path) -> FoundVllm:
    """Return the installed vLLM.

    Raises:
        DemoError: the interpreter can't say.
    """
    said = await run_to_end(
        [python, SCRIPTS / "look.py"], LOOK_DEADLINE, f"looking at vLLM with {python}"
    )
    try:
        return msgspec.json.decode(said.splitlines()[-1] if said else b"", type=FoundVllm)
    except msgspec.MsgspecError as error:
        raise DemoError(
            f"{python} reports something unexpected about vLLM: {error}", CANT_START
        ) from error


def judge(found: FoundVllm, python: Path, engines: int) -> None:
    """Refuse what can't work with this vLLM.

    Raises:
        DemoError: says what is missing.
    """
    if found.version is None:
        raise DemoError(f"there is no vLLM in {python}'s environment. {HOW_TO_GET}", CANT_START)
    if not found.nixl:
        raise DemoError(
            f"vLLM {found.version} has no NIXL beside it, which moves the KV: `{python} -m pip "
            f"install nixl`",
            CANT_START,
        )
    if not found.gpus and not found.cpu:
        raise DemoError(
            f"vLLM {found.version} is built for GPUs and sees none here: install vLLM's CPU "
            f"build, or take `--engine sim`",
            CANT_START,
        )
    if 0 < found.gpus < engines:
        raise DemoError(
            f"{engines} engines need a GPU each, and vLLM sees {found.gpus}: lower --prefill or "
            f"--decode",
            CANT_START,
        )


async def make_tiny_model(python: Path, cache: Path, deadline: float) -> Path:
    """Return the folder of the tiny model, making it if it is not in `cache` yet.

    Raises:
        DemoError: it can't be made.
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
        raise DemoError(
            f"the tiny model can't be kept in {cache}: {error.strerror or error}", CANT_START
        ) from error
    return folder


def _make_room(folder: Path) -> None:
    """Remove what an earlier attempt left there, and make the folder around it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def visible_gpus(said: str | None, count: int) -> Sequence[str]:
    """Return the names of the GPUs that vLLM sees, given CUDA_VISIBLE_DEVICES (None: not set)."""
    named = [name.strip() for name in said.split(",") if name.strip()] if said is not None else []
    return named[:count] if len(named) >= count else [str(number) for number in range(count)]
