"""Worker processes for what would hold up the event loop: a few, started when they are needed, each with one question at a time.

Owns the processes. A process and not a thread, since the work that is meant never gives up the interpreter's lock. A worker
whose caller stops waiting is killed: nothing else ends its work.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Hashable, Mapping

from pdproxy.kit.errors import OverloadedError
from pdproxy.kit.fair_places import FairPlaces, NoPlaceError
from pdproxy.kit.tasks import TaskOwner
from pdproxy.kit.worker import ANSWER, QUESTION

_PIECE = 2**18
"""Bytes that are written in one go: whatever a worker takes at once holds up the event loop meanwhile."""
_BUFFER = 2**20
"""Bytes of an answer that are read ahead."""


class WorkerLostError(OverloadedError):
    """A worker ended, or did not start: the same work may succeed later."""


class NoMemoryError(Exception):
    """The work takes more memory than a worker may have."""


class Workers:
    """At most `most` processes that run a Python `module`, whose main is `kit.worker.work`.

    `waiting`: callers that may wait for one. `memory`: bytes of addresses that one may have. One that has had nothing to do for
    `idle` seconds is ended.
    """

    def __init__(self, module: str, *, most: int, waiting: int, memory: int, idle: float) -> None:
        self._module = module
        self._most = most
        self._memory = memory
        self._idle_seconds = idle
        self._turns = FairPlaces(most, waiting)
        self._all: set[Process] = set()
        self._ending = TaskOwner("workers that end")
        self._idle: dict[Process, asyncio.TimerHandle] = {}

    def __repr__(self) -> str:
        return f"<Workers {len(self._all)} of {self._most}, {len(self._idle)} idle, {self.waiting} waiting>"

    @property
    def busy(self) -> int:
        """How many are at work."""
        return len(self._all) - len(self._idle)

    @property
    def idle(self) -> int:
        """How many have nothing to do."""
        return len(self._idle)

    @property
    def waiting(self) -> int:
        """Callers that wait for one."""
        return self._turns.waiting

    async def ask(self, asker: Hashable, question: bytes, data: bytes | bytearray) -> bytes | memoryview:
        """Have a worker answer, when it is the asker's turn. Cancelled, it ends the worker that is at work on it.

        Raises:
            OverloadedError: too many wait already, or this one gave way to an asker with fewer.
            WorkerLostError: the worker ended, or none could be started.
            NoMemoryError: the work takes more memory than a worker may have.
        """
        try:
            await self._turns.enter(asker)
        except NoPlaceError:
            raise OverloadedError("too many large requests are waiting to be read") from None
        try:
            process = await self._ready()
        except BaseException:
            self._turns.leave(asker)
            raise
        try:
            answer = await _asked(process, question, data)
        except (OSError, EOFError):
            self._end(process)
            raise WorkerLostError("the process that read the request ended") from None
        except BaseException:
            self._end(process)
            raise
        else:
            self._keep(process)
            return answer
        finally:
            self._turns.leave(asker)

    async def close(self) -> None:
        """End all workers."""
        for process in list(self._all):
            self._end(process)
        await self._ending.settle(1)

    async def _ready(self) -> Process:
        while self._idle:
            process, timer = self._idle.popitem()  # the last that was at work: others may end
            timer.cancel()
            if process.returncode is None:
                return process
            self._end(process)
        starting = asyncio.ensure_future(self._started())
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._not_wanted)
            raise
        except OSError as error:
            raise WorkerLostError(f"no process could be started to read the request: {error.strerror}") from None

    async def _started(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", self._module, str(self._memory),
            stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=_environment(os.environ), limit=_BUFFER,
        )  # fmt: skip
        self._all.add(process)
        return process

    def _not_wanted(self, starting: asyncio.Future[Process]) -> None:
        if starting.cancelled() or starting.exception() is not None:
            return
        if len(self._all) > self._most:
            self._end(starting.result())
        else:
            self._keep(starting.result())

    def _keep(self, process: Process) -> None:
        self._idle[process] = asyncio.get_running_loop().call_later(self._idle_seconds, self._end, process)

    def _end(self, process: Process) -> None:
        self._all.discard(process)
        timer = self._idle.pop(process, None)
        if timer is not None:
            timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if process.stdin is not None and not process.stdin.transport.is_closing():
            process.stdin.transport.abort()  # what it has not read is let go of
        self._ending.spawn(_ended(process), str(process.pid))


async def _ended(process: Process) -> None:
    await process.wait()


async def _asked(process: Process, question: bytes, data: bytes | bytearray) -> bytes | memoryview:
    take, give = process.stdin, process.stdout
    assert take is not None
    assert give is not None
    take.write(QUESTION.pack(len(question), len(data)) + question)
    given = memoryview(data)
    with contextlib.suppress(
        ConnectionError
    ):  # what the worker has said before it stopped reading, if anything, is its answer
        for at in range(0, len(given), _PIECE):
            take.write(given[at : at + _PIECE])
            await take.drain()
    enough, size = ANSWER.unpack(await give.readexactly(ANSWER.size))
    if not enough:
        raise NoMemoryError
    if size <= _BUFFER:
        return await give.readexactly(size)
    # Piece by piece into memory that is not touched before: to make one of many pieces at the end would hold up the event loop.
    whole, at = mmap.mmap(-1, size), 0
    while at < size:
        piece = await give.read(min(size - at, _BUFFER))
        if not piece:
            raise EOFError
        whole[at : at + len(piece)] = piece
        at += len(piece)
    return memoryview(whole)


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment: ours without our settings, which may hold keys."""
    return {name: value for name, value in ours.items() if not name.startswith("PDPROXY_")}
