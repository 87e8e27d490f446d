"""Finds vLLM: its program, its Python interpreter, its version, and what is installed beside it.

Owns the words for what is missing and how to get it.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import msgspec

from pdproxy_lab.up.errors import CANT_START, UpError
from pdproxy_lab.up.program import run_to_end

SCRIPTS = Path(__file__).resolve().parent / "scripts"
LOOK_DEADLINE = 180.0
"""Seconds. Importing torch for the first time on a slow disk takes long."""

HOW_TO_GET = (
    "Install it in an environment of its own: `python -m venv vllm && vllm/bin/pip install vllm "
    "nixl`, then give `--vllm vllm/bin/vllm`."
)
OLDEST = (0, 26)
"""The oldest release of vLLM that was proven on GPUs (docs/reference/versions.md)."""
_VERSION = re.compile(r"(\d+)\.(\d+)")


class FoundVllm(msgspec.Struct, frozen=True):
    """An installed vLLM: its version (None: there is none), the connectors whose packages are
    installed, and whether it is built for CPUs.
    """

    version: str | None
    connectors: tuple[str, ...] = ()
    cpu: bool = False


def find_program(name: str) -> Path:
    """Return vLLM's program.

    Raises:
        UpError: there is none; says how to get it.
    """
    path = shutil.which(name)
    if path is None:
        where = "no vllm is on the PATH" if name == "vllm" else f"--vllm: {name} is no program"
        raise UpError(f"{where}. {HOW_TO_GET}", CANT_START)
    return Path(path).absolute()


def interpreter_of(program: Path) -> Path:
    """Return the Python that a console script belongs to, from its first line, else the one in the
    same folder.

    Raises:
        UpError: neither is there.
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
    raise UpError(
        f"can't tell which Python {program} belongs to: give vLLM's own console script as --vllm",
        CANT_START,
    )


async def look(python: Path) -> FoundVllm:
    """Return the installed vLLM.

    Raises:
        UpError: the interpreter can't say.
    """
    said = await run_to_end(
        [python, SCRIPTS / "look.py"], LOOK_DEADLINE, f"looking at vLLM with {python}"
    )
    try:
        return msgspec.json.decode(said.splitlines()[-1] if said else b"", type=FoundVllm)
    except msgspec.MsgspecError as error:
        raise UpError(
            f"{python} reports something unexpected about vLLM: {error}", CANT_START
        ) from error


def judge(found: FoundVllm, python: Path) -> None:
    """Refuse an environment without vLLM, and a vLLM that is too old.

    Raises:
        UpError: says what is missing.
    """
    if found.version is None:
        raise UpError(f"there is no vLLM in {python}'s environment. {HOW_TO_GET}", CANT_START)
    numbers = _VERSION.match(found.version)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise UpError(
            f"vLLM {found.version} is older than {OLDEST[0]}.{OLDEST[1]}: `{python} -m pip install "
            f"--upgrade vllm nixl`",
            CANT_START,
        )
