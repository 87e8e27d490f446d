"""Engines of another version of vLLM: what is laid over the environment's, and what proving a
version prints.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.engines import prove
from tests.engines.build import Built, EnginesUnavailable, ensure, pinned_vllm
from tests.engines.prove import PARTS, Result

PROGRAM = Path(prove.__file__).with_name("other_vllm.py")
FILES = {
    (
        "vllm/distributed/device_communicators/shm_broadcast.py"
    ): "def wait(busy_loop_s: float = 1,): ...",
    "vllm/platforms/cpu.py": 'os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"',
    "vllm/_C.abi3.so": "for GPUs",
    "vllm/vllm-rs": "a server in Rust",
    "vllm/entrypoints/new.py": "new = True",
    "vllm-9.0.0.dist-info/METADATA": "Name: vllm",
}
REPORT = """<testsuites><testsuite>
<testcase classname="a" name="good"/><testcase classname="a" name="bad"><failure/></testcase>
<testcase classname="a" name="worse"><error/></testcase><testcase classname="a" name="left out"><skipped/></testcase>
</testsuite></testsuites>"""  # noqa: E501


def test_a_release_is_laid_over_the_kernels(tmp_path: Path) -> None:
    """Its files but for what was compiled, with the patches of the environment's own vLLM."""
    wheel, folder = tmp_path / "vllm-9.0.0.whl", tmp_path / "vllm-9.0.0"
    with zipfile.ZipFile(wheel, "w") as made:
        for name, text in FILES.items():
            made.writestr(name, text)
    subprocess.run([sys.executable, PROGRAM, wheel, folder], check=True)
    found = {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert sorted(found) == sorted(set(FILES) - {"vllm/_C.abi3.so", "vllm/vllm-rs"})
    assert (
        "busy_loop_s: float = 0.001,"
        in found["vllm/distributed/device_communicators/shm_broadcast.py"]
    )
    assert found["vllm/platforms/cpu.py"].endswith('= "fork"')


def test_engines_of_another_version_have_its_folder_first() -> None:
    """Behind the overlays of a connector; the CPU is said, since the release's own files do not see
    it.
    """
    one, two = Path("/one"), Path("/two")
    assert Built(one, one, one).environment() == {}
    assert Built(one, one, one).environment(two) == {"PYTHONPATH": "/two"}
    other = Built(one, one, one, Path("/other")).environment(two)
    assert other == {"PYTHONPATH": "/two:/other", "VLLM_TARGET_DEVICE": "cpu"}


def test_what_is_no_version_is_refused(tmp_path: Path) -> None:
    """Before anything is built."""
    with pytest.raises(EnginesUnavailable, match="no version of vLLM"):
        ensure(tmp_path, vllm="../../x")
    assert not list(tmp_path.iterdir())


def test_a_report_is_read(tmp_path: Path) -> None:
    """What was skipped proves nothing."""
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert prove.read(report) == Result(1, ("a.bad", "a.worse"))


def test_the_row_has_a_cell_for_each_part() -> None:
    """Parts that were not run are said."""
    line = prove.row("9.0.0", "2026-11-28", {"answers": Result(3, ("a.bad",))})
    cells = line.strip("| ").split(" | ")
    assert len(cells) == 3 + len(PARTS)
    assert cells[:3] == ["9.0.0", f"{pinned_vllm()}'s", "2026-11-28"]
    assert dict(zip(PARTS, cells[3:], strict=True)) == dict.fromkeys(PARTS, "not run") | {
        "answers": "3 of 4"
    }
    assert prove.row(pinned_vllm(), "today", {}).startswith(
        f"| {pinned_vllm()} | own | today | not run"
    )


def test_the_parts_are_there() -> None:
    """Each of them names files that exist."""
    for words in PARTS.values():
        assert all(list(prove.HERE.glob(word)) for word in words if ".py" in word)
