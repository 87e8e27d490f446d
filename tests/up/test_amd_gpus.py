"""What `amd-smi` and `rocm-smi` print, as GPUs and links; the texts are as ROCm's documentation and
the sources of both programs describe them.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from pdproxy_lab.up.amd_gpus import AMD, gpus_of_amd_smi, gpus_of_rocm_smi, hide, read_amd
from pdproxy_lab.up.errors import UpError
from pdproxy_lab.up.gpus import GpuProcess
from pdproxy_lab.up.machine import read_gpus
from tests.fakes.vllm_box import amd_smi

MIB = 1 << 20


def size(value: Any, unit: str = "MB") -> dict[str, Any]:
    return {"value": value, "unit": unit}


def static(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "gpu": number,
        "asic": {"market_name": "AMD Instinct MI300X", "vendor_id": "0x1002", "oam_id": number},
        "bus": {"bdf": f"0000:{number}5:00.0"},
        "vram": {"type": "HBM3", "vendor": "N/A", "size": size(196592), "bit_width": 8192},
        "partition": {
            "accelerator_partition": "SPX",
            "memory_partition": "NPS1",
            "partition_id": 0,
        },
        **changes,
    }


def metric(number: int, used: Any) -> dict[str, Any]:
    return {
        "gpu": number,
        "mem_usage": {"total_vram": size(196592), "used_vram": size(used)},
    }


def process(pid: int, memory: int) -> dict[str, Any]:
    return {
        "process_info": {
            "name": "python3",
            "pid": pid,
            "memory_usage": {"gtt_mem": size(0, "B"), "vram_mem": size(memory, "B")},
            "mem_usage": size(memory, "B"),
            "usage": {"gfx": size(0, "ns")},
        }
    }


NOBODY = [{"process_info": "No running processes detected"}]
STATIC = json.dumps({"gpu_data": [static(0), static(1)]}, indent=4)
METRIC = json.dumps({"gpu_data": [metric(0, 285), metric(1, 68000)]})
PROCESS = json.dumps(
    [
        {"gpu": 0, "process_list": NOBODY},
        {"gpu": 1, "process_list": [process(5150, 67 << 30)]},
    ]
)
TOPOLOGY = json.dumps(
    [
        {
            "gpu": number,
            "bdf": "N/A",
            "links": [
                {"gpu": other, "weight": 15, "link_type": "SELF" if other == number else "XGMI"}
                for other in (0, 1)
            ],
        }
        for number in (0, 1)
    ]
)


def test_gpus_of_amd_smi_with_who_uses_them() -> None:
    found = gpus_of_amd_smi(STATIC, METRIC, PROCESS, topology=TOPOLOGY)
    first, second = found.listed
    assert (first.index, first.name, first.memory, first.in_use) == (
        *(0, "AMD Instinct MI300X", 196592 * MIB),
        None,
    )
    assert second.processes == (GpuProcess(5150, "python3", 67 << 30),)
    assert second.in_use == "process 5150 (python3, 67.0 GiB)"
    assert found.links == {(0, 1): "XGMI"}
    assert AMD.is_fast("XGMI")
    assert not AMD.is_fast("PCIE")


def test_lists_of_older_releases_have_the_same_content() -> None:
    """No `gpu_data`, another name of the partition, and a warning before."""
    older = [static(number, partition={"compute_partition": "SPX"}) for number in (0, 1)]
    warned = "WARNING: User is missing the following required groups: render\n" + json.dumps(older)
    plain = json.dumps([metric(0, 285), metric(1, 68000)])
    new = gpus_of_amd_smi(STATIC, METRIC, PROCESS)
    assert gpus_of_amd_smi(warned, plain, PROCESS) == new


def test_a_process_that_has_opened_all_gpus_uses_those_with_its_memory() -> None:
    everywhere = [{"gpu": number, "process_list": [process(7, 67 << 30)]} for number in (0, 1)]
    first, second = gpus_of_amd_smi(STATIC, METRIC, json.dumps(everywhere)).listed
    assert first.in_use is None
    assert second.in_use == "process 7 (python3)"


def test_a_process_that_is_not_shown_counts() -> None:
    """That of another container."""
    nobody = json.dumps([{"gpu": number, "process_list": NOBODY} for number in (0, 1)])
    second = gpus_of_amd_smi(STATIC, METRIC, nobody).listed[1]
    assert second.in_use == "a process that is not shown here (66.4 GiB are taken)"


def test_hips_numbers_are_used_where_they_are_known() -> None:
    numbers = [{"gpu": 0, "hip_id": 1, "hip_uuid": "GPU-aaaa1111"}, {"gpu": 1, "hip_id": 0}]
    found = gpus_of_amd_smi(STATIC, METRIC, PROCESS, json.dumps(numbers), TOPOLOGY)
    half = gpus_of_amd_smi(STATIC, METRIC, PROCESS, json.dumps(numbers[:1]))
    assert [one.in_use is None for one in half.listed] == [True, False]
    assert [(one.index, one.uuid, one.in_use is None) for one in found.listed] == [
        (0, "", False),
        (1, "GPU-aaaa1111", True),
    ]
    assert found.links == {(0, 1): "XGMI"}


@pytest.mark.parametrize("key", ["accelerator_partition", "compute_partition"])
def test_a_partition_is_no_whole_gpu(key: str) -> None:
    """Those behind the first one have no size."""
    divided = [
        static(0, partition={key: "CPX"}),
        static(1, partition={key: "CPX"}, vram={"type": "N/A", "size": "N/A"}),
    ]
    found = gpus_of_amd_smi(json.dumps(divided), METRIC, PROCESS).listed
    assert [one.divided for one in found] == ["partition CPX"] * 2


ROCM_SMI = {
    "card1": {
        "Card Series": "AMD Instinct MI210",
        "Unique ID": "0x1A2b3c4d5e6f",
        "VRAM Total Memory (B)": "68702699520",
        "VRAM Total Used Memory (B)": "34351349760",
        "Compute Partition": "SPX",
    },
    "card0": {
        "Card Series": "AMD Instinct MI210",
        "VRAM Total Memory (B)": "68702699520",
        "VRAM Total Used Memory (B)": "10854400",
    },
    "system": {
        "PID28389": "llama, server, 1, 34340495360, 11011, 0",
        "(Topology) Link type between DRM devices 0 and 1": "PCIE",
    },
}


def test_gpus_of_rocm_smi() -> None:
    text = "WARNING: AMD GPU device(s) is/are in a low-power state.\n\n" + json.dumps(ROCM_SMI)
    found = gpus_of_rocm_smi(text)
    assert [(one.index, one.uuid, one.memory) for one in found.listed] == [
        (0, "", 68702699520),
        (1, "GPU-1A2b3c4d5e6f", 68702699520),
    ]
    assert [one.in_use for one in found.listed] == [None, "process 28389 (llama, server)"]
    assert found.links == {(0, 1): "PCIE"}
    assert not gpus_of_rocm_smi("").listed
    divided = gpus_of_rocm_smi(json.dumps(ROCM_SMI).replace("SPX", "DPX")).listed[1]
    assert divided.divided == "partition DPX"


@pytest.mark.parametrize(("mask", "left"), [("1", [1]), ("1,0", [1, 0]), ("gpu-1a2b3c4d5e6f", [1])])
def test_gpus_that_rocr_hides_are_not_there(mask: str, left: list[int]) -> None:
    """And those that are left are counted from 0."""
    every = gpus_of_rocm_smi(json.dumps(ROCM_SMI))
    found = hide(every, mask)
    assert [one.index for one in found.listed] == list(range(len(left)))
    assert [one.used for one in found.listed] == [every.listed[one].used for one in left]
    assert found.links == ({(0, 1): "PCIE"} if len(left) == 2 else {})
    assert hide(every, None) is hide(every, "") is every
    with pytest.raises(UpError, match="ROCR_VISIBLE_DEVICES=7 names none"):
        hide(every, "7")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("[3]", "amd-smi answers '[3]'"),
        ("[" * 100_000, "amd-smi answers"),
        ('[{"asic": {}}]', "amd-smi lists a GPU as"),
        (json.dumps([static(0, vram="N/A")]), "how much memory GPU 0 (AMD Instinct MI300X) has"),
        (json.dumps([static(number) for number in range(65)]), "more than 64 GPUs"),
    ],
)
def test_other_answers_are_refused(answer: str, told: str) -> None:
    with pytest.raises(UpError) as refused:
        gpus_of_amd_smi(answer, "", "")
    assert told in str(refused.value)
    assert refused.value.code == 2


async def test_the_programs_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that only adds words may be missing."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert not (await read_gpus({})).listed
    rocm_smi = tmp_path / "rocm-smi"
    rocm_smi.write_text(f"#!/bin/sh\necho '{json.dumps(ROCM_SMI)}'\n")
    rocm_smi.chmod(0o755)
    assert (await read_gpus({})).listed[0].name == "AMD Instinct MI210"
    amd_smi(tmp_path, static=STATIC, metric=METRIC, process=PROCESS)
    found = await read_gpus({"ROCR_VISIBLE_DEVICES": "1"})
    assert [(one.index, one.name) for one in found.listed] == [(0, "AMD Instinct MI300X")]
    assert found.vendor is AMD


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("echo 'Unable to detect any GPU devices, check amdgpu version' >&2; exit 255", None),
        ("echo broken >&2; exit 3", "the GPUs can't be read: amd-smi static failed"),
    ],
)
async def test_a_driver_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, told: str | None
) -> None:
    program = tmp_path / "amd-smi"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if told is None:
        assert not (await read_amd({})).listed
        return
    with pytest.raises(UpError, match=told):
        await read_amd({})
