"""Processes for work that would hold up the event loop: a few, started on demand, each with one
question at a time.

Owns the processes. They are not threads, since such work never releases the interpreter's lock. A
process whose caller stops waiting does its work to the end, and serves the next caller: to kill it
and to start another takes longer than most work. Only one that takes too long is killed: nothing
else ends its work.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Hashable, Mapping

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import OverloadedError, RefusalReason
from pdproxy.kit.fair_places import FairPlaces, NoPlaceError
from pdproxy.kit.pool_process import ANSWER, QUESTION
from pdproxy.kit.tasks import TaskOwner

_PIECE = 2**18
"""Bytes per write: a write holds up the event loop for as long as it takes."""
_BUFFER = 2**20
"""Bytes of an answer that are read ahead."""


class ProcessLostError(OverloadedError):
    """A process ended, or did not start: the same work may succeed later."""

    def __init__(self, message: str) -> None:
        super().__init__(message, RefusalReason.READERS)


class NoMemoryError(Exception):
    """The work needs more memory than a process may use."""


class ProcessPool:
    """At most `max_processes` processes that run a Python `module`, whose main is
    `kit.pool_process.work`.

    `waiting`: callers that may wait for one. `memory`: bytes of address space of each. A process
    that was idle for `idle` seconds is ended. `clock`: of the deadline of work whose caller has
    left. `overdue` is called when work has missed that.
    """

    def __init__(
        self,
        module: str,
        *,
        max_processes: int,
        waiting: int,
        memory: int,
        idle: float,
        clock: Clock,
        overdue: Callable[[], None] = lambda: None,
    ) -> None:
        self._module = module
        self._clock = clock
        self._overdue = overdue
        self._max_processes = max_processes
        self._memory = memory
        self._idle_seconds = idle
        self._turns = FairPlaces(max_processes, waiting)
        self._all: set[Process] = set()
        self._former: set[Process] = set()
        """Those that were started with another bound of memory."""
        self._ending = TaskOwner("workers that end")
        self._idle: dict[Process, asyncio.TimerHandle] = {}

    def __repr__(self) -> str:
        return (
            f"<Workers {len(self._all)} of {self._max_processes}, {len(self._idle)} idle, "
            f"{self.waiting} waiting>"
        )

    @property
    def busy(self) -> int:
        """How many are at work."""
        return len(self._all) - len(self._idle)

    @property
    def idle(self) -> int:
        """How many are idle."""
        return len(self._idle)

    @property
    def waiting(self) -> int:
        """Callers that wait for a process."""
        return self._turns.waiting

    def resize(self, max_processes: int, memory: int) -> None:
        """Change the number of processes and their memory. Those at work end their work first."""
        if memory != self._memory:
            self._memory = memory
            self._former |= self._all
            for process in list(self._idle):
                self._end(process)
        self._max_processes = max_processes
        self._turns.resize(max_processes)

    async def ask(
        self, client: Hashable, question: bytes, data: bytes | bytearray, end: float
    ) -> bytes | memoryview:
        """Return a process's answer, once it is the client's turn. `end`: the caller's deadline, by
        the clock.

        If the caller is cancelled before, the process keeps the client's place until its work is
        done, or until `end`.

        Raises:
            OverloadedError: too many wait already, or a client with fewer of them took the place.
            WorkerLostError: the process ended, or none could be started.
            NoMemoryError: the work needs more memory than a process may use.
        """
        try:
            await self._turns.enter(client)
        except NoPlaceError:
            raise OverloadedError(
                "too many large requests are waiting to be read", RefusalReason.READERS
            ) from None
        try:
            process = await self._ready()
        except BaseException:
            self._turns.leave(client)
            raise
        work = asyncio.ensure_future(_asked(process, question, data))
        try:
            return await asyncio.shield(work)
        except (OSError, EOFError):
            raise ProcessLostError("the process that read the request ended") from None
        finally:
            left = end - self._clock.now()
            if work.done() or left <= 0:
                self._worked(client, process, work)
            else:
                self._ending.spawn(self._work_on(client, process, work, left), str(process.pid))

    async def _work_on(
        self,
        client: Hashable,
        process: Process,
        work: asyncio.Future[bytes | memoryview],
        seconds: float,
    ) -> None:
        """Wait for work whose caller has left."""
        try:
            with self._clock.within(seconds):
                await asyncio.wait([work])
        except TimeoutError:
            self._overdue()
        finally:
            self._worked(client, process, work)

    def _worked(
        self, client: Hashable, process: Process, work: asyncio.Future[bytes | memoryview]
    ) -> None:
        """Keep a process that has done its work, and end any other."""
        if work.done() and not work.cancelled() and work.exception() is None:
            self._keep(process)
        else:
            work.cancel()
            self._end(process)
        self._turns.leave(client)

    async def close(self) -> None:
        """End all processes."""
        for process in list(self._all):
            self._end(process)
        await self._ending.settle(1)

    async def _ready(self) -> Process:
        while self._idle:
            process, timer = self._idle.popitem()  # the last that was used: others may time out
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
            raise ProcessLostError(
                f"no process could be started to read the request: {error.strerror}"
            ) from None

    async def _started(self) -> Process:
        memory = self._memory
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", self._module, str(memory),
            stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=_environment(os.environ), limit=_BUFFER,
        )  # fmt: skip
        self._all.add(process)
        if memory != self._memory:  # another bound came while it was started
            self._former.add(process)
        return process

    def _not_wanted(self, starting: asyncio.Future[Process]) -> None:
        if starting.cancelled() or starting.exception() is not None:
            return
        self._keep(starting.result())

    def _keep(self, process: Process) -> None:
        if process in self._former or len(self._all) > self._max_processes:
            self._end(process)
            return
        self._idle[process] = asyncio.get_running_loop().call_later(
            self._idle_seconds, self._end, process
        )

    def _end(self, process: Process) -> None:
        self._all.discard(process)
        self._former.discard(process)
        timer = self._idle.pop(process, None)
        if timer is not None:
            timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if process.stdin is not None and not process.stdin.transport.is_closing():
            process.stdin.transport.abort()  # drop what it has not read
        self._ending.spawn(_ended(process), str(process.pid))


async def _ended(process: Process) -> None:
    await process.wait()


async def _asked(process: Process, question: bytes, data: bytes | bytearray) -> bytes | memoryview:
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None
    stdin.write(QUESTION.pack(len(question), len(data)) + question)
    view = memoryview(data)
    with contextlib.suppress(ConnectionError):  # it may have answered before it stopped reading
        for at in range(0, len(view), _PIECE):
            stdin.write(view[at : at + _PIECE])
            await stdin.drain()
    del data, view  # the caller may be gone, and nobody else counts these bytes
    enough, size = ANSWER.unpack(await stdout.readexactly(ANSWER.size))
    if not enough:
        raise NoMemoryError
    if size <= _BUFFER:
        return await stdout.readexactly(size)
    # Piece by piece into memory that is not touched before: joining many pieces at the end would
    # hold up the event loop.
    whole, at = mmap.mmap(-1, size), 0
    while at < size:
        piece = await stdout.read(min(size - at, _BUFFER))
        if not piece:
            raise EOFError
        whole[at : at + len(piece)] = piece
        at += len(piece)
    return memoryview(whole)


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a process's environment: this one without the settings of pdproxy, which may hold
    keys.
    """
    return {name: value for name, value in environment.items() if not name.startswith("PDPROXY_")}
