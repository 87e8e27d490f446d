"""Which cores of an engine are stopped, and what they are sent meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol


class Ports(Protocol):
    """The ports of a connector, which a core serves."""

    def freeze(self) -> None:
        """Accept connections and questions, answer none."""

    def thaw(self) -> None:
        """Answer again, also what was asked while frozen."""


class CoreStops:
    """The cores of an engine's data-parallel ranks, which are stopped and go on, as by SIGSTOP and
    SIGCONT.

    What the API server sends to a stopped core waits in its socket. So it does not change the
    core's counters either. `ports`: those of the engine; `own`: those of each rank's core, where
    ranks have their own.
    """

    def __init__(self, ranks: int, ports: Sequence[Ports], own: Sequence[Ports]) -> None:
        self._goes = [asyncio.Event() for _ in range(ranks)]
        self._unread: list[list[Callable[[], None]]] = [[] for _ in range(ranks)]
        self._ports, self._own = ports, own

    def reset(self) -> None:
        """Let the cores of a new run go. What was sent to those of an earlier one is lost."""
        self.thaw(None)

    @property
    def any(self) -> bool:
        """Whether any core is stopped."""
        return not all(goes.is_set() for goes in self._goes)

    def freeze(self, rank: int | None) -> None:
        """Stop the core of a rank, None: all."""
        for number in self._ranks(rank):
            self._goes[number].clear()
        for ports in self._ports_of(rank):
            ports.freeze()

    def thaw(self, rank: int | None) -> list[Callable[[], None]]:
        """Let the core of a rank go on, None: all. Return what it was sent meanwhile, in order."""
        unread: list[Callable[[], None]] = []
        for ports in self._ports_of(rank):
            ports.thaw()
        for number in self._ranks(rank):
            self._goes[number].set()
            unread += self._unread[number]
            self._unread[number] = []
        return unread

    def send(self, rank: int, what: Callable[[], None]) -> bool:
        """Return whether a core does something now; if it is stopped, it is kept."""
        if not self._goes[rank].is_set():
            self._unread[rank].append(what)
            return False
        return True

    async def going(self, rank: int) -> None:
        """Wait until a core is not stopped."""
        await self._goes[rank].wait()

    def _ranks(self, rank: int | None) -> Sequence[int]:
        return range(len(self._goes)) if rank is None else [rank]

    def _ports_of(self, rank: int | None) -> Sequence[Ports]:
        if rank is None or len(self._goes) == 1:
            return self._ports
        return self._own[rank : rank + 1]
