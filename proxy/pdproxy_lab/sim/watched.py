"""The engine with callbacks for two moments: a request was queued, and the transfer of its KV
begins.

Owns the link between the engine's requests and the HTTP requests that they came from.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar

from pdproxy_lab.sim.connector import PeerCommand
from pdproxy_lab.sim.core import Core
from pdproxy_lab.sim.cpu import Received
from pdproxy_lab.sim.engine import SimEngine
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.faults.moments import Moment
from pdproxy_lab.sim.moriio import Read, Report
from pdproxy_lab.sim.network import Network
from pdproxy_lab.sim.request import EngineOutput, EngineRequest
from pdproxy_lab.sim.storage import Storage

Watcher = Callable[[Moment], object]
watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
"""Called at the moments of requests that the current task, or a task started by it, sends to an
engine.
"""


class WatchedEngine(SimEngine):
    """An engine that calls watchers at its requests' `prefilling` and, for decode,
    `handed_over`.
    """

    def __init__(
        self,
        facts: SimFacts,
        *,
        chance: int | None = None,
        storage: Storage | None = None,
        network: Network | None = None,
    ) -> None:
        super().__init__(facts, chance=chance, storage=storage, network=network)
        self._watchers: dict[str, Watcher] = {}

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Run one request, as the engine does."""
        call = watcher.get()
        if call is not None:
            self._watchers[request.id] = call
            # Called after the queue has the request, and before its first output.
            asyncio.get_running_loop().call_soon(call, "prefilling")
        try:
            async with aclosing(super().generate(request)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._watchers.pop(request.id, None)

    def end_aborted(self, call: Watcher) -> None:
        """End the requests of a watcher with the finish reason "abort"."""
        for request_id, other in list(self._watchers.items()):
            if other == call:
                self.finish_aborted(request_id)

    def _received(self, core: Core, command: Received) -> None:
        self.transferring(command.request_id)
        super()._received(core, command)

    async def _to_peer(self, core: Core, command: PeerCommand) -> None:
        if isinstance(command, Read | Report):
            self.transferring(command.request_id)
        await super()._to_peer(core, command)

    def transferring(self, request_id: str) -> None:
        """Call the watcher of the request whose KV is about to come."""
        call = self._watchers.get(request_id)
        if call is not None:
            call("handed_over")
