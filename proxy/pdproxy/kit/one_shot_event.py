"""An event that almost nothing waits for. asyncio's has a queue of 600 bytes for its waiters, this
one a future for each.
"""

from __future__ import annotations

import asyncio

import msgspec


class OneShotEvent(msgspec.Struct, eq=False):
    """Set once, and never cleared."""

    _set: bool = False
    _waiters: list[asyncio.Future[None]] | None = None

    def __repr__(self) -> str:
        return f"<OneShotEvent {'set' if self._set else 'not set'}>"

    def set(self) -> None:
        """Wake all waiters. Setting again changes nothing."""
        self._set = True
        for future in self._waiters or ():
            if not future.done():
                future.set_result(None)
        self._waiters = None

    async def wait(self) -> None:
        """Return once it is set."""
        if not self._set:
            future = asyncio.get_running_loop().create_future()
            self._waiters = [*(self._waiters or ()), future]
            await future
