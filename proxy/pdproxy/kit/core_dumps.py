"""Keeps the memory of a process, which holds keys and prompts, out of files and out of other
processes of its user.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource

_PR_SET_DUMPABLE = 4


def forbid() -> None:
    """Have this process, and those that it forks, leave no core dump and let no other process of
    its user read its memory.

    A program that is started from here has to do it again. Who may read any process's memory
    (CAP_SYS_PTRACE) still may. Where the system has no such flag (not Linux), only core dumps are
    off.
    """
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Also where the system hands dumps to a program (`kernel.core_pattern` with a pipe), which the
    # limit does not stop.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
