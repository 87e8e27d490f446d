"""An event that is hardly ever awaited: asyncio's makes a queue of 600 bytes for those who wait, this one a future for each."""

from __future__ import annotations

import asyncio


class OneShotEvent:
    """Set once, and never cleared."""

    __slots__ = ("_set", "_waiting")

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[asyncio.Future[None]] | None = None

    def __repr__(self) -> str:
        return f"<OneShotEvent {'set' if self._set else 'not set'}>"

    def set(self) -> None:
        """Wake all who wait. Setting again changes nothing."""
        self._set = True
        for future in self._waiting or ():
            if not future.done():
                future.set_result(None)
        self._waiting = None

    async def wait(self) -> None:
        """Return once it is set."""
        if not self._set:
            future = asyncio.get_running_loop().create_future()
            self._waiting = [*(self._waiting or ()), future]
            await future
