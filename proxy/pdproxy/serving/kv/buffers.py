"""Room in the decode engines' receive buffers: what a prefill engine pushes must have a place before it is asked.

Owns the count of taken slots of each decode engine, and the line of those who wait. A slot is one chunk of KV. LMCache's
receiver makes a sender wait while its buffer is full, and all that the prefill engine has in that step: so the wait is here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import OverloadedError, Wait
from pdproxy.observe.events import DeadlinePassed, Observers

_T = TypeVar("_T")


class BufferSpace:
    """Some slots of one engine's buffer. Given back once; giving back again changes nothing."""

    __slots__ = ("_buffers", "count", "url")

    def __init__(self, buffers: ReceiveBuffers, url: str, count: int) -> None:
        self._buffers: ReceiveBuffers | None = buffers
        self.url = url
        self.count = count

    def give_back(self) -> None:
        """The KV has left the buffer, or will never come."""
        if self._buffers is not None:
            buffers, self._buffers = self._buffers, None
            buffers.given_back(self)


class ReceiveBuffers:
    """The receive buffers of all decode engines: `capacity` in slots by URL, a slot for `unit` tokens.

    Engines that it doesn't name have no bound.
    """

    def __init__(
        self, capacity: Mapping[str, int], unit: int, clock: Clock, observers: Observers, patience: float
    ) -> None:
        self._capacity = dict(capacity)
        self._unit = unit
        self._clock = clock
        self._observers = observers
        self._patience = patience
        self.taken: dict[str, int] = dict.fromkeys(self._capacity, 0)
        self._line = asyncio.Lock()
        self._freed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<ReceiveBuffers {', '.join(f'{url}: {n} of {self._capacity[url]}' for url, n in self.taken.items())}>"

    @property
    def bounded(self) -> bool:
        """Whether any engine's buffer has a bound."""
        return bool(self._capacity)

    def slots(self, tokens: int) -> int:
        """Return how many slots the KV of so many tokens takes."""
        return -(-tokens // self._unit)

    def fits(self, tokens: int) -> bool:
        """Tell whether any buffer is large enough for so many tokens, once it is empty."""
        return self.slots(tokens) <= max(self._capacity.values(), default=0)

    def full(self, count: int) -> tuple[str, ...]:
        """Return the engines that have no room for so many slots."""
        return tuple(url for url, taken in self.taken.items() if taken + count > self._capacity[url])

    def take(self, url: str, count: int) -> BufferSpace:
        """Take slots of an engine's buffer."""
        if url in self.taken:
            self.taken[url] += count
        return BufferSpace(self, url, count)

    def given_back(self, slots: BufferSpace) -> None:
        """Count slots as free. Called by `BufferSpace.give_back` alone."""
        if slots.url in self.taken:
            self.taken[slots.url] -= slots.count
            self._freed.set()

    async def when_room(
        self, count: int, choose: Callable[[tuple[str, ...]], _T | None], possible: Callable[[], bool]
    ) -> _T | None:
        """Return what `choose` chooses besides the engines that it is given as full; wait while it finds nothing but those.

        `possible` tells whether it would choose anything if none were full: else there is nothing to wait for. First come, first
        served: a large prompt is not overtaken by small ones for ever.

        Raises:
            OverloadedError: there was no room in `deadlines.queue`.
        """
        try:
            async with self._clock.within(self._patience), self._line:
                while True:
                    self._freed.clear()
                    full = self.full(count)
                    chosen = choose(full)
                    if chosen is not None or not full or not possible():
                        return chosen
                    await self._freed.wait()
        except TimeoutError:
            self._observers.notify(DeadlinePassed(Wait.QUEUE.value))
            message = f"no decode engine had room for the prompt's KV in {self._patience:g} s"
            raise OverloadedError(message) from None
