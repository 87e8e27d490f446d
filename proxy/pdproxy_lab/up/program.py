"""Runs a program to its end, with a deadline, and leaves none of its children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pdproxy_lab.up.errors import UpError

MAX_OUTPUT = 4 << 20
"""Bytes that a program may print."""
_LAST_WORDS = 2.0
"""Seconds for what a program has printed before it was killed."""


class Ended(NamedTuple):
    """What a program has printed on standard output and standard error, and its exit code."""

    code: int
    out: bytes
    err: bytes


async def run_to_end(command: Sequence[str | Path], deadline: float, doing: str) -> bytes:
    """Run a program and return what it printed.

    Raises:
        UpError: it failed, took too long, or printed too much; ends with its last line.
    """
    ended = await run(command, deadline, doing)
    if ended.code:
        said = ended.err if ended.err.strip() else ended.out
        lines = [line for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
        last = lines[-1].strip() if lines else "no message"
        raise UpError(f"{doing} failed with exit code {ended.code}: {last}")
    return ended.out


async def run(command: Sequence[str | Path], deadline: float, doing: str) -> Ended:
    """Run a program to its end, whatever its exit code; its whole group is killed at the deadline,
    and on cancellation.

    Raises:
        UpError: it took too long, printed too much, or can't be started.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise UpError(f"{doing}: {command[0]}: {error.strerror or error}") from error
    reading = [
        asyncio.create_task(_read(stream, doing)) for stream in (process.stdout, process.stderr)
    ]
    try:
        async with asyncio.timeout(deadline):
            out, err = await asyncio.gather(*reading)
            await process.wait()
    except TimeoutError:
        raise UpError(f"{doing} took more than {deadline:.0f} s") from None
    finally:
        kill_group(process.pid)
        for one in reading:
            one.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        # to the end of its pipes, or they stay open; what has left its group may hold them
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS):
                await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out, err)


async def _read(stream: asyncio.StreamReader | None, doing: str) -> bytes:
    assert stream is not None
    found = bytearray()
    while piece := await stream.read(1 << 16):
        found += piece
        if len(found) > MAX_OUTPUT:
            raise UpError(f"{doing} printed more than {MAX_OUTPUT >> 20} MiB")
    return bytes(found)


def kill_group(leader: int) -> None:
    """Kill what is left of a session that was started here."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
