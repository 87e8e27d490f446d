"""A number with what it is a number of, in the singular or in the plural."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return both, such as `1 request` and `2 requests`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
