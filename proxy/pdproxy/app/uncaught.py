"""Uncaught exceptions: logged by their types and places, as all others are.

Python's and asyncio's own handlers quote the exception, which may quote a prompt, and write to
standard error, which may block.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import threading
from typing import Any

from pdproxy.kit.frames import frames

logger = logging.getLogger("pdproxy")


def install() -> None:
    """Log uncaught exceptions of this process. For an event loop, set `log_failure` as its
    exception handler.
    """
    sys.unraisablehook, threading.excepthook = log_unraisable, log_thread


def log_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what failed in a callback, or in a task that nothing waits for: asyncio's own handler
    would quote the exception.
    """
    error = context.get("exception")
    # The part of the message before a callback's arguments: what follows may hold text of clients.
    what = (
        re.split(r"[<(\n]", str(context.get("message", "")), maxsplit=1)[0].strip()
        or "a callback failed"
    )
    logger.error("%s%s", what, f": {frames(error)}" if isinstance(error, BaseException) else "")


def log_unraisable(failed: sys.UnraisableHookArgs) -> None:
    """Log what a destructor or a callback of C raised."""
    if failed.exc_value is not None:
        logger.error("an exception that could not be raised: %s", frames(failed.exc_value))


def log_thread(failed: threading.ExceptHookArgs) -> None:
    """Log what ended a thread."""
    if failed.exc_value is not None:
        logger.error("a thread failed: %s", frames(failed.exc_value))
