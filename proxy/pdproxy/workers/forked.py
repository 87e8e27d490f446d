"""What a process does around a fork of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def flush_output() -> None:
    """Write what the standard streams hold, or both processes of a fork would."""
    for stream in (sys.stdout, sys.stderr):
        # nobody reads it, or it is None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def die_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent ends. Where the system can't, the end of
    its link ends it.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """Have `ps` and `top` show this process under a name of 15 characters at most, where the system
    can.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
