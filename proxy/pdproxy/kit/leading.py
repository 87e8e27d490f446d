"""Which process does what is to be done once: one that serves alone, or of several the one that
leads.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Lead(Protocol):
    """What those ask who do something only in one process."""

    @property
    def leads(self) -> bool:
        """Whether this process does it."""

    async def turn(self) -> None:
        """Wait until this process does it."""


class _Always:
    leads = True

    async def turn(self) -> None:
        """See `Lead`."""


class _Never:
    leads = False

    async def turn(self) -> None:
        """See `Lead`. It does not return."""
        await asyncio.get_running_loop().create_future()


ALWAYS, NEVER = _Always(), _Never()
"""Of a process that leads as long as it runs, and of one that another process leads."""
