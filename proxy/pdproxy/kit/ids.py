"""Request identifiers: taken from the client where usable, minted otherwise."""

from __future__ import annotations

import os
import re

_USABLE = re.compile(r"[A-Za-z0-9_.:@/+=-]{1,128}")


def mint() -> str:
    """Return a fresh request id of 32 hex digits."""
    return os.urandom(16).hex()


def usable(candidate: str | None) -> str | None:
    """Return the candidate if it can be an id in headers, logs and engine ids alike, else None.

    Up to 128 characters without white space, quotes or control characters: what a log line can show unescaped.
    """
    if candidate is not None and _USABLE.fullmatch(candidate):
        return candidate
    return None
