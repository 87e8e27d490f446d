"""NVIDIA's GPUs, as `nvidia-smi` lists them.

Reading its output is pure. Formats: the manual page of nvidia-smi; its fields that are not known
are `[N/A]`, and a terminal's underline stands around the head of the table of links.
"""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Iterable, Sequence

from pdproxy_lab.up.errors import CANT_START, UpError
from pdproxy_lab.up.gpus import DEADLINE, MAX_GPUS, Gpu, GpuProcess, Gpus, Links, Vendor
from pdproxy_lab.up.program import run_to_end

_GPU_FIELDS = "index,uuid,name,memory.total,memory.used,mig.mode.current"
_PROCESS_FIELDS = "gpu_uuid,pid,process_name,used_memory"
_MIB = 1 << 20
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")

NVIDIA = Vendor(
    "nvidia-smi",
    "NVLink",
    re.compile(r"NV\d+"),
    ("CUDA_VISIBLE_DEVICES",),
    # nvidia-smi numbers GPUs by their bus, CUDA by their speed unless it is told otherwise
    {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    # UCX keeps what it has mapped of another engine's GPU. While it does, the memory of an engine
    # that has ended is not free, and the engine can't start again on its GPU.
    {"UCX_CUDA_IPC_CACHE": "n"},
)


async def read_nvidia() -> Gpus:
    """Ask `nvidia-smi`. No GPUs: there is no such program, or it finds none.

    Raises:
        UpError: it fails, or does not answer in time.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return Gpus(NVIDIA)
    format_ = "--format=csv,noheader,nounits"
    try:
        listed = await run_to_end(
            [program, f"--query-gpu={_GPU_FIELDS}", format_], DEADLINE, "nvidia-smi"
        )
    except UpError as error:
        if "No devices were found" in str(error):
            return Gpus(NVIDIA)
        raise UpError(f"the GPUs can't be read: {error}", CANT_START) from error
    used = await run_to_end(
        [program, f"--query-compute-apps={_PROCESS_FIELDS}", format_], DEADLINE, "nvidia-smi"
    )
    try:
        links = await run_to_end([program, "topo", "-m"], DEADLINE, "nvidia-smi topo -m")
    except UpError:  # not in every container: what is known of links only adds words
        links = b""
    return Gpus(NVIDIA, gpus_from(_text(listed), _text(used)), links_from(_text(links)))


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
                "MIG" if mig.lower() == "enabled" else None,
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
