"""Waits that the end of the demo cuts short."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from pdproxy.app.signals import Ending
from pdproxy_lab.demo.options import DemoError

_T = TypeVar("_T")


class EndedError(Exception):
    """The user has ended the demo."""


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
        DemoError: a proxy has ended by itself.
    """
    tasks = set(proxies)
    end_requested = asyncio.ensure_future(ending.requested.wait())
    left = max(0.0, moment - asyncio.get_running_loop().time())
    await asyncio.wait({end_requested, *tasks}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    end_requested.cancel()
    if any(task.done() for task in tasks):
        raise DemoError("the proxy ended unexpectedly")


async def or_at_once(what: Coroutine[Any, Any, object], at_once: asyncio.Event) -> None:
    """Run a coroutine to its end, or until `at_once` is set."""
    working = asyncio.ensure_future(what)
    hurry = asyncio.ensure_future(at_once.wait())
    await asyncio.wait({working, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
