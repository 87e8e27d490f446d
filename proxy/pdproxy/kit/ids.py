"""Request identifiers: the client's if usable, otherwise made here."""

from __future__ import annotations

import os
import re

_USABLE = re.compile(r"[A-Za-z0-9_.:@/+=-]{1,128}")


def mint() -> str:
    """Return a fresh request id of 32 hex digits."""
    return os.urandom(16).hex()


def usable(candidate: str | None) -> str | None:
    """Return the candidate if it can be an id in headers, logs and engine ids, else None.

    It has up to 128 characters without white space, quotes or control characters, so that a log line needs no escapes.
    """
    if candidate is not None and _USABLE.fullmatch(candidate):
        return candidate
    return None
