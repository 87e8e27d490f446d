"""The course of a demo: it plays until its end, and the end cuts waits short."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from pdproxy.app.server import INTERRUPTED
from pdproxy.app.signals import Ending
from pdproxy_lab.demo.options import Say
from pdproxy_lab.up.errors import UpError

_T = TypeVar("_T")


class EndedError(Exception):
    """The user has ended the demo."""


async def played(
    play: Coroutine[Any, Any, None], end: Callable[[], Awaitable[int]], ending: Ending, say: Say
) -> int:
    """Run `play` until it is over or the user ends it, then `end`, each step of which is short once
    `at_once` is set. Return the exit code: that of `end`, or 130 at a second Ctrl-C.
    """
    # SIGHUP: the terminal is gone.
    ending.take_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        with contextlib.suppress(EndedError):
            await play
    finally:
        ending.requested.set()  # from now on a Ctrl-C is the second one
        with contextlib.suppress(OSError):  # the reader of standard output may be gone
            say("ending (Ctrl-C again: at once)")
        code = await end()
    return INTERRUPTED if ending.at_once.is_set() else code


async def unless_ended(what: Coroutine[Any, Any, _T], ending: Ending) -> _T:
    """Return what a coroutine returns.

    Raises:
        EndedError: the end was requested first.
    """
    working = asyncio.ensure_future(what)
    end_requested = asyncio.ensure_future(ending.requested.wait())
    try:
        await asyncio.wait({working, end_requested}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise EndedError
        return working.result()
    finally:
        end_requested.cancel()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def until(moment: float, ending: Ending, proxies: Iterable[asyncio.Task[int]]) -> None:
    """Wait for a time of the event loop or for the end, whichever comes first.

    Raises:
        UpError: a proxy has ended by itself.
    """
    tasks = set(proxies)
    end_requested = asyncio.ensure_future(ending.requested.wait())
    left = max(0.0, moment - asyncio.get_running_loop().time())
    await asyncio.wait({end_requested, *tasks}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    end_requested.cancel()
    if any(task.done() for task in tasks):
        raise UpError("the proxy ended unexpectedly")


async def or_at_once(what: Coroutine[Any, Any, object], at_once: asyncio.Event) -> None:
    """Run a coroutine to its end, or until `at_once` is set."""
    working = asyncio.ensure_future(what)
    hurry = asyncio.ensure_future(at_once.wait())
    await asyncio.wait({working, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
