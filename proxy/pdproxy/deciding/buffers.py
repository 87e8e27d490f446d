"""Space in the decode engines' receive buffers: a prefill engine is asked only once there is space
for the KV that it will push.

Owns the count of taken chunks in each `Engine.buffer`, and the queue of prompts that wait for
space. They wait here and not at the engines, because a full buffer stops the sender with everything
else that the prefill engine has in that step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from pdproxy.fleet.engine import Engine, ReceiveBuffer
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import OverloadedError, RefusalReason, Wait
from pdproxy.observe.description import NODE, MergeRule, gauge
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.settings.limits import Deadlines

_T = TypeVar("_T")
KV_BUFFER_SLOTS = gauge(
    "pdproxy_kv_buffer_slots",
    "chunks",
    "Chunks of KV that may be in a decode engine's receive buffer",
    NODE,
    workers=MergeRule.SUM,
)


class BufferSpace:
    """Some chunks of one engine's buffer. Released once; releasing again changes nothing."""

    __slots__ = ("_buffer", "_freed", "count")

    def __init__(self, buffer: ReceiveBuffer | None, count: int, freed: asyncio.Event) -> None:
        self._buffer = buffer
        self._freed = freed
        self.count = count
        if buffer is not None:
            buffer.taken += count

    def release(self) -> None:
        """Release the chunks: the KV has left the buffer, or will never come."""
        if self._buffer is not None:
            self._buffer.taken -= self.count
            self._buffer = None
            self._freed.set()


class ReceiveBuffers:
    """The receive buffers of all engines, in chunks of `unit` tokens. Engines without
    `Engine.buffer` have no bound.

    `deadlines` bound a wait for space.
    """

    def __init__(
        self,
        engines: EngineRegistry,
        unit: int,
        clock: Clock,
        observers: Observers,
        deadlines: Deadlines,
    ) -> None:
        self._engines = engines
        self._unit = unit
        self._clock = clock
        self._observers = observers
        self._deadlines = deadlines
        self._queue = asyncio.Lock()
        self._freed = asyncio.Event()
        self.bounded = False
        """Whether any engine's buffer has a bound."""
        self._count_bounded()
        engines.watch(self)
        observers.show(
            KV_BUFFER_SLOTS, lambda: [((url,), taken) for url, taken in self.taken.items()]
        )

    def __repr__(self) -> str:
        buffers = (f"{url}: {buffer.taken} of {buffer.capacity}" for url, buffer in self._buffers())
        return f"<ReceiveBuffers {', '.join(buffers)}>"

    def added(self, engine: Engine) -> None:
        """Add an engine. Its buffer may have space for a prompt that waits."""
        self._count_bounded()

    def removed(self, engine: Engine) -> None:
        """Remove an engine: nothing waits for its buffer any more."""
        self._count_bounded()

    def _count_bounded(self) -> None:
        self.bounded = bool(self._buffers())
        self._freed.set()

    def _buffers(self) -> list[tuple[str, ReceiveBuffer]]:
        return [
            (url, engine.buffer)
            for url, engine in self._engines.items()
            if engine.buffer is not None
        ]

    @property
    def taken(self) -> dict[str, int]:
        """Taken chunks by the engine's URL."""
        return {url: buffer.taken for url, buffer in self._buffers()}

    def chunks(self, tokens: int) -> int:
        """Return how many chunks the KV of so many tokens takes."""
        return -(-tokens // self._unit)

    def fits(self, tokens: int) -> bool:
        """Return whether any buffer is large enough for so many tokens, once it is empty."""
        return self.chunks(tokens) <= max(
            (buffer.capacity for _, buffer in self._buffers()), default=0
        )

    def full(self, count: int) -> tuple[str, ...]:
        """Return the engines that have no space for so many chunks."""
        return tuple(
            url for url, buffer in self._buffers() if buffer.taken + count > buffer.capacity
        )

    def take(self, url: str, count: int) -> BufferSpace:
        """Take chunks of an engine's buffer."""
        engine = self._engines.known.get(url)
        return BufferSpace(engine.buffer if engine is not None else None, count, self._freed)

    async def wait_for_space(
        self,
        count: int,
        choose: Callable[[tuple[str, ...]], _T | None],
        possible: Callable[[], bool],
    ) -> _T | None:
        """Return what `choose` returns. Wait as long as that is None only because engines have no
        space.

        `choose` is called with the URLs of the engines without space. `possible` returns whether it
        would find engines if none were full: otherwise there is nothing to wait for. Prompts are
        served in their order, so that small ones can't overtake a large one without end.

        Raises:
            OverloadedError: there was no space in time.
        """
        try:
            with self._clock.within(self._deadlines.queue):
                async with self._queue:
                    while True:
                        self._freed.clear()
                        full = self.full(count)
                        chosen = choose(full)
                        if chosen is not None or not full or not possible():
                            return chosen
                        await self._freed.wait()
        except TimeoutError:
            self._observers.notify(DeadlinePassed(Wait.QUEUE.value))
            message = (
                f"no decode engine had space for the prompt's KV in {self._deadlines.queue:g} s"
            )
            raise OverloadedError(message, RefusalReason.CAPACITY) from None
