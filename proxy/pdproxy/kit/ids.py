"""Request identifiers: the client's if usable, otherwise made here."""

from __future__ import annotations

import os
import re

_USABLE = re.compile(r"[A-Za-z0-9_.:@/+=-]{1,128}")
_OF_WORKER = re.compile(r"[0-9a-f]{2}")
DRAWN = 2048
"""Bytes that are drawn from the system's random source at once: a system call for each id costs
more than the id.
"""

_worker = ""
_drawn: list[str] = []
"""Random numbers of 32 hex digits, each of which is used once."""
os.register_at_fork(after_in_child=_drawn.clear)  # else two processes would use the same ones


def name_worker(number: int) -> None:
    """Have all ids that this process makes from now on begin with the number of its worker, in two
    hex digits.
    """
    global _worker
    _worker = f"{number:02x}"


def mint(digits: int = 32) -> str:
    """Return a fresh request id of so many hex digits, 32 at least."""
    if digits <= 32:
        if not _drawn:
            block = os.urandom(DRAWN).hex()
            _drawn.extend([block[at : at + 32] for at in range(0, len(block), 32)])
        return _worker + _drawn.pop()[len(_worker) :]
    return _worker + os.urandom((digits + 1) // 2).hex()[len(_worker) : digits]


def worker_of(made: str) -> int | None:
    """Return the number of the worker that has made an id; None if it names none. Any other text
    may look as if it named one.
    """
    found = _OF_WORKER.match(made)
    return None if found is None else int(found[0], 16)


def usable(candidate: str | None) -> str | None:
    """Return the candidate if it can be an id in headers, logs and engine ids, else None.

    It has up to 128 characters without white space, quotes or control characters, so that a log
    line needs no escapes.
    """
    if candidate is not None and _USABLE.fullmatch(candidate):
        return candidate
    return None
