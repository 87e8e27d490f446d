"""A process that outlives its `up`: an engine, or the proxy. Started in a session of its own, with
a log of bounded size; found again by what it wrote down; ended with all of its session.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pdproxy_lab.up.errors import UpError
from pdproxy_lab.up.state import Folder
from pdproxy_lab.up.system_processes import (
    MAX_STAT,
    SystemProcess,
    parse_stat,
    remove_unused,
    same_process,
    session_of,
    shared_memory,
)

MAX_LOG = 64 << 20
"""Bytes of a log. One that grows beyond becomes NAME.log.1, in place of the one before."""
GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL."""
_LOOK = 0.1
_ORPHANS = 3.0
"""Seconds for the children of a process that has ended to end by themselves."""
_KILLED = 10.0
"""Seconds for the system to end what it was told to kill: a process in a driver takes some."""
_TAIL = 1 << 16
_BEGIN = 'read -r line <"/proc/$$/stat" && printf "%s\\n" "$line" >"$0" && exec "$@"'
"""Writes down the process, then becomes the program. Its name in that line is the shell's."""


class OwnProcess:
    """One of these. `found` and `start` say which process it is."""

    def __init__(self, name: str, folder: Folder) -> None:
        self.name = name
        self.log = folder.log(name)
        self._stat = folder.stat(name)
        self._child: subprocess.Popen[bytes] | None = None
        self._process: SystemProcess | None = None
        self._shared: set[Path] = set()
        self._read = 0

    def __repr__(self) -> str:
        return f"<OwnProcess {self.name}: {self._process}>"

    @property
    def pid(self) -> int | None:
        """Of its first process; None: none was started."""
        return None if self._process is None else self._process.pid

    @property
    def runs(self) -> bool:
        """Whether its first process runs."""
        if self._child is not None:
            return self._child.poll() is None
        return self._process is not None and same_process(self._process) is not None

    @property
    def how(self) -> str:
        """How it has ended, in words."""
        code = None if self._child is None else self._child.poll()
        if code is None:
            return "ended"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def find(self) -> bool:
        """Look for the process that an earlier `up` has started. Return whether any of its session
        runs.
        """
        try:
            written = parse_stat(self._stat.read_text()[:MAX_STAT])
        except OSError:
            return False
        self._process = written
        with contextlib.suppress(OSError):
            self._read = self.log.stat().st_size
        return written is not None and bool(session_of(written))

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it; it writes itself down.

        Raises:
            UpError: the system can't start it.
        """
        self._stat.unlink(missing_ok=True)
        self._rotate(0)
        self._read = 0
        try:
            with self.log.open("ab") as out:
                self._child = subprocess.Popen(  # noqa: S603 - what the user has asked for
                    ["/bin/sh", "-c", _BEGIN, str(self._stat), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=dict(environment),
                    start_new_session=True,
                )
        except OSError as error:
            raise UpError(f"{self.name} can't be started: {error.strerror or error}") from error
        self._process = parse_stat(Path(f"/proc/{self._child.pid}/stat").read_text())
        self._shared = set()

    def note_shared_memory(self) -> None:
        """Keep the names of its shared memory: one that is killed can't remove them itself."""
        if self._process is not None:
            self._shared |= shared_memory(one.pid for one in session_of(self._process))

    async def stop(
        self,
        at_once: asyncio.Event,
        grace: float = GRACE,
        number: signal.Signals = signal.SIGTERM,
    ) -> None:
        """End it with all of its session: by a signal, and by SIGKILL once `at_once` is set or the
        grace has passed.

        Raises:
            UpError: something of it is still there.
        """
        leader = self._process
        if leader is None:
            return
        self.note_shared_memory()
        if self.runs and not at_once.is_set():
            self._signal([leader], number)
            await self._until(lambda: not self.runs, grace, at_once)
        # its children notice that it has ended
        await self._until(lambda: not session_of(leader), _ORPHANS, at_once)
        left = session_of(leader)
        self._signal(left, signal.SIGKILL)
        if left and not await self._until(lambda: not session_of(leader), _KILLED):
            pids = ", ".join(str(one.pid) for one in session_of(leader))
            raise UpError(f"{self.name}: the system does not end its processes: {pids}")
        if self._child is not None:
            self._child.poll()
        remove_unused(self._shared)
        self._stat.unlink(missing_ok=True)
        self._process = None

    async def _until(
        self, ended: Callable[[], bool], seconds: float, at_once: asyncio.Event | None = None
    ) -> bool:
        """Wait until something has ended; return whether it has, in so many seconds."""
        loop = asyncio.get_running_loop()
        late = loop.time() + seconds
        while True:
            if self._child is not None:
                self._child.poll()  # or it stays as a zombie
            if ended():
                return True
            if loop.time() > late or (at_once is not None and at_once.is_set()):
                return False
            await asyncio.sleep(_LOOK)

    @staticmethod
    def _signal(processes: Sequence[SystemProcess], number: signal.Signals) -> None:
        for one in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one.pid, number)

    # -- its log

    def new_lines(self) -> list[str]:
        """Return what it has printed since the last call, whole lines only."""
        try:
            with self.log.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self._read = min(self._read, size)
                file.seek(max(self._read, size - _TAIL))
                text = file.read(_TAIL)
                whole = text.rfind(b"\n") + 1
                self._read = file.tell() - len(text) + whole
        except OSError:
            return []
        return text[:whole].decode("utf-8", "replace").splitlines()

    def bound_log(self, most: int = MAX_LOG) -> None:
        """Move a log that has grown too large out of the way. What is printed meanwhile is lost."""
        with contextlib.suppress(OSError):
            if self.log.stat().st_size > most:
                self._rotate(most)

    def _rotate(self, most: int) -> None:
        """Copy the log's end to NAME.log.1 and empty it: the process has it open, and appends."""
        try:
            with self.log.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                if size <= most:
                    return
                file.seek(max(0, size - MAX_LOG))
                with self.log.with_suffix(".log.1").open("wb") as old:
                    while piece := file.read(1 << 20):
                        old.write(piece)
                file.truncate(0)
                self._read = 0
        except OSError:
            return
