"""The admin API of a proxy with several workers: the scheduler process serves it, as a proxy of one
process does. What workers alone know, it asks them for: their requests, and how prompts were
served.

A change is answered once the supervisor keeps it for the next scheduler process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import msgspec

from pdproxy.fleet.entries import PoolEngines
from pdproxy.observe import recent
from pdproxy.observe.prompt_shares import PoolPrompts
from pdproxy.observe.recent import Recent, RecentRequest
from pdproxy.web.admin.api import AdminApi
from pdproxy.web.admin.changes import Change
from pdproxy.web.admin.errors import UnknownOutcomeError
from pdproxy.web.admin.service import AdminService
from pdproxy.web.admin.shapes import EngineChanged, EngineList, LevelShown, RequestList
from pdproxy.workers.kept import Keeper
from pdproxy.workers.siblings import LinkedSiblings

PROMPTS, REQUESTS = "prompts", "requests"
"""The questions to the workers."""
PATIENCE = 5.0
"""Seconds for the supervisor to keep a change."""


class _Filter(msgspec.Struct, array_like=True, frozen=True):
    limit: int
    request_id: str | None
    outcome: str | None


class _Requests(msgspec.Struct, array_like=True, frozen=True):
    """Requests of a worker, and when it has shown them, in monotonic seconds: the same clock for
    all workers.
    """

    now: float
    requests: list[RecentRequest]


_encode = msgspec.msgpack.Encoder().encode
_prompts = msgspec.msgpack.Decoder(list[PoolPrompts]).decode
_requests = msgspec.msgpack.Decoder(_Requests).decode


def answer(
    siblings: LinkedSiblings,
    requests: Recent,
    prompts: Callable[[], list[PoolPrompts]],
    now: Callable[[], float],
) -> None:
    """Have a worker answer the questions of the scheduler process from now on."""

    def own_requests(text: str) -> bytes:
        wanted = msgspec.json.decode(text, type=_Filter)
        shown = requests.shown(wanted.limit, request_id=wanted.request_id, outcome=wanted.outcome)
        return _encode(_Requests(now(), shown))

    siblings.answers[PROMPTS] = lambda: _encode(prompts())
    siblings.answers_about[REQUESTS] = own_requests


class AdminApiOfAll(AdminApi):
    """That of the scheduler process. `then`: called with each change that was made."""

    def __init__(
        self,
        service: AdminService,
        siblings: LinkedSiblings,
        keeper: Keeper,
        now: Callable[[], float],
        then: Callable[[Change], None],
    ) -> None:
        super().__init__(service)
        self._siblings = siblings
        self._keeper = keeper
        self._now = now
        self._then = then

    async def engines(self, *, pairs: bool = True, of: PoolEngines | None = None) -> EngineList:
        """See `AdminApi`."""
        answers = await self._siblings.ask_workers(PROMPTS)
        own = await super().engines(pairs=pairs, of=of)
        prompts = prompts_of_all(own.prompts, map(_prompts, answers.of.values()))
        return EngineList(own.engines, answers.silent, prompts, own.scaling)

    async def change(self, change: Change) -> tuple[int, EngineChanged | LevelShown]:
        """See `AdminApi`. Workers are told of it in this turn of the event loop."""
        found = self.service.do(change)
        self._then(change)
        if not await self._keeper.all_kept(PATIENCE):
            raise UnknownOutcomeError(
                f"the supervisor has not answered within {PATIENCE:g} s: the change is made, but "
                f"may be lost when the scheduler process ends"
            )
        return found

    async def requests(
        self, limit: int, request_id: str | None, outcome: str | None
    ) -> RequestList:
        """See `AdminApi`."""
        wanted = _Filter(limit, request_id, outcome)
        answers = await self._siblings.ask_workers(
            f"{REQUESTS} {msgspec.json.encode(wanted).decode()}"
        )
        own = self.service.recent.shown(limit, request_id=request_id, outcome=outcome)
        now = self._now()
        running = [one for one in own if one.ended_s is None]
        ended = [(now - one.ended_s, one) for one in own if one.ended_s is not None]
        for told in map(_requests, answers.of.values()):
            running += [one for one in told.requests if one.ended_s is None]
            ended += [
                (told.now - one.ended_s, one) for one in told.requests if one.ended_s is not None
            ]
        running.sort(key=lambda one: -one.total_s)
        ended.sort(key=lambda item: -item[0])
        found = [*running[: recent.KEPT], *(one for _, one in ended[: recent.KEPT])]
        return RequestList(list(islice(found, limit)), answers.silent)


def prompts_of_all(
    own: Sequence[PoolPrompts], of_workers: Iterable[list[PoolPrompts]]
) -> list[PoolPrompts]:
    """Return how the prompts of all processes were served, in the pools that are `own`."""
    found = {one.pool: one.served for one in own}
    for told in of_workers:
        for one in told:
            if one.pool in found:
                found[one.pool] = found[one.pool].combined(one.served)
    return [PoolPrompts(pool, served) for pool, served in found.items()]
