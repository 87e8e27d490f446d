"""How a test that hangs ends: pytest-timeout fails it, with what each task waits for; what hangs on
ends with its process.

pytest-timeout's signal is an exception wherever the process is. It may hit a task that is not the
test's, and be lost: it comes again. uvloop's loop reports such an exception and goes on: its tasks
are cancelled. Nothing of pytest-timeout ends a teardown behind a failure, so each phase has a last
end in the process itself, which prints the stacks of all threads and exits. `pytest -n` reports the
test as failed and goes on in a new process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import linecache
import os
import signal
import sys
from types import FrameType
from typing import Any

import pytest

GRACE = 60.0
"""Seconds that each phase of a test has beyond the test's timeout, until its process ends."""
AGAIN = 5.0
"""Seconds until the signal comes again, and again."""
_stderr = pytest.StashKey[int]()


def keep_stderr(config: pytest.Config) -> None:
    """Keep what standard error is before tests are captured: the last stacks are printed there."""
    config.stash[_stderr] = os.dup(2)


def seconds(item: pytest.Item) -> float:
    """Return the test's timeout: its mark's, or that of pyproject.toml."""
    mark = item.get_closest_marker("timeout")
    if mark is not None:
        return float(mark.kwargs.get("timeout", mark.args[0] if mark.args else 0))
    return float(item.config.getini("timeout") or 0)


def arm(item: pytest.Item) -> None:
    """Have this process end unless the phase of the test that begins now has ended in time."""
    faulthandler.dump_traceback_later(
        seconds(item) + GRACE, exit=True, file=item.config.stash[_stderr]
    )


def disarm() -> None:
    """The phase has ended."""
    faulthandler.cancel_dump_traceback_later()


def repeat(settings: Any) -> None:
    """Behind pytest-timeout, which has just set a timer."""
    if not signal.getitimer(signal.ITIMER_REAL)[0]:
        return
    fails: Any = signal.getsignal(signal.SIGALRM)

    def handle(number: int, frame: FrameType | None) -> None:
        loop = asyncio._get_running_loop()
        if loop is None or isinstance(loop, asyncio.BaseEventLoop):
            fails(number, frame)
        print(waiting(), file=sys.stderr, flush=True)
        for task in _tasks():
            task.cancel(f"Timeout (>{settings.timeout}s), from pytest-timeout")

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, AGAIN)


def no_more() -> None:
    """The phase has failed: the signal must not hit pytest itself."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def waiting() -> str:
    """Return where each task of this process waits, from its outermost coroutine to its
    innermost.
    """
    return "\n".join(f"{one.get_name()}\n{''.join(_places(one.get_coro()))}" for one in _tasks())


def _tasks() -> list[asyncio.Task[Any]]:
    loop = asyncio._get_running_loop()
    # some may be frozen (tests/fakes/garbage.py)
    running = asyncio.all_tasks(loop) if loop is not None else set()
    return [
        *running,
        *(
            one
            for one in gc.get_objects()
            if isinstance(one, asyncio.Task) and not one.done() and one not in running
        ),
    ]


def _places(awaited: Any) -> list[str]:
    found = []
    while awaited is not None:
        frame, awaited = _frame(awaited), _next(awaited)
        if frame is not None:
            file, line = frame.f_code.co_filename, frame.f_lineno
            found.append(
                f"  {file}:{line} {frame.f_code.co_name}: {linecache.getline(file, line).strip()}\n"
            )
    return found


def _frame(awaited: Any) -> FrameType | None:
    return next(
        (
            frame
            for name in ("cr_frame", "gi_frame", "ag_frame")
            if (frame := getattr(awaited, name, None))
        ),
        None,
    )


def _next(awaited: Any) -> Any:
    return next(
        (
            one
            for name in ("cr_await", "gi_yieldfrom", "ag_await")
            if (one := getattr(awaited, name, None))
        ),
        None,
    )
