"""The admin API of one of several workers: what it shows is that of all, and all make the changes
that it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import msgspec

from pdproxy.fleet.entries import EngineEntry, PoolEngines
from pdproxy.fleet.member import UnknownMemberError
from pdproxy.fleet.merged_entries import WorkerView, merged, merged_entry, merged_prompts
from pdproxy.kit.text import truncate
from pdproxy.observe import recent
from pdproxy.observe.recent import RecentRequest
from pdproxy.scheduling.decisions import KeptDecisions, page_of
from pdproxy.web.admin.api import AdminApi
from pdproxy.web.admin.changes import Change, ChangeOutcome, is_accepted
from pdproxy.web.admin.errors import NotThereError, UnknownOutcomeError, error_of
from pdproxy.web.admin.service import AdminService
from pdproxy.web.admin.shapes import EngineChanged, EngineList, LevelShown, RequestList
from pdproxy.workers.followed_changes import PATIENCE, AskedChange, FollowedChanges
from pdproxy.workers.siblings import LinkedSiblings

ENGINES, ENGINE, REQUESTS, DECISIONS = "engines", "engine", "requests", "decisions"
"""The questions to the other workers."""


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
_view = msgspec.msgpack.Decoder(WorkerView).decode
_entry = msgspec.msgpack.Decoder(EngineEntry | None).decode
_decisions = msgspec.msgpack.Decoder(KeptDecisions).decode
_requests = msgspec.msgpack.Decoder(_Requests).decode


class AdminApiOfAll(AdminApi):
    """That of worker `number`. `refresh` takes over the loads of the others; `level`: the log level
    of the settings.
    """

    def __init__(
        self,
        service: AdminService,
        number: int,
        siblings: LinkedSiblings,
        changes: FollowedChanges,
        refresh: Callable[[], None],
        level: Callable[[], str],
        now: Callable[[], float],
    ) -> None:
        super().__init__(service)
        self._number = number
        self._siblings = siblings
        self._changes = changes
        self._refresh = refresh
        self._level = level
        self._now = now
        siblings.answers[ENGINES] = self._own_view
        siblings.answers[DECISIONS] = lambda: _encode(service.decisions())
        siblings.answers_about[ENGINE] = self._own_engine
        siblings.answers_about[REQUESTS] = self._own_requests

    # -- engines

    async def engines(self, *, pairs: bool = True, of: PoolEngines | None = None) -> EngineList:
        """See `AdminApi`."""
        answers = await self._siblings.ask_workers(ENGINES)
        self._refresh()
        own = await super().engines(pairs=pairs, of=of)
        views = {number: _view(answer) for number, answer in answers.of.items()}
        found = merged(own.engines, self._number, views, self.service.pools)
        return EngineList(
            [one for one in found if of is None or one.pool == of.name],
            answers.silent,
            merged_prompts(own.prompts, views.values()),
        )

    def _own_view(self) -> bytes:
        self._refresh()
        entries = self.service.entries
        plain = entries.plain()
        rest = [url for pool in entries.pools for url in pool.membership.members]
        return _encode(
            WorkerView(
                plain,
                [entries.entry(url, pairs=False) for url in rest if url not in plain],
                entries.prompts(),
            )
        )

    async def engine(self, name: str) -> EngineEntry:
        """See `AdminApi`."""
        answers = await self._siblings.ask_workers(f"{ENGINE} {name}")
        self._refresh()
        found: dict[int, EngineEntry | None] = {}
        refusal: NotThereError | None = None
        try:
            found[self._number] = self.service.found(name)
        except NotThereError as error:
            refusal = error
        found |= {number: _entry(answer) for number, answer in answers.of.items()}
        there = {number: entry for number, entry in found.items() if entry is not None}
        if there:
            return merged_entry(dict(there))
        if answers.silent:
            silent = _silent(self._siblings.named, answers.silent)
            raise UnknownOutcomeError(
                f"{silent}: it is not known whether {truncate(name)} is there"
            )
        assert refusal is not None
        raise refusal

    def _own_engine(self, name: str) -> bytes:
        self._refresh()
        entries = self.service.entries
        try:
            return _encode(entries.entry(entries.find(name)[1], pairs=False))
        except UnknownMemberError:
            return _encode(None)

    # -- changes

    async def change(self, change: Change) -> tuple[int, EngineChanged | LevelShown]:
        """See `AdminApi`. All workers have made it when this returns, but those that the answer
        names.
        """
        change = self.service.named(change)
        if change.kind == "log_level":
            change = msgspec.structs.replace(change, engine="", instead_of=self._level())
        asked = await self._changes.ask(change)
        return _together(change, self._number, asked, self._siblings.named)

    # -- requests

    async def decisions(self) -> bytes:
        """See `AdminApi`. The scheduler process makes them all. While it does not answer, there are
        none.
        """
        answers = await self._siblings.ask(DECISIONS)
        number = self._siblings.scheduler
        told = None if number is None else answers.of.get(number)
        return page_of(self.service.decisions() if told is None else _decisions(told))

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
        for answer in map(_requests, answers.of.values()):
            running += [one for one in answer.requests if one.ended_s is None]
            ended += [
                (answer.now - one.ended_s, one)
                for one in answer.requests
                if one.ended_s is not None
            ]
        running.sort(key=lambda one: -one.total_s)
        ended.sort(key=lambda item: -item[0])
        found = [*running[: recent.KEPT], *(one for _, one in ended[: recent.KEPT])]
        return RequestList(list(islice(found, limit)), answers.silent)

    def _own_requests(self, text: str) -> bytes:
        wanted = msgspec.json.decode(text, type=_Filter)
        shown = self.service.recent.shown(
            wanted.limit, request_id=wanted.request_id, outcome=wanted.outcome
        )
        return _encode(_Requests(self._now(), shown))


def _together(
    change: Change, own: int, asked: AskedChange, named: Callable[[int], str]
) -> tuple[int, EngineChanged | LevelShown]:
    """Return the answer of all workers. Raises what they have refused it with. `named`: how they
    are called.
    """
    outcomes = asked.outcomes
    if own not in outcomes:
        raise UnknownOutcomeError(
            f"no worker has answered within {PATIENCE:g} s: the change may still be made"
        )
    accepted = {number: one for number, one in outcomes.items() if one.accepted}
    refused = {number: one for number, one in outcomes.items() if not one.accepted}
    if not is_accepted(change.kind, outcomes.values()):
        number, first = _first(own, refused)
        if not accepted:
            return first.answer()
        raise error_of(
            first.status,
            f"{named(number)} refuses it, and no other keeps it: {first.message}",
            first.owner,
        )
    # It may be gone in some of them already, and be new there.
    again = (one for one in accepted.values() if one.result == "serving_again")
    status, found = next(again, _first(own, accepted)[1]).answer()
    if asked.silent and isinstance(found, EngineChanged):
        silent = _silent(named, asked.silent)
        late = f"{silent}, and makes the change when it goes on, or its successor does"
        found = msgspec.structs.replace(found, note=f"{found.note}; {late}")
    return status, found


def _first(own: int, outcomes: dict[int, ChangeOutcome]) -> tuple[int, ChangeOutcome]:
    number = own if own in outcomes else min(outcomes)
    return number, outcomes[number]


def _silent(named: Callable[[int], str], numbers: list[int]) -> str:
    names = ", ".join(map(named, numbers))
    return f"{names} {'has' if len(numbers) == 1 else 'have'} not answered"
