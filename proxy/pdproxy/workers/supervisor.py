"""A parent process that keeps several workers running, and one process that works for all of them.
It has no event loop and does no work of its own.

Owns the worker processes, their links, and the order of their end. A worker is forked from the
parent while nothing runs there: no event loop, no connection, no lock that somebody holds. It
starts within milliseconds, because all modules are loaded. A worker that ends is started again; one
that does not answer pings is killed first. If the parent ends, however that happens, the system
kills the workers.

The first SIGTERM has all workers leave: they serve for some seconds, then drain. A second signal,
or SIGINT, has them drain now; a SIGINT after that ends them at once. SIGHUP is passed on: to the
process that works for all workers, if there is one.

The process that works for all workers is kept as they are. It is started before them, and asked to
end when they have ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from pdproxy.kit.frames import frames
from pdproxy.workers.forked import die_with_parent, flush_output
from pdproxy.workers.links import EndedError, Link, LinkError, Message, TooLongError, pair

logger = logging.getLogger("pdproxy.workers")

INTERRUPTED = 130
LEAVE, DRAIN, END, RELOAD, PING, PEER = "leave", "drain", "end", "reload", "ping", "peer"
"""What the parent sends: drain in a while, drain now, end at once, read the settings again, answer
with `PONG`, and a socket to another process: of a worker to the one that works for all, or the
other way round.
"""
READY, REFUSED, PONG, ENDS_WITHIN = "ready", "refused", "pong", "ends_within"
NO_PEER = "no_peer"
"""What a worker sends: it serves; its settings can't be used (`body`: why), and it ends; it has
read a ping; it drains, and may take so long (`number`: seconds); its socket to the process that
works for all is closed, and it has got no other one.
"""
_LONGEST_WAIT = 1.0


@dataclass(frozen=True, slots=True)
class SupervisorTimes:
    """In seconds. `ping`: between two pings; `silent`: without an answer a worker is killed, not
    counting those in which it waited for a processor, up to as many again; `first`: the same for
    its start. `ping_for_all`, `silent_for_all`: those of the process that
    works for all, for which requests wait.

    `pauses`: before the first, second, ... start again within a short time, the last one for all
    later ones; a worker that has run for `well` seconds begins anew. `longest_for_all`: the longest
    pause of the process that works for all. `at_once`: for the workers to end when they must not
    drain.
    """

    ping: float = 1.0
    silent: float = 20.0
    ping_for_all: float = 0.25
    silent_for_all: float = 1.0
    first: float = 120.0
    pauses: tuple[float, ...] = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
    longest_for_all: float = 0.25
    well: float = 60.0
    at_once: float = 3.0


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """One worker: its present process, or when the next one is due."""

    number: int
    name: str = ""
    """As lines of the log name it."""
    is_for_all: bool = False
    """Whether it is the process that works for all workers."""
    pid: int | None = None
    link: Link | None = None
    ready: bool = False
    """Whether the present process serves."""
    since: float = 0.0
    """When it was started."""
    pinged: float = 0.0
    heard: float = 0.0
    """When it last showed that its event loop runs; later by the time in which it could not."""
    queued: float = 0.0
    """For how many seconds it had waited for a processor then."""
    excused: float = 0.0
    """By how many seconds `heard` is later."""
    deaths: int = 0
    """How often it has ended since it was last well."""
    due: float = 0.0
    is_ending: bool = False
    """Whether it was asked to end behind the others."""
    refused: bytes | None = field(default=None, repr=False)


class Watcher(Protocol):
    """What the parent does for the workers besides keeping them. Nothing of it may wait."""

    def received(self, worker: WorkerProcess, message: Message) -> None:
        """A worker has sent another message than those above."""

    def starts(self, number: int) -> None:
        """A worker's process is started next. OSError: it can't be yet."""

    def died(self, number: int) -> None:
        """A worker's process has ended. Its next one is not started yet."""

    def waits(self, number: int, seconds: float) -> None:
        """A worker has failed, and is started again in so many seconds."""

    def ready(self, worker: WorkerProcess) -> None:
        """A worker serves."""


def queued_seconds(pid: int | None) -> float:
    """Return for how long a process's main thread has been able to run and had no processor; 0 if
    the system does not say so.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


class RefusedError(Exception):
    """No worker could begin, because the settings can't be used. The message says why, a line per
    mistake.
    """


class Supervisor:
    """So many workers. `work(number, socket)` runs in a worker's process, and returns its exit
    code. `for_all`: the name of the process that works for all of them, None if there is none; its
    number is behind theirs.

    `ends_within`: seconds for a drain until a worker is killed; its own may last longer. `lingers`:
    those that it serves before.
    """

    def __init__(
        self,
        count: int,
        work: Callable[[int, socket.socket], int],
        watcher: Callable[[Supervisor], Watcher],
        ends_within: float,
        times: SupervisorTimes | None = None,
        lingers: float = 0.0,
        for_all: str | None = None,
    ) -> None:
        self.workers = [WorkerProcess(number, f"worker {number}") for number in range(count)]
        """With the process that works for all of them. Read only."""
        self._for_all: WorkerProcess | None = None
        if for_all is not None:
            self._for_all = WorkerProcess(count, for_all, is_for_all=True)
            self.workers.append(self._for_all)
        self.restarts = 0
        """How often a worker was started again."""
        self.restarts_for_all = 0
        """The same of the process that works for all."""
        self._work = work
        self._ends_within = ends_within
        self._lingers, self._lingers_until, self._times = lingers, 0.0, times or SupervisorTimes()
        self._signals: list[int] = []
        self._wakes: socket.socket | None = None
        self._any_ready = False
        self._end_by: float | None = None
        """When workers are killed that are still there; None: nobody has asked for the end."""
        self._at_once = False
        self._failed = False
        self._looked = time.monotonic()
        self._watcher = watcher(self)

    def __repr__(self) -> str:
        return (
            f"<Supervisor of {len(self.workers)}: "
            f"{', '.join(str(one.pid) for one in self.workers)}>"
        )

    def run(self) -> int:
        """Keep the workers until asked to end. Return the exit code: 0, 1 if one failed, 130 at a
        second SIGINT.

        Raises:
            RefusedError: the settings can't be used.
        """
        with self._signalled():
            try:
                for worker in sorted(self.workers, key=lambda one: not one.is_for_all):
                    self._start(worker)
                while self._end_by is None or any(one.pid is not None for one in self.workers):
                    self._wait()
                    self._reap()
                    self._end_last()
                    self._look()
            finally:
                self._kill_all()
        if self._at_once:
            return INTERRUPTED
        return 1 if self._failed else 0

    def send(self, worker: WorkerProcess, message: Message) -> None:
        """Send a worker a message. One that does not read is killed."""
        if worker.link is None:
            return
        try:
            worker.link.send(message)
        except TooLongError as error:
            logger.error("%s is not sent %s", worker.name, error)  # noqa: TRY400
        except EndedError:
            # that it has ended is noticed next; a process that has closed its end is found by pings
            pass
        except LinkError as error:
            self._kill(worker, str(error))

    # -- processes

    def _start(self, worker: WorkerProcess) -> None:
        """Start a worker's process.

        Raises:
            OSError: the system has no process, memory or files left.
        """
        self._watcher.starts(worker.number)
        parents, end = pair()
        parent = os.getpid()
        flush_output()
        try:
            pid = os.fork()
        except OSError:
            parents.close()
            end.close()
            raise
        if pid == 0:
            self._run_worker(worker, parents, end, parent)
        end.close()
        worker.pid, worker.link, worker.ready = pid, Link(parents), False
        worker.since = worker.pinged = worker.heard = time.monotonic()
        worker.queued = worker.excused = 0.0  # its predecessor's are not its own
        worker.refused = None
        self._connect(worker)

    def _connect(self, worker: WorkerProcess) -> None:
        """Give a process that has just begun and those that it works with pairs of sockets: each
        worker has one with the process that works for all.
        """
        last = self._for_all
        if last is None:
            return
        for other in self.workers if worker is last else [worker]:
            if other is not last and last.link is not None and other.link is not None:
                ends = pair()
                for one, end in zip((last, other), ends, strict=True):
                    self._give(one, end)

    @staticmethod
    def _give(worker: WorkerProcess, end: socket.socket) -> None:
        assert worker.link is not None
        with contextlib.suppress(LinkError):  # it has ended: its successor gets another one
            worker.link.give(Message(PEER), end)

    def _run_worker(
        self, worker: WorkerProcess, parents: socket.socket, end: socket.socket, parent: int
    ) -> None:
        """Be the worker. Does not return."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for name in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(name, signal.SIG_DFL)
            # a terminal sends them to all: the parent passes them on
            for name in (signal.SIGINT, signal.SIGHUP):
                signal.signal(name, signal.SIG_IGN)
            die_with_parent(parent)
            parents.close()
            for other in self.workers:
                if other.link is not None:
                    other.link.close()
            code = self._work(worker.number, end)
        except BaseException as error:
            logger.critical("%s failed: %s", worker.name, frames(error))
        finally:
            flush_output()
            os._exit(code)

    def _reap(self) -> None:
        """Process the ends of workers. As process 1, as in a container, this one gets the children
        of dead workers as well.
        """
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                for worker in (one for one in self.workers if one.pid == found[0]):
                    self._died(worker, os.waitstatus_to_exitcode(found[1]))
        except ChildProcessError:
            for worker in self.workers:
                if worker.pid is not None:
                    self._died(worker, 1)

    def _died(self, worker: WorkerProcess, code: int) -> None:
        # another process may have its id from now on
        pid, worker.pid, worker.ready = worker.pid, None, False
        for _ in range(32):  # all that it has sent before its end, however much a socket holds
            self._read(worker)
        if worker.link is not None:
            worker.link.close()
        worker.link, worker.ready = None, False
        self._watcher.died(worker.number)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        if self._end_by is not None:
            # SIGTERM for the whole group ends a worker that has just begun.
            self._failed = self._failed or (code not in (0, -signal.SIGTERM) and not self._at_once)
            return
        if not self._any_ready:
            if worker.refused is not None:
                raise RefusedError(worker.refused.decode())
            logger.error(
                "%s (process %s) %s before any worker served: giving up",
                worker.name,
                pid,
                how,
            )
            self._failed = True
            self._end(self._times.at_once)
            return
        if time.monotonic() - worker.since >= self._times.well:
            worker.deaths = 0
        pause = self._put_off(worker)
        why = "" if worker.refused is None else f": {worker.refused.decode()}"
        logger.error(
            "%s (process %s) %s, and starts again in %g s%s",
            worker.name,
            pid,
            how,
            pause,
            why,
        )

    def _put_off(self, worker: WorkerProcess) -> float:
        """Return in how many seconds a worker starts again: it has failed once more."""
        pauses = self._times.pauses
        pause = pauses[min(worker.deaths, len(pauses) - 1)]
        if worker.is_for_all:
            pause = min(pause, self._times.longest_for_all)
        worker.deaths += 1
        worker.due = time.monotonic() + pause
        self._watcher.waits(worker.number, pause)
        return pause

    def _kill(self, worker: WorkerProcess, why: str) -> None:
        if worker.pid is not None:
            logger.error("%s (process %d) is killed: %s", worker.name, worker.pid, why)
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)

    def _kill_all(self) -> None:
        for worker in self.workers:
            if worker.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(worker.pid, 0)
                worker.pid = None
            if worker.link is not None:
                worker.link.close()

    # -- what happens

    @contextlib.contextmanager
    def _signalled(self) -> Iterator[None]:
        wakes, wake = pair()
        wakes.setblocking(False)
        wake.setblocking(False)
        self._wakes = wakes
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
        before = {number: signal.signal(number, self._take) for number in numbers}
        fd = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            wakes.close()
            wake.close()

    def _take(self, number: int, _: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)

    def _wait(self) -> None:
        """Wait until something has happened, for a second at most, and read what workers have
        sent.
        """
        assert self._wakes is not None
        poll = select.poll()
        poll.register(self._wakes.fileno(), select.POLLIN)
        linked = {}
        for worker in self.workers:
            if worker.link is not None:
                linked[fd := worker.link.fileno()] = worker
                poll.register(fd, select.POLLIN | (select.POLLOUT if worker.link.unsent else 0))
        now = time.monotonic()
        due = [now + _LONGEST_WAIT, *([] if self._end_by is None else [self._end_by])]
        due += [one.due for one in self.workers if one.pid is None and self._end_by is None]
        for one in self.workers:
            if one.pid is not None:
                due += [one.pinged + self._between_pings(one), one.heard + self._silence(one)]
        timeout = max(min(due) - now, 0.0)
        for fd, _ in poll.poll(int(timeout * 1000) + 1):
            if (sender := linked.get(fd)) is not None:
                self._read(sender)
            else:
                with contextlib.suppress(BlockingIOError):
                    self._wakes.recv(4096)
        signals, self._signals = self._signals, []
        for number in signals:
            self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if number == signal.SIGHUP:
            for worker in self.workers if self._for_all is None else [self._for_all]:
                self.send(worker, Message(RELOAD))
        elif self._end_by is None:
            logger.info("shutting down %d workers", sum(not one.is_for_all for one in self.workers))
            self._lingers_until = now + (self._lingers if number == signal.SIGTERM else 0.0)
            self._tell_workers(LEAVE if self._lingers_until > now else DRAIN)
            self._end(self._lingers_until - now + self._ends_within)
        elif now < self._lingers_until:
            self._lingers_until = now
            self._tell_workers(DRAIN)
        elif number == signal.SIGINT and not self._at_once:
            self._at_once = True
            self._tell(END)
            self._end(self._times.at_once)

    def _tell(self, kind: str) -> None:
        for worker in self.workers:
            self.send(worker, Message(kind))

    def _tell_workers(self, kind: str) -> None:
        for worker in self.workers:
            if not worker.is_for_all:
                self.send(worker, Message(kind))

    def _end(self, seconds: float) -> None:
        self._end_by = time.monotonic() + seconds

    def _end_last(self) -> None:
        """Have the process that works for all end, once all workers have ended."""
        last = self._for_all
        if self._end_by is None or last is None or last.pid is None or last.is_ending:
            return
        if all(one.pid is None for one in self.workers if one is not last):
            last.is_ending = True
            self.send(last, Message(DRAIN))
            self._end_by = max(self._end_by, time.monotonic() + self._times.at_once)

    def _read(self, worker: WorkerProcess) -> None:
        if worker.link is None:
            return
        try:
            messages = worker.link.read()
        except LinkError:
            worker.link.close()  # its process ends, or is found by pings
            worker.link = None
            return
        # it has ended, which is found behind the last that it has sent
        with contextlib.suppress(LinkError):
            worker.link.flush()
        if messages:
            worker.heard, worker.excused = time.monotonic(), 0.0
            worker.queued = queued_seconds(worker.pid)
        for message in messages:
            if message.kind == READY:
                worker.ready = True
                self._any_ready = self._any_ready or not worker.is_for_all
                self._watcher.ready(worker)
            elif message.kind == REFUSED:
                worker.refused = message.body
            elif message.kind == ENDS_WITHIN:
                # settings may have changed since the start
                if self._end_by is not None and not self._at_once:
                    self._end_by = max(self._end_by, time.monotonic() + message.number)
            elif message.kind == NO_PEER:
                self._connect(worker)
            elif message.kind != PONG:
                self._watcher.received(worker, message)

    def _between_pings(self, worker: WorkerProcess) -> float:
        return self._times.ping_for_all if worker.is_for_all else self._times.ping

    def _silence(self, worker: WorkerProcess) -> float:
        """Return for how many seconds a worker may answer nothing."""
        if not worker.ready:
            return self._times.first
        # once it is to end nobody waits for it
        if worker.is_for_all and not worker.is_ending:
            return self._times.silent_for_all
        return self._times.silent

    def _excuse(self, worker: WorkerProcess) -> None:
        """Do not count the time in which a worker that is silent waited for a processor: a
        successor would wait as long, and has more to do.
        """
        queued = queued_seconds(worker.pid)
        waited = min(queued - worker.queued, self._times.silent - worker.excused)
        worker.queued = queued
        worker.excused += waited
        worker.heard += waited

    def _look(self) -> None:
        """Do what is due: pings, the end of workers that are silent or late, starts."""
        now, times = time.monotonic(), self._times
        for worker in self.workers:
            # this process itself was stopped: nobody could answer
            if now - self._looked > self._silence(worker) / 2:
                worker.heard = now
            if now >= worker.pinged + self._between_pings(worker):
                worker.pinged = now
                self.send(worker, Message(PING))
            if worker.pid is not None and now - worker.heard > (most := self._silence(worker)):
                self._excuse(worker)
                if now - worker.heard > most:
                    worker.heard = now
                    self._kill(worker, f"it has answered nothing for {most:g} s")
        self._looked = now
        if self._end_by is not None:
            if now >= self._end_by:
                for worker in self.workers:
                    self._kill(worker, "it did not end in time")
                self._end(times.at_once)
            return
        for worker in self.workers:
            if worker.pid is None and now >= worker.due:
                try:
                    self._start(worker)
                except OSError as error:  # the others serve on
                    pause = self._put_off(worker)
                    logger.error(  # noqa: TRY400
                        "%s can't be started, tried again in %g s: %s",
                        worker.name,
                        pause,
                        error,
                    )
                else:
                    if worker.is_for_all:
                        self.restarts_for_all += 1
                    else:
                        self.restarts += 1
