"""What the routes of the admin API ask for: of one process here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdproxy.fleet.entries import EngineEntry, PoolEngines
from pdproxy.observe.recent import KEPT
from pdproxy.web.admin.changes import Change
from pdproxy.web.admin.decided import DecisionList, decisions_of
from pdproxy.web.admin.shapes import EngineChanged, EngineList, LevelShown, RequestList

if TYPE_CHECKING:
    from pdproxy.web.admin.service import AdminService


class AdminApi:
    """The admin API of a process that serves alone. `service`: what it does with its engines."""

    def __init__(self, service: AdminService) -> None:
        self.service = service

    async def engines(self, *, pairs: bool = True, of: PoolEngines | None = None) -> EngineList:
        """Return all engines, or those `of` one pool. `pairs`: whether their entries show pairs."""
        entries = self.service.entries
        return EngineList(
            [entry async for entry in entries.all(pairs=pairs, of=of)],
            prompts=entries.prompts() if of is None else [of.prompts()],
            scaling=entries.scaling(of),
        )

    async def engine(self, name: str) -> EngineEntry:
        """Return one engine, by its id or URL.

        Raises:
            NotThereError: there is no such engine.
        """
        return self.service.found(name)

    async def change(self, change: Change) -> tuple[int, EngineChanged | LevelShown]:
        """Do what an operator asks for. Return the status with the answer.

        Raises:
            BadRequestError: it is refused; see `AdminService`.
            UnknownOutcomeError: it may not last.
        """
        return self.service.do(change)

    async def decisions(self) -> DecisionList:
        """Return the last decisions of the placements, with what has become of the requests."""
        last = await self.requests(2 * KEPT, None, None)
        return decisions_of(self.service.decisions(), last.requests, last.silent_workers)

    async def requests(
        self, limit: int, request_id: str | None, outcome: str | None
    ) -> RequestList:
        """Return requests that run and that have ended; see `Recent.shown`."""
        return RequestList(self.service.recent.shown(limit, request_id=request_id, outcome=outcome))
