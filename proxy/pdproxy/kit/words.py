"""Texts that others made, at a bounded length: what a client or an engine says may be of any size, and is kept and logged by us.

Owns the mark that shows where a text was cut.
"""

from __future__ import annotations


def cut(text: str, most: int) -> str:
    """Return a text of at most `most` characters as it is; of a longer one so many, and how long it was."""
    return text if len(text) <= most else f"{text[:most]}...[{len(text)} characters]"
