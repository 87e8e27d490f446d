"""Processes that begin with the proxy's modules loaded: a fork of a process that has loaded them
takes an eighth of the CPU time.

`start` runs code in one, `command` a command of pdproxy, `piped` one whose output is read. The
process from which they are forked is started with the first of them, and ends with this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

COMMAND = "import sys; from pdproxy.cli.main import main; sys.exit(main(sys.argv[1:]))"
_MAX = 1 << 20
"""Bytes of a message."""


class Forked:
    """A process, with what `asyncio.subprocess.Process` has of one without pipes."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = os.pidfd_open(pid)
        self._code: int | None = None

    @property
    def returncode(self) -> int | None:
        """Its exit code; None: it runs."""
        if self._code is None and select.select([self._ended], [], [], 0)[0]:
            self._code = _asked({"wait": self.pid})
            os.close(self._ended)
        return self._code

    async def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        if (code := self.returncode) is not None:
            return code
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        ended = os.dup(self._ended)  # `returncode` closes the other, which may not be watched then
        loop.add_reader(ended, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(ended)
            os.close(ended)
        code = self.returncode
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal. ProcessLookupError: it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


class Piped(Forked):
    """A process with two pipes, as `asyncio.subprocess.Process` is one."""

    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader

    async def communicate(self) -> tuple[bytes, bytes]:
        """Read all that it prints, wait for its end, and return what was read: standard output,
        standard error.
        """
        out, err = await asyncio.gather(self.stdout.read(), self.stderr.read())
        await self.wait()
        return out, err


def start(
    code: str, arguments: Sequence[str], env: Mapping[str, str], stderr: int | IO[bytes]
) -> Forked:
    """Run `python -c CODE ARGUMENTS`, whose standard error goes to a file, or nowhere:
    `subprocess.DEVNULL`.
    """
    question = _question(code, arguments, env)
    if stderr == subprocess.DEVNULL:
        with Path(os.devnull).open("wb") as nothing:
            return Forked(_asked(question, nothing.fileno()))
    return Forked(_asked(question, stderr if isinstance(stderr, int) else stderr.fileno()))


async def piped(
    *words: str, env: Mapping[str, str], code: str = COMMAND, cwd: Path | None = None
) -> Piped:
    """Run `pdproxy WORDS`, or other code, with a pipe for each output and nothing to read."""
    pipes = [os.pipe(), os.pipe()]
    made = Piped(_asked(_question(code, words, env, cwd), *(writing for _, writing in pipes)))
    for _, writing in pipes:
        os.close(writing)
    made.stdout, made.stderr = [await _reader(reading) for reading, _ in pipes]
    return made


async def _reader(pipe: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    # uvloop closes the descriptor itself; a file that closes it, too, may hit another one
    file = os.fdopen(pipe, "rb", 0, closefd=False)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    return reader


def _question(
    code: str, arguments: Sequence[str], env: Mapping[str, str], cwd: Path | None = None
) -> object:
    return {
        "code": code,
        "arguments": [*arguments],
        "env": dict(env),
        "cwd": str(cwd or Path.cwd()),
    }


def command(
    *words: str, env: Mapping[str, str], stderr: int | IO[bytes] = subprocess.DEVNULL
) -> Forked:
    """Run `pdproxy WORDS`."""
    return start(COMMAND, words, env, stderr)


def _asked(question: object, *files: int) -> int:
    link, _ = _server()
    socket.send_fds(link, [json.dumps(question).encode()], files)
    return int(link.recv(_MAX))


@functools.cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start it. Return the end of its socket, and its process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join(one for one in sys.path if one)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.forked", str(theirs.fileno())],
        env={**os.environ, "PYTHONPATH": path},
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    return ours, process


def _serve(link: socket.socket) -> str | None:
    """Fork what is asked for. Return the code in each new process, None here when nobody can ask
    any more.
    """
    while True:
        said, files, _, _ = socket.recv_fds(link, _MAX, 2)
        if not said:
            return None
        question = json.loads(said)
        if "wait" in question:
            _, status = os.waitpid(question["wait"], 0)
            link.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            link.close()
            _take(files)
            os.chdir(question["cwd"])
            os.environ.clear()
            os.environ.update(question["env"])
            sys.argv = ["-c", *question["arguments"]]
            return str(question["code"])
        for file in files:
            os.close(file)
        link.send(str(pid).encode())


def _take(files: Sequence[int]) -> None:
    """Make the last file standard error, and one before it standard output, as Python opens that of
    a new process.
    """
    for file, place in zip(reversed(files), (2, 1), strict=False):
        os.dup2(file, place)
        os.close(file)
    if len(files) > 1:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - until the end
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)


def _main() -> None:
    import pdproxy_lab.cli.demo
    import pdproxy_lab.demo.run  # noqa: F401

    code = None
    with contextlib.suppress(KeyboardInterrupt):
        code = _serve(socket.socket(fileno=int(sys.argv[1])))
    if code is not None:
        exec(code, {"__name__": "__main__"})


if __name__ == "__main__":
    _main()
