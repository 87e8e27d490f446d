"""Words of others, cut to a length that a log line, an answer and memory can bear."""

from __future__ import annotations

MOST = 300
"""Characters."""


def cut(words: object, most: int = MOST) -> str:
    """Return words as a text of so many characters at the most, and say so where some are left out."""
    text = str(words)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
