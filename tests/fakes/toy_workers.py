"""A supervisor with workers that do nothing but what their number says; run as a process of its
own: `python ... MODE`.

Each worker prints its number and process id, one line, once it is ready. The process ends with the
supervisor's exit code, 3 if the workers refused their settings, whose text is printed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from pdproxy.workers.links import Link, LinkError, Message
from pdproxy.workers.supervisor import (
    DRAIN,
    END,
    ENDS_WITHIN,
    PING,
    PONG,
    READY,
    REFUSED,
    RELOAD,
    RefusedError,
    Supervisor,
    SupervisorTimes,
)
from pdproxy.workers.supervisor import WorkerProcess as Process

PR_SET_CHILD_SUBREAPER = 36
REFUSALS = 3
"""How often the system has no process left, in mode `full`, from the first restart on."""


def say(line: str) -> None:
    """Print a line in one write: several processes print to the same pipe."""
    os.write(1, f"{line}\n".encode())


class Watcher:
    """Prints what happens."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def received(self, worker: Process, message: Message) -> None:
        say(f"said {worker.number} {message.kind}")

    def starts(self, number: int) -> None:
        say(f"starts {number}")

    def waits(self, number: int, seconds: float) -> None:
        say(f"waits {number} {seconds:g}")

    def died(self, number: int) -> None:
        say(f"died {number}")

    def ready(self, worker: Process) -> None:
        say(f"ready {worker.number} {worker.pid}")


def work(mode: str, number: int, end: socket.socket) -> int:
    """Be a worker of one of the modes below."""
    link = Link(end)
    if mode == "refuses":
        end.setblocking(True)
        link.send(Message(REFUSED, body=b"deadlines.total: too short"))
        return 2
    if mode == "ends":
        return 5
    if mode == "fails":
        raise ValueError("a secret")
    serves = Path(sys.argv[2]) / "serves"
    if mode == "workers_refuse" and number < 2:
        while not serves.exists():
            time.sleep(0.005)
        end.setblocking(True)
        link.send(Message(REFUSED, body=b"deadlines.total: too short"))
        return 2
    again = Path(sys.argv[2]) / f"{number}"
    first = not again.exists()
    again.touch()
    if mode == "refuses_later" and not first:
        end.setblocking(True)
        link.send(Message(REFUSED, body=b"key file: gone"))
        return 2
    if mode == "leaves":
        say(f"child {subprocess.Popen(['sleep', '0.2']).pid}")
    link.send(Message(READY))
    serves.touch()
    end_at = float("inf")
    while time.monotonic() < end_at:
        time.sleep(0.005)
        try:
            messages = link.read()
            link.flush()
        except LinkError:
            return 9
        for message in messages:
            if message.kind == PING and (mode != "silent" or number or not first):
                link.send(Message(PONG))
            elif message.kind == RELOAD:
                link.send(Message("reloaded"))
            elif message.kind == DRAIN and mode == "drains_long":
                link.send(Message(ENDS_WITHIN, 60))
                end_at = time.monotonic() + 1.0
            elif (message.kind == DRAIN and mode != "stays") or (
                message.kind == END and mode != "stays"
            ):
                return 0
    return 0


def full() -> None:
    """Have the system be out of processes once both workers run."""
    fork, calls = os.fork, 0

    def refused() -> int:
        nonlocal calls
        calls += 1
        if 2 < calls <= 2 + REFUSALS:
            say(f"refused with {len(os.listdir('/proc/self/fd'))} files")
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    os.fork = refused


def main() -> int:
    mode = sys.argv[1]
    if mode == "full":
        full()
    # as process 1 of a container: it becomes the parent of its workers' children when these die
    if mode == "leaves":
        assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    times = SupervisorTimes(
        ping=0.02,
        # one of the two, so that it is seen which counts for whom
        silent=30.0 if mode == "for_all" else 0.6,
        ping_for_all=0.02,
        silent_for_all=0.3,
        first=30.0,
        pauses=(0.0, 0.05, 0.1),
        longest_for_all=0.07,
        at_once=0.3,
    )
    for_all = "one for all" if mode in ("for_all", "workers_refuse") else None
    supervisor = Supervisor(
        2, lambda number, end: work(mode, number, end), Watcher, 0.5, times, for_all=for_all
    )
    try:
        return supervisor.run()
    except RefusedError as error:
        say(f"refused {error}")
        return 3
    finally:
        if for_all is not None:
            say(f"restarts for all {supervisor.restarts_for_all}")
        say(f"restarts {supervisor.restarts}")
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
