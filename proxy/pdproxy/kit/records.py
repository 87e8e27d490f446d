"""Where a process writes records that outlive it."""

from __future__ import annotations

from typing import Protocol


class Records(Protocol):
    """Records of bytes. `without_space`: how many found none."""

    without_space: int

    def put(self, record: bytes) -> int | None:
        """Write a record, of one byte at least. Return where it is, None if there is no space."""

    def drop(self, at: int) -> None:
        """Forget a record."""
