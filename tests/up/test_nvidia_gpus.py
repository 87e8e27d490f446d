"""What `nvidia-smi` prints, as GPUs and links; the texts are as its manual page describes them."""

from pathlib import Path

import pytest

from pdproxy_lab.up import nvidia_gpus
from pdproxy_lab.up.errors import UpError
from pdproxy_lab.up.gpus import Gpu, GpuProcess
from pdproxy_lab.up.nvidia_gpus import NVIDIA, gpus_from, links_from, read_nvidia
from tests.fakes.vllm_box import nvidia_smi

MIB = 1 << 20
LISTED = """\
0, GPU-5d1f6c0e-1111-2222-3333-444455556666, NVIDIA H200, 143771, 4, Disabled
1, GPU-9a7b3c2d-1111-2222-3333-444455556666, NVIDIA H200, 143771, 63021, Disabled
"""
USED = "GPU-9a7b3c2d-1111-2222-3333-444455556666, 4242, /usr/bin/python3, 63010\n"
TOPO = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tSYS\t0-47\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tSYS\t48-95\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)


def test_gpus_are_read_with_who_uses_them() -> None:
    first, second = gpus_from(LISTED, USED)
    assert (first.index, first.memory, first.in_use) == (0, 143771 * MIB, None)
    assert second.processes == (GpuProcess(4242, "/usr/bin/python3", 63010 * MIB),)
    assert second.in_use == "process 4242 (/usr/bin/python3, 61.5 GiB)"


@pytest.mark.parametrize(
    ("listed", "used", "words"),
    [
        (LISTED, "", "a process that is not shown here (61.5 GiB are taken)"),
        (
            LISTED,
            USED.replace("63010", "[N/A]") + USED.replace("4242", "7"),
            "process 7 (/usr/bin/python3, 61.5 GiB) and 1 more",
        ),
    ],
)
def test_what_a_container_hides_counts_as_in_use(listed: str, used: str, words: str) -> None:
    assert gpus_from(listed, used)[1].in_use == words


def test_a_divided_gpu_is_told_from_others() -> None:
    listed = LISTED.replace("4, Disabled", "4, Enabled").replace("63021, Disabled", "0, [N/A]")
    assert [gpu.divided for gpu in gpus_from(listed, "")] == ["MIG", None]


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        ("0, GPU-1, NVIDIA GB10, [N/A], [N/A], [N/A]\n", "does not say how much memory GPU 0"),
        ("zero, GPU-1\n", "lists a GPU as 'zero,GPU-1'"),
        (LISTED.splitlines()[0] * 1 + "\n" + 64 * (LISTED.splitlines()[0] + "\n"), "more than 64"),
    ],
)
def test_other_answers_are_refused(listed: str, told: str) -> None:
    with pytest.raises(UpError, match=told.replace("(", r"\(")):
        gpus_from(listed, "")


def test_links_are_read_from_the_table_and_from_nothing_else() -> None:
    assert links_from(TOPO) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "SYS"}
    assert [NVIDIA.is_fast(link) for link in ("NV18", "SYS", "NODE", None)] == [
        True,
        False,
        False,
        False,
    ]
    assert links_from("topo: unknown option") == {}


async def test_the_program_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, LISTED, USED, TOPO)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = await read_nvidia()
    assert [gpu.index for gpu in found.listed] == [0, 1]
    assert found.links[0, 1] == "NV18"


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("echo 'No devices were found'; exit 6", None),
        (
            "echo 'NVIDIA-SMI has failed because it could not ask the driver.'; exit 9",
            "the GPUs can't be read: nvidia-smi failed with exit code 9: NVIDIA-SMI has failed",
        ),
        ("sleep 600", "the GPUs can't be read: nvidia-smi took more than 0 s"),
        ("yes", "nvidia-smi printed more than 4 MiB"),
    ],
)
async def test_a_driver_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, told: str | None
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if "sleep" in does:
        monkeypatch.setattr(nvidia_gpus, "DEADLINE", 0.2)
    if told is None:
        assert not (await read_nvidia()).listed
        return
    with pytest.raises(UpError, match=told) as failed:
        await read_nvidia()
    assert failed.value.code == 2


def test_no_program_is_no_gpu() -> None:
    assert Gpu(0, "u", "n", 100 * MIB, 6 * MIB).in_use is not None
    assert Gpu(0, "u", "n", 100 * MIB, 5 * MIB).in_use is None
