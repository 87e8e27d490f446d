"""Texts that clients and engines choose, cut to a length that is acceptable in a log line, an
answer and memory.
"""

from __future__ import annotations

MAX_LENGTH = 300
"""Characters."""


def truncate(value: object, limit: int = MAX_LENGTH) -> str:
    """Return a value as text of at most `limit` characters; if it is longer, its whole length
    follows.
    """
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
