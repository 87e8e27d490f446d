"""A process that outlives its `up`: written down by itself, found by that, ended with all that it
has started.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pdproxy_lab.up import own_process
from pdproxy_lab.up.errors import UpError
from pdproxy_lab.up.own_process import OwnProcess
from pdproxy_lab.up.state import Folder, State
from pdproxy_lab.up.system_processes import parse_stat, process_of, same_process, session_of

NEVER = asyncio.Event()
IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('begun', flush=True); time.sleep(600)"  # noqa: E501
STATE = State(
    boot="", model="m", engines=(), events_port=None, commands={}, settings="pools: []\n", port=1
)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.02)


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[OwnProcess]:
    one = OwnProcess("any-0", Folder(tmp_path))
    yield one
    hurry = asyncio.Event()
    hurry.set()
    await one.stop(hurry)


def start(process: OwnProcess, *words: str) -> int:
    process.start(words, os.environ)
    assert process.pid is not None
    return process.pid


async def test_it_is_found_by_what_it_wrote_down_itself(
    process: OwnProcess, tmp_path: Path
) -> None:
    pid = start(process, "sleep", "600")
    stat = tmp_path / "any-0.stat"
    await until(lambda: stat.exists() and stat.read_text())
    written = parse_stat(stat.read_text())
    assert written is not None
    assert written.pid == written.session == pid
    other = OwnProcess("any-0", Folder(tmp_path))
    assert other.find()
    assert other.runs
    assert other.pid == pid
    # the same id, another start: another process
    assert same_process(written._replace(start=written.start - 1)) is None
    assert session_of(written._replace(start=written.start - 1)) == []
    await other.stop(NEVER)
    assert not process.runs
    assert not other.find()
    assert not stat.exists()


async def test_children_end_with_it_also_where_it_ended_first(
    process: OwnProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_process, "_ORPHANS", 0.1)
    start(process, "sh", "-c", "sleep 600 & echo $!; exec sleep 600")
    await until(process.log.read_text)
    child = int(process.log.read_text())
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: not process.runs)
    assert process.how == "was killed by signal 9"
    assert process_of(child) is not None
    await process.stop(NEVER)
    found = process_of(child)
    assert found is None or not found.runs


@pytest.mark.parametrize("hurries", [True, False])
async def test_one_that_ignores_signals_is_killed(process: OwnProcess, hurries: bool) -> None:
    start(process, sys.executable, "-c", IGNORES)
    await until(process.log.read_text)
    hurry = asyncio.Event()
    if hurries:
        hurry.set()
    await process.stop(hurry, grace=600 if hurries else 0.2)
    assert not process.runs


async def test_one_that_the_system_does_not_end_is_named(
    process: OwnProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = start(process, "sleep", "600")
    hurry = asyncio.Event()
    hurry.set()
    with monkeypatch.context() as patched:
        patched.setattr(own_process, "_KILLED", 0.2)
        patched.setattr(os, "kill", lambda *_: None)
        with pytest.raises(UpError, match=f"the system does not end its processes: {pid}"):
            await process.stop(hurry)


async def test_its_shared_memory_is_removed_and_no_others(process: OwnProcess) -> None:
    names = [Path(f"/dev/shm/pdproxy-test-{os.getpid()}-{number}") for number in range(3)]
    for name in names:
        name.write_bytes(b"x")
    try:
        with names[1].open("rb"):  # another process still has it
            line = 'exec 3<"$1" 4<"$2"; echo begun; exec sleep 600'
            start(process, "sh", "-c", line, "sh", str(names[0]), str(names[1]))
            await until(process.log.read_text)
            process.note_shared_memory()
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            await process.stop(NEVER)
        assert [name.exists() for name in names] == [False, True, True]
    finally:
        for name in names:
            name.unlink(missing_ok=True)


async def test_its_log_is_bounded_and_goes_on(process: OwnProcess) -> None:
    start(
        process, "sh", "-c", "echo first; read -r _ </dev/null; sleep 0.3; echo second; sleep 600"
    )
    await until(lambda: "first" in process.log.read_text())
    assert process.new_lines() == ["first"]
    process.bound_log(most=3)
    assert process.log.with_suffix(".log.1").read_text() == "first\n"
    await until(lambda: "second" in process.log.read_text())
    assert process.new_lines() == ["second"]


async def test_one_that_can_not_be_started_says_so(process: OwnProcess) -> None:
    start(process, "/nothing/there")
    await until(lambda: not process.runs)
    assert process.how == "ended with exit code 127"
    assert "not found" in process.log.read_text()


def test_the_folder_is_one_ups_and_of_one_start_of_the_system(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "f")
    with folder.locked() as first, folder.locked() as second:
        assert (first, second) == (True, False)
    with folder.locked() as again:
        assert again
    assert folder.read() is None
    folder.write(STATE)
    assert folder.settings.read_text() == "pools: []\n"
    assert folder.read() is None  # of another boot
    (folder.path / "state.json").write_text("{")
    with pytest.raises(UpError, match="can't be read"):
        folder.read()
    folder.forget()
    assert folder.read() is None
    with pytest.raises(UpError, match="too long for the path of a socket"):
        Folder(tmp_path / ("x" * 100))
    assert not (tmp_path / "f" / "state.json").exists()


@pytest.mark.parametrize(
    "text", ["", "12 (sh", "x (sh) S 1 2 3", "12 (sh) S 1", "12 sh S " + "1 " * 40]
)
def test_other_texts_name_no_process(text: str) -> None:
    assert parse_stat(text) is None
