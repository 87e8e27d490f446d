"""The GPUs of this machine: their memory, what runs on them, and how they are linked, as
`nvidia-smi` says.

Reading its output is pure. Formats: the manual page of nvidia-smi; its fields that are not known
are `[N/A]`, and a terminal's underline stands around the head of the table of links.
"""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdproxy_lab.up.errors import CANT_START, UpError
from pdproxy_lab.up.program import run_to_end

DEADLINE = 30.0
"""Seconds for `nvidia-smi`: a driver that is not kept loaded takes several, one that hangs never
answers.
"""
MAX_GPUS = 64
IDLE_SHARE = 0.05
"""Of its memory, so much may be in use on a GPU that nobody uses: drivers and displays take some.
More is in use by a process that this machine's container does not show.
"""
_GPU_FIELDS = "index,uuid,name,memory.total,memory.used,mig.mode.current"
_PROCESS_FIELDS = "gpu_uuid,pid,process_name,used_memory"
_MIB = 1 << 20
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_NVLINK = re.compile(r"NV\d+")


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that has memory on a GPU. `memory`: bytes, None where it is not known."""

    pid: int
    name: str
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `memory`, `used`: bytes. `mig`: it is divided, and engines can't use it whole."""

    index: int
    uuid: str
    name: str
    memory: int
    used: int
    mig: bool = False
    processes: tuple[GpuProcess, ...] = ()

    @property
    def in_use(self) -> str | None:
        """By what it is in use, None if by nothing."""
        if self.processes:
            first = max(self.processes, key=lambda one: one.memory or 0)
            size = "" if first.memory is None else f", {gib(first.memory)}"
            more = f" and {len(self.processes) - 1} more" if len(self.processes) > 1 else ""
            return f"process {first.pid} ({first.name}{size}){more}"
        if self.used > IDLE_SHARE * self.memory:
            return f"a process that is not shown here ({gib(self.used)} are taken)"
        return None


Links = Mapping[tuple[int, int], str]
"""How two GPUs are linked, by their indices, the lower one first: NV18, PIX, SYS, ..."""


def gib(size: int) -> str:
    """Return a number of bytes for people."""
    return f"{size / (1 << 30):.1f} GiB"


async def read_gpus() -> tuple[Sequence[Gpu], Links]:
    """Ask `nvidia-smi`. No GPUs: there is no such program, or it finds none.

    Raises:
        UpError: it fails, or does not answer in time.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), {}
    format_ = "--format=csv,noheader,nounits"
    try:
        listed = await run_to_end(
            [program, f"--query-gpu={_GPU_FIELDS}", format_], DEADLINE, "nvidia-smi"
        )
    except UpError as error:
        if "No devices were found" in str(error):
            return (), {}
        raise UpError(f"the GPUs can't be read: {error}", CANT_START) from error
    used = await run_to_end(
        [program, f"--query-compute-apps={_PROCESS_FIELDS}", format_], DEADLINE, "nvidia-smi"
    )
    try:
        links = await run_to_end([program, "topo", "-m"], DEADLINE, "nvidia-smi topo -m")
    except UpError:  # not in every container: what is known of links only adds words
        links = b""
    return gpus_from(_text(listed), _text(used)), links_from(_text(links))


def gpus_from(listed: str, used: str) -> Sequence[Gpu]:
    """Return the GPUs from two answers in CSV: of the GPUs, and of the processes on them.

    Raises:
        UpError: an answer has another form.
    """
    processes: dict[str, list[GpuProcess]] = {}
    for row in _rows(used):
        if len(row) == 4 and row[1].isdecimal():
            process = GpuProcess(int(row[1]), row[2] or "unknown", _bytes(row[3]))
            processes.setdefault(row[0], []).append(process)
    found = []
    for row in _rows(listed):
        memory = _bytes(row[3]) if len(row) == 6 else None
        if len(row) != 6 or not row[0].isdecimal():
            raise UpError(f"nvidia-smi lists a GPU as {','.join(row)[:120]!r}", CANT_START)
        if memory is None:
            raise UpError(
                f"nvidia-smi does not say how much memory GPU {row[0]} ({row[2]}) has: such a GPU "
                f"is not supported",
                CANT_START,
            )
        index, uuid, name, _, taken, mig = row
        found.append(
            Gpu(
                int(index),
                uuid,
                name,
                memory,
                _bytes(taken) or 0,
                mig.lower() == "enabled",
                tuple(processes.get(uuid, ())),
            )
        )
    if len(found) > MAX_GPUS:
        raise UpError(f"nvidia-smi lists more than {MAX_GPUS} GPUs", CANT_START)
    return sorted(found, key=lambda one: one.index)


def links_from(table: str) -> Links:
    """Return the links from the table of `nvidia-smi topo -m`; none if it is another text."""
    lines = [
        [cell.strip() for cell in line.split("\t")] for line in _ESCAPES.sub("", table).splitlines()
    ]
    head = next((cells for cells in lines if "GPU0" in cells[1:]), [])
    found = {}
    for cells in lines:
        row = _index(cells[0])
        if row is None or cells is head:
            continue
        for name, cell in zip(head[1:], cells[1:], strict=False):
            column = _index(name)
            if column is not None and row < column:
                found[row, column] = cell
    return found


def is_nvlink(link: str | None) -> bool:
    """Return whether a link is NVLink."""
    return link is not None and _NVLINK.fullmatch(link) is not None


def _index(name: str) -> int | None:
    number = name.removeprefix("GPU")
    return int(number) if number != name and number.isdecimal() else None


def _rows(text: str) -> Iterable[list[str]]:
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if row:
            yield [cell.strip() for cell in row]


def _bytes(mib: str) -> int | None:
    return int(mib) * _MIB if mib.isdecimal() else None


def _text(output: bytes) -> str:
    return output.decode("utf-8", "replace")
