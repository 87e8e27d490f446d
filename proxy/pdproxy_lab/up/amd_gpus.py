"""AMD's GPUs, as `amd-smi` lists them, or `rocm-smi` where there is no `amd-smi`.

Reading their output is pure. Formats: ROCm's documentation and the source of both programs.

- `amd-smi` prints a list with an object per GPU, from ROCm 7 on some of them as
  `{"gpu_data": [...]}`. Sizes are `{"value": 196592, "unit": "MB"}`, what is not known is `N/A`.
  `process` may list a process at each GPU that it has opened, each time with all of its memory.
- `rocm-smi` prints one object, of `card0` ... with texts, and of `system`: processes as
  `"PID7": "name, GPUs, bytes, ..."`, and links.
- Both may print warnings before.

GPUs have HIP's numbers, which engines are given, as far as they are known (`amd-smi list -e`).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdproxy_lab.up.errors import CANT_START, UpError
from pdproxy_lab.up.gpus import DEADLINE, MAX_GPUS, Gpu, GpuProcess, Gpus, Links, Vendor
from pdproxy_lab.up.program import run_to_end

AMD = Vendor(
    "amd-smi",
    "Infinity Fabric",
    re.compile("XGMI"),
    # vLLM refuses to start where they differ
    ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
)
ROCR = "ROCR_VISIBLE_DEVICES"
"""Hides GPUs from HIP, which numbers those that are left: no engine can use another one."""
_IDLE = 1 << 30
"""Bytes in use on a GPU that a process has only opened, its driver's included."""
_WHOLE = ("SPX", "N/A", "")
"""Partitions of a GPU that is not divided."""
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_NO_GPU = ("Unable to detect any GPU", "not found in modules")
_ROCM_SMI = (
    *("--showproductname", "--showuniqueid", "--showmeminfo", "vram"),
    *("--showcomputepartition", "--showpids", "--showtopotype", "--json"),
)
_CARD = re.compile(r"card(\d{1,4})")
_PID = re.compile(r"PID(\d{1,10})")
_LINK = re.compile(r"\(Topology\) Link type between DRM devices (\d{1,4}) and (\d{1,4})")


async def read_amd(env: Mapping[str, str]) -> Gpus:
    """Ask `amd-smi` or `rocm-smi`. No GPUs: there is neither of them, or none is found.

    Raises:
        UpError: it fails, or does not answer in time.
    """
    if (program := shutil.which("amd-smi")) is not None:
        static = await _ask(program, "static", "--json")
        if not static:
            return Gpus(AMD)
        found = gpus_of_amd_smi(
            static,
            await _ask(program, "metric", "--mem-usage", "--json"),
            await _ask(program, "process", "--json"),
            # what is known of numbers and links only adds to the rest: not every release has it
            await _ask(program, "list", "-e", "--json", needed=False),
            await _ask(program, "topology", "--json", needed=False),
        )
    elif (program := shutil.which("rocm-smi")) is not None:
        found = gpus_of_rocm_smi(await _ask(program, *_ROCM_SMI))
    else:
        return Gpus(AMD)
    return hide(found, env.get(ROCR))


def gpus_of_amd_smi(
    static: str, metric: str, process: str, numbers: str = "", topology: str = ""
) -> Gpus:
    """Return the GPUs from answers of `amd-smi` in JSON.

    Raises:
        UpError: an answer has another form.
    """
    listed = {_number(one): one for one in _entries(static)}
    names = {_number(one): one for one in _entries(numbers)}
    index = {number: _at(names.get(number), "hip_id") for number in listed}
    if sorted(map(str, index.values())) != sorted(map(str, range(len(listed)))):
        index = {number: number for number in listed}
    used = {_number(one): _bytes(_at(one, "mem_usage", "used_vram")) for one in _entries(metric)}
    processes = {_number(one): _processes(one) for one in _entries(process)}
    pids = [known.pid for one in processes.values() for known in one]
    found = []
    for number, one in listed.items():
        name = str(_at(one, "asic", "market_name") or "AMD GPU")
        partition = _at(one, "partition") or {}
        divided = _divided(
            _at(partition, "accelerator_partition") or _at(partition, "compute_partition")
        )
        memory = _bytes(_at(one, "vram", "size"))
        taken = used.get(number) or 0
        found.append(
            Gpu(
                index[number],
                str(_at(names.get(number), "hip_uuid") or ""),
                name,
                _known(memory, divided, number, name),
                taken,
                divided,
                # one that is listed at several GPUs may have its memory at another one
                tuple(
                    known if pids.count(known.pid) == 1 else replace(known, memory=None)
                    for known in processes.get(number, ())
                    if taken > _IDLE
                ),
            )
        )
    links = {
        (index[number], index[other]): str(_at(link, "link_type"))
        for number, one in ((_number(one), one) for one in _entries(topology))
        for link in _at(one, "links") or ()
        if (other := _number(link)) in index and number in index and index[number] < index[other]
    }
    return _checked(found, links)


def gpus_of_rocm_smi(text: str) -> Gpus:
    """Return the GPUs from the answer of `rocm-smi` in JSON.

    Raises:
        UpError: it has another form.
    """
    answer = _json(text) or {}
    if not isinstance(answer, dict):
        raise UpError(f"rocm-smi answers {text[:120]!r}", CANT_START)
    processes = []
    links = {}
    for name, value in (answer.get("system") or {}).items():
        if (pid := _PID.fullmatch(name)) is not None:
            # at which GPUs it is, and with how much memory at each of them, is not said
            processes.append(GpuProcess(int(pid[1]), str(value).rsplit(", ", 4)[0]))
        elif (pair := _LINK.fullmatch(name)) is not None:
            links[int(pair[1]), int(pair[2])] = str(value)
    found = []
    for card, facts in answer.items():
        if (matched := _CARD.fullmatch(card)) is None:
            continue
        name = str(_at(facts, "Card Series") or _at(facts, "Card series") or "AMD GPU")
        divided = _divided(_at(facts, "Compute Partition"))
        memory = _bytes(_at(facts, "VRAM Total Memory (B)"))
        taken = _bytes(_at(facts, "VRAM Total Used Memory (B)")) or 0
        found.append(
            Gpu(
                int(matched[1]),
                str(_at(facts, "Unique ID") or "").replace("0x", "GPU-"),
                name,
                _known(memory, divided, int(matched[1]), name),
                taken,
                divided,
                tuple(processes) if taken > _IDLE else (),
            )
        )
    return _checked(found, links)


def hide(gpus: Gpus, mask: str | None) -> Gpus:
    """Return the GPUs that HIP sees, with HIP's numbers. `mask`: `ROCR_VISIBLE_DEVICES`, numbers or
    ids; None: it is not set.

    Raises:
        UpError: it names none.
    """
    if not mask:
        return gpus
    names = [name.strip() for name in mask.split(",")]
    left = [
        one
        for name in names
        for one in gpus.listed
        if name == str(one.index) or (name and name.lower() == one.uuid.lower())
    ]
    if not left:
        raise UpError(f"{ROCR}={mask[:80]} names none of this machine's GPUs", CANT_START)
    index = {one.index: number for number, one in enumerate(left)}
    links = {}
    for (a, b), link in gpus.links.items():
        if a in index and b in index:
            links[min(index[a], index[b]), max(index[a], index[b])] = link
    return Gpus(AMD, [replace(one, index=index[one.index]) for one in left], links)


async def _ask(program: str, *words: str, needed: bool = True) -> str:
    """Return what the program prints, nothing if it finds no GPU or if this answer is not needed.

    Raises:
        UpError: it fails.
    """
    name = f"{program.rpartition('/')[2]} {words[0]}"
    try:
        said = await run_to_end([program, *words], DEADLINE, name)
    except UpError as error:
        if not needed or any(sign in str(error) for sign in _NO_GPU):
            return ""
        raise UpError(f"the GPUs can't be read: {error}", CANT_START) from error
    return said.decode("utf-8", "replace")


def _json(text: str) -> Any:
    """Return what a text holds behind its warnings; None if there is no JSON."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if line.startswith(("[", "{")):
            try:
                return json.loads("\n".join(lines[at:]))
            except (ValueError, RecursionError):
                continue
    return None


def _entries(text: str) -> Iterable[Mapping[str, Any]]:
    """Return the objects of the GPUs."""
    answer = _json(text)
    if isinstance(answer, dict):
        answer = answer.get("gpu_data")
    if answer is None and not text.strip():
        return ()
    if not isinstance(answer, list) or not all(isinstance(one, dict) for one in answer):
        raise UpError(f"amd-smi answers {text[:120]!r}", CANT_START)
    return answer


def _number(entry: Any) -> int:
    number = _at(entry, "gpu")
    if not isinstance(number, int):
        raise UpError(f"amd-smi lists a GPU as {str(entry)[:120]!r}", CANT_START)
    return number


def _processes(entry: Mapping[str, Any]) -> Sequence[GpuProcess]:
    infos = [_at(one, "process_info") for one in _at(entry, "process_list") or ()]
    return [
        GpuProcess(
            int(_at(info, "pid")),
            str(_at(info, "name") or "unknown"),
            _bytes(_at(info, "memory_usage", "vram_mem")) or _bytes(_at(info, "mem_usage")),
        )
        for info in infos
        if str(_at(info, "pid")).isdecimal()
    ]


def _at(value: Any, *keys: str) -> Any:
    """Return what is at a path of objects; None if there is nothing, or `N/A`."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return None if value == "N/A" else value


def _bytes(size: Any) -> int | None:
    """Return the bytes of a size, None if it is not known."""
    unit = _UNITS.get(str(_at(size, "unit") or "B"))
    value = _at(size, "value") if isinstance(size, dict) else size
    known = unit is not None and str(value).isdecimal() and len(str(value)) < 20
    return int(value) * unit if known and unit is not None else None


def _divided(partition: Any) -> str | None:
    return None if str(partition or "") in _WHOLE else f"partition {partition}"


def _known(memory: int | None, divided: str | None, number: int, name: str) -> int:
    if memory is None and divided is None:
        raise UpError(
            f"it is not known how much memory GPU {number} ({name}) has: such a GPU is not "
            f"supported",
            CANT_START,
        )
    return memory or 0


def _checked(found: Sequence[Gpu], links: Links) -> Gpus:
    if len(found) > MAX_GPUS:
        raise UpError(f"more than {MAX_GPUS} GPUs are listed", CANT_START)
    return Gpus(AMD, sorted(found, key=lambda one: one.index), links)
