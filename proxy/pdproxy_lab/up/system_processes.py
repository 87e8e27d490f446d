"""The processes of this system, as /proc shows them: whether one is still the one that was written
down, and which belong to its session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_SHARED = "/dev/shm/"  # noqa: S108 - where POSIX shared memory is
_STATE, _SESSION, _START = 0, 3, 19
"""Places behind the command's name in /proc/PID/stat."""
MAX_STAT = 4096


class SystemProcess(NamedTuple):
    """A process: its id, state, session, and the system's ticks at its start. Another process may
    get the id later, never with the same start.
    """

    pid: int
    state: str
    session: int
    start: int

    @property
    def runs(self) -> bool:
        """Whether it has not ended: of a zombie only the exit code is left."""
        return self.state not in ("Z", "X")


def parse_stat(text: str) -> SystemProcess | None:
    """Read the text of /proc/PID/stat. None: it is another text."""
    before, bracket, behind = text.rpartition(")")
    fields = behind.split()
    try:
        pid = int(before.split(" ", 1)[0])
        found = SystemProcess(pid, fields[_STATE], int(fields[_SESSION]), int(fields[_START]))
    except (ValueError, IndexError):
        return None
    return found if bracket else None


def process_of(pid: int) -> SystemProcess | None:
    """Return a process; None: there is none."""
    try:
        return parse_stat((_PROC / str(pid) / "stat").read_text())
    except OSError:
        return None


def same_process(written: SystemProcess) -> SystemProcess | None:
    """Return the process that was written down, as it is now; None if it has ended."""
    now = process_of(written.pid)
    return now if now is not None and now.runs and now.start == written.start else None


def session_of(leader: SystemProcess) -> list[SystemProcess]:
    """Return the running processes of the session that a process has begun.

    A session's number is given to no other one while any process of it is left. If it was given to
    another one since, whose leader runs, nothing is returned.
    """
    now = process_of(leader.pid)
    if now is not None and now.start != leader.start:
        return []
    found = []
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            one = process_of(int(entry.name))
            if one is not None and one.session == leader.pid and one.start >= leader.start:
                found.append(one)
    return [one for one in found if one.runs]


def boot_id() -> str:
    """Return what is another text after each start of the system."""
    with contextlib.suppress(OSError):
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return ""


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """Return the files of shared memory that processes have mapped or open."""
    found: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in (_PROC / str(pid) / "maps").read_text().splitlines():
                name = line.partition(_SHARED)[2]
                if name and not name.endswith("(deleted)"):
                    found.add(Path(_SHARED + name))
        with contextlib.suppress(OSError):
            for one in (_PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = one.readlink()
                    if str(target).startswith(_SHARED) and not target.name.endswith("(deleted)"):
                        found.add(target)
    return found


def remove_unused(files: Iterable[Path]) -> None:
    """Remove files of shared memory that no process has any more."""
    left = {path for path in files if path.exists()}
    if left:
        used = shared_memory(int(one.name) for one in _PROC.iterdir() if one.name.isdecimal())
        for path in left - used:
            with contextlib.suppress(OSError):
                path.unlink()
