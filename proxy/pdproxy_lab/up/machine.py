"""What this machine has for engines: GPUs, memory, vLLM, and ports that nobody listens on."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pdproxy_lab.up.amd_gpus import read_amd
from pdproxy_lab.up.errors import CANT_START, UpError
from pdproxy_lab.up.gpus import Gpus
from pdproxy_lab.up.nvidia_gpus import NVIDIA, read_nvidia
from pdproxy_lab.up.vllm import FoundVllm, find_program, interpreter_of, judge, look

LOOPBACK = "127.0.0.1"
_LAST_PORT = 32_000
"""The system gives those above to connections."""


@dataclass(frozen=True, slots=True)
class Vllm:
    """The vLLM that engines run: its program, its Python, and what that has."""

    program: Path
    python: Path
    found: FoundVllm


@dataclass(frozen=True, slots=True)
class Machine:
    """What engines are planned with. `memory`: bytes of memory that are available. `visible`: the
    variable that names the GPUs to use, such as CUDA_VISIBLE_DEVICES, and its text; None: no
    variable does.
    """

    vllm: Vllm
    gpus: Gpus
    memory: int
    cores: int
    visible: tuple[str, str] | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether engines run on CPUs."""
        return self.vllm.found.cpu


async def read_machine(program: str, env: Mapping[str, str]) -> Machine:
    """Look at this machine. `program`: vLLM's, a path or a name on the PATH.

    Raises:
        UpError: there is no vLLM, it is too old, or the GPUs can't be read.
    """
    path = find_program(program)
    python = interpreter_of(path)
    found = await look(python)
    judge(found, python)
    gpus = Gpus(NVIDIA) if found.cpu else await read_gpus(env)
    return Machine(
        Vllm(path, python, found),
        gpus,
        _available_memory(),
        os.cpu_count() or 1,
        gpus.vendor.visible(env),
    )


async def read_gpus(env: Mapping[str, str]) -> Gpus:
    """Return NVIDIA's GPUs; AMD's if there are none of those.

    Raises:
        UpError: they can't be read.
    """
    found = await read_nvidia()
    return found if found.listed else await read_amd(env)


def _available_memory() -> int:
    """Return the bytes of memory that processes can still get."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


class Ports:
    """Gives out ports of the loopback that nobody listens on, each once.

    `ours`: ports of engines that were started before, which are free for their successors. `base`:
    where to look for all of them, in place of the usual ports.
    """

    def __init__(self, ours: Container[int] = (), base: int | None = None) -> None:
        self._ours, self._base = ours, base
        self._given: set[int] = set()

    def take(self, first: int, preferred: Iterable[int] = ()) -> int:
        """Return a port: one of `preferred`, else the first free one from `first` on.

        Raises:
            UpError: none is free.
        """
        first = self._base or first
        candidates: list[int] = [*preferred, *range(first, _LAST_PORT)]
        for port in candidates:
            if port not in self._given and (port in self._ours or port_taken(port) is None):
                self._given.add(port)
                return port
        raise UpError(f"no port from {first} to {_LAST_PORT} is free", CANT_START)


def port_taken(port: int, host: str = LOOPBACK) -> str | None:
    """Return why nobody can listen on a port, None if somebody can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return "another process listens there"
            return str(error.strerror or error)
    return None
