"""The engine with its moments told: which request it has just queued, and whose KV is on its way.

Owns the link between the engine's requests and the HTTP requests that they came from.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar

from pdproxy.sim.core import Core
from pdproxy.sim.engine import Engine
from pdproxy.sim.facts import Facts
from pdproxy.sim.faults.moments import Moment
from pdproxy.sim.nixl import Pull
from pdproxy.sim.request import EngineOutput, EngineRequest
from pdproxy.sim.storage import Storage

Watcher = Callable[[Moment], object]
watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
"""Told of the moments of the requests that the current task, or one it started, brings to an engine."""


class WatchedEngine(Engine):
    """An engine whose requests' `prefilling` and decode's `handed_over` are told to their watchers."""

    def __init__(self, facts: Facts, *, chance: int | None = None, storage: Storage | None = None) -> None:
        super().__init__(facts, chance=chance, storage=storage)
        self._watchers: dict[str, Watcher] = {}

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Run one request, as the engine does."""
        told = watcher.get()
        if told is not None:
            self._watchers[request.id] = told
            # Called once the queue has the request, and before anything made for it can come out.
            asyncio.get_running_loop().call_soon(told, "prefilling")
        try:
            async with aclosing(super().generate(request)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._watchers.pop(request.id, None)

    async def _pull(self, core: Core, pull: Pull) -> None:
        told = self._watchers.get(pull.request_id)
        if told is not None:
            told("handed_over")
        await super()._pull(core, pull)
