"""How much freed memory a process keeps for its next allocation, where its C library is glibc."""

from __future__ import annotations

import contextlib
import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of glibc's `mallopt`."""
_KEPT, _MAPPED = 16 << 20, 4 << 20
"""Bytes. Up to the first, what is free at the heap's end stays there; an allocation from the second
on is a mapping of its own, which goes back to the system at once.
"""


def keep() -> None:
    """Have this process, and those that it forks, keep some MiB. By default, glibc gives the memory
    of each body of 128 KiB and more back to the system, which has to clear the same pages for the
    next body: that takes longer than to send it.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_MMAP_THRESHOLD, _MAPPED)
