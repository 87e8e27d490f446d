"""The command as a process, on pipes or in a terminal; and what is left of it."""

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.fakes.forked import Piped, piped

PROMPT = "Ctrl-C ends it."
DEADLINE = 60.0
MUCH_WORK = 0.5
"""CPU seconds between two turns of the event loop: code that takes so long would hold up any
machine.
"""


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "pdproxy", "demo", *options]


def environment(**more: str) -> dict[str, str]:
    # COLUMNS and LINES, which pytest's workers may have, would be believed over the terminal.
    left_out = ("PDPROXY_", "COLUMNS", "LINES")
    given = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {**given, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


def waited(line: str) -> bool:
    """Whether a line says that the event loop was late although it had little work: on a machine
    that others use.
    """
    found = re.fullmatch(
        r".* WARNING pdproxy\.fleet the event loop was held up late_s=(\S+) swallowed=False "
        r"cpu_s=(\S+)\n",
        line,
    )
    return found is not None and float(found[2]) < MUCH_WORK


class Running:
    """One demo on pipes. What it prints is read as it comes."""

    def __init__(self, process: Piped) -> None:
        self.process = process
        self.printed: list[str] = []

    async def until(self, words: str, within: float = DEADLINE) -> str:
        """Read until a line holds these words; return all lines so far."""
        async with asyncio.timeout(within):
            while not any(words in line for line in self.printed):
                line = (await self.process.stdout.readline()).decode()
                assert line, f"ended without {words!r}: {self.printed} {await self.errors()}"
                self.printed.append(line.rstrip("\n"))
        return "\n".join(self.printed)

    async def errors(self) -> str:
        """Everything on standard error up to its end, but for warnings that the machine did not run
        the event loop.
        """
        async with asyncio.timeout(DEADLINE):
            lines = (await self.process.stderr.read()).decode().splitlines(keepends=True)
        return "".join(line for line in lines if not waited(line))

    async def ended(self) -> int:
        """Read to the end; return the exit code."""
        async with asyncio.timeout(DEADLINE):
            self.printed += (await self.process.stdout.read()).decode().splitlines()
            return await self.process.wait()

    def after(self, start: str) -> str:
        """The first line that begins so."""
        return next(line for line in self.printed if line.startswith(start))


@asynccontextmanager
async def running(*options: str, command: str = "demo", **env: str) -> AsyncIterator[Running]:
    """A demo, or another command; killed if it still runs at the end."""
    process = await piped(command, *options, env=environment(**env))
    try:
        yield Running(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class Terminal:
    """One demo in a terminal of its own."""

    def __init__(self, process: asyncio.subprocess.Process, master: int) -> None:
        self.process = process
        self.master = master
        self.seen = b""

    @property
    def text(self) -> str:
        """What was written, without what moves the cursor and sets colours."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.seen.decode(errors="replace")).replace(
            "\r", ""
        )

    async def until(self, pattern: str, within: float = DEADLINE) -> None:
        """Read until the text matches."""
        async with asyncio.timeout(within):
            while not re.search(pattern, self.text):
                assert await self._more(), f"ended without {pattern!r}: {self.text}"

    async def ended(self) -> int:
        """Read to the end; return the exit code."""
        async with asyncio.timeout(DEADLINE):
            while await self._more():
                pass
            return await self.process.wait()

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self.master, keys)

    async def _more(self) -> bool:
        try:
            data = await asyncio.to_thread(os.read, self.master, 65536)
        except OSError:  # the other side is closed
            return False
        self.seen += data
        return bool(data)


@asynccontextmanager
async def in_terminal(columns: int, rows: int, *options: str) -> AsyncIterator[Terminal]:
    """A demo whose terminal is of this size; Ctrl-C typed there reaches it as from a keyboard."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    # The process must make the terminal its own, or Ctrl-C would reach nobody.
    become = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", become, *command(*options)),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment(TERM="xterm-256color"),
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        os.close(master)


def alive(words: Sequence[str]) -> list[int]:
    """Processes whose command line holds all of these words, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and all(word in line for word in words):
                    found.append(int(entry.name))
    return found


async def gone(words: Sequence[str]) -> bool:
    """Wait until no such process is left."""
    async with asyncio.timeout(DEADLINE):
        while alive(words):
            await asyncio.sleep(0.05)
    return True
