"""Receive buffers of decode engines, with several workers: what all of them have taken counts.

Owns this worker's column of the table of taken chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from pdproxy.deciding.buffers import BufferSpace, ReceiveBuffers
from pdproxy.fleet.engine import Engine, ReceiveBuffer
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.clock import Clock
from pdproxy.kit.shared_table import Column, Others, key_of
from pdproxy.observe.events import Observers
from pdproxy.settings.limits import Deadlines

MEASURES = 1
"""Numbers of the table for each engine: the chunks that are taken."""
LOOK_EVERY = 0.01
"""Seconds between two looks at what others have released, while a prompt waits."""


class _SharedSpace(BufferSpace):
    """Space that other workers see. `show`: shows them what is taken."""

    __slots__ = ("_show",)

    def __init__(
        self,
        buffer: ReceiveBuffer | None,
        count: int,
        freed: asyncio.Event,
        show: Callable[[], None],
    ) -> None:
        super().__init__(buffer, count, freed)
        self._show = show
        show()

    def release(self) -> None:
        """See `BufferSpace`."""
        super().release()
        self._show()


class WorkerReceiveBuffers(ReceiveBuffers):
    """The receive buffers of one of several workers. Two that take the last space at the same
    moment may take too much.
    """

    def __init__(
        self,
        engines: EngineRegistry,
        unit: int,
        clock: Clock,
        observers: Observers,
        deadlines: Deadlines,
        column: Column,
        others: Others,
    ) -> None:
        self._column = column
        self._others = others
        super().__init__(engines, unit, clock, observers, deadlines)

    def removed(self, engine: Engine) -> None:
        """See `ReceiveBuffers`."""
        super().removed(engine)
        self._column.drop(key_of(engine.url))

    def full(self, count: int) -> tuple[str, ...]:
        """Return the engines that have no space for so many chunks."""
        return tuple(
            url
            for url, buffer in self._buffers()
            if buffer.taken + self._others.sums(key_of(url))[0] + count > buffer.capacity
        )

    def take(self, url: str, count: int) -> BufferSpace:
        """Take chunks of an engine's buffer."""
        engine = self._engines.known.get(url)
        buffer = None if engine is None else engine.buffer
        return _SharedSpace(buffer, count, self._freed, lambda: self._show(url))

    def _show(self, url: str) -> None:
        engine = self._engines.get(url)
        if engine is not None and engine.buffer is not None:
            self._column.write(key_of(url), (engine.buffer.taken,))

    async def _until_freed(self) -> None:
        """Wait until there may be more space: nobody tells this worker when another one releases
        some.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_EVERY):
                await self._freed.wait()
