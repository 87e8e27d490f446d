"""What an operator is shown of all workers: `/ready`, `/metrics`, `/load` and `/drained`."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import msgspec

from pdproxy.app.gauges import WORKERS
from pdproxy.app.readiness import MAX_DETAILS, judged
from pdproxy.app.shown import Shown
from pdproxy.kit.errors import PdproxyError
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.description import MergeRule, counter, described, gauge
from pdproxy.observe.metrics import Metrics
from pdproxy.observe.page import in_turns
from pdproxy.observe.prompt_shares import PromptShare
from pdproxy.observe.snapshot import (
    Merging,
    OfProcess,
    Snapshot,
    decode,
    encode,
    families,
    merged,
    of_process,
)
from pdproxy.scheduling.admission import Admission
from pdproxy.web.operation import EngineWork, OperationState, Readiness
from pdproxy.workers.links import Message
from pdproxy.workers.siblings import SCHEDULER as SCHEDULER_NAME
from pdproxy.workers.siblings import LinkedSiblings
from pdproxy.workers.switchboard import REPORT

_SECONDS = re.compile(r"\b[0-9]+(\.[0-9]+)? s\b")
REPORT_EVERY = 1.0
"""Seconds between two reports of a worker's counts: what a killed one has counted since its last
report is lost.
"""
LOAD = "load"
"""The question for the requests that a process serves, or has waiting."""
WORK_AT = "work_at"
"""The question for what a process has at an engine. Behind this word is the engine's `host:port`.
"""
RESTARTS = counter(
    "pdproxy_worker_restarts_total",
    "starts",
    "How often a worker was started again, because it had ended or was killed",
    workers=MergeRule.MOST,
)
SCHEDULER_RESTARTS = counter(
    "pdproxy_scheduler_restarts_total",
    "starts",
    "How often the scheduler process of several workers was started again, because it had ended or "
    "was killed",
    workers=MergeRule.MOST,
)
SCHEDULER = gauge(
    "pdproxy_scheduler",
    "processes",
    "Scheduler processes whose numbers are on this page, 1 with several workers. 0: it is being "
    "started, or does not answer",
    workers=MergeRule.SUM,
)


class ShownOfAll(Shown):
    """What one of several workers shows: of all of them. `number`: its own."""

    def __init__(
        self,
        admission: Admission,
        readiness: Callable[[], Readiness],
        metrics: Metrics,
        work_at: Callable[[str], EngineWork],
        siblings: LinkedSiblings,
        number: int,
    ) -> None:
        super().__init__(admission, readiness, metrics, work_at)
        self._siblings = siblings
        self._number = number
        self._process: list[OfProcess] = []
        """As read last: no report is older than one before."""
        self._is_scheduler = number == siblings.scheduler
        siblings.answers_in_turns["metrics"] = self._answer
        siblings.answers[LOAD] = lambda: str(admission.inflight + admission.waiting).encode()
        siblings.answers_about[WORK_AT] = lambda place: msgspec.msgpack.encode(work_at(place))
        siblings.answers["ready"] = lambda: _encode_ready(self._own_readiness())

    async def load(self) -> int:
        """See `Shown`. The scheduler process has the requests of all."""
        if self._is_scheduler:
            return await super().load()
        answers = await self._siblings.ask(LOAD)
        scheduler = self._siblings.scheduler
        return int(answers.of[scheduler]) if scheduler in answers.of else await super().load()

    async def readiness(self) -> Readiness:
        """See `Shown`. Connections come to all workers: one that is not ready makes the whole
        degraded.
        """
        answers = await self._siblings.ask("ready")
        found = {self._number: self._own_readiness()}
        found |= {number: _decode_ready(answer) for number, answer in answers.of.items()}
        named = self._siblings.named
        silent = [f"{named(number)} does not answer" for number in answers.silent]
        silent += [
            f"{named(number)} does not serve: it has ended, or begins" for number in answers.absent
        ]
        if not answers.complete:
            silent.append("the supervisor does not answer")
        return judged(together(found, silent, self._siblings.scheduler))

    async def work_at(self, place: str) -> EngineWork:
        """See `Shown`. The scheduler process has the requests of all, and each worker its handles.

        Others are asked only about an engine that this process knows: what anybody names costs
        nothing. An engine that is drained is drained for all: see `workers.members`. One that was
        removed at once is known to those alone that have requests there.
        """
        own = self._own_work_at(place)
        if own.reason is None:
            return own
        answers = await self._siblings.ask(f"{WORK_AT} {place}")
        found = {self._number: own}
        found |= {number: _decode_work(answer) for number, answer in answers.of.items()}
        of_all = own if (number := self._siblings.scheduler) is None else found.get(number, own)
        handles = sum(one.handles for one in found.values())
        return EngineWork(own.reason, of_all.requests, handles)

    async def snapshot(self) -> Snapshot:
        """See `Shown`. What was counted never decreases: of a worker that does not answer it is
        what it has reported last.

        As in one process, the counts of an engine go with it.

        Raises:
            PdproxyError: the supervisor does not answer.
        """
        answers = await self._siblings.ask("metrics")
        if not answers.complete:
            raise PdproxyError("the supervisor does not answer")
        found = Merging()
        found.add(await self._told())
        steps = [(one, found.add) for one in answers.of.values()]
        steps += [(one, found.add_gone) for one in (*answers.last.values(), answers.past) if one]
        for one, add in steps:
            await asyncio.sleep(0)
            told = decode(one)
            await asyncio.sleep(0)
            add(told)
        await asyncio.sleep(0)
        page = found.whole()
        page.values[SCHEDULER.name] = page.values.get(SCHEDULER.name) or {(): 0}
        page.values[RESTARTS.name] = {(): answers.restarts}
        page.values[SCHEDULER_RESTARTS.name] = {(): answers.scheduler_restarts}
        return page

    async def metrics(self) -> bytes:
        """See `Shown`. Raises what `snapshot` raises."""
        return await in_turns(families(await self.snapshot()))

    def start(self, tasks: TaskOwner) -> None:
        """Report the counts to the parent from now on, in a task of this owner."""
        tasks.keep(self._report, "report")

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY)
            await self._counted_in_turns()

    def report(self) -> None:
        """Report the counts to the parent, all of this moment."""
        self._process = of_process()
        self._counted()

    async def _counted_in_turns(self) -> Snapshot:
        """Do as `_counted`. The process's own numbers are those of the turn before: the number of
        its open files takes a millisecond to find.
        """
        self._process = of_process()
        await asyncio.sleep(0)
        return self._counted()

    def _counted(self) -> Snapshot:
        """Return what is counted, and report it first: a page after the end of this process must
        not show less. No gauge is read: those of many engines take some milliseconds.
        """
        found = self._own_metrics.counts()
        found.process = self._process
        self._siblings.send(Message(REPORT, body=encode(found.without_levels())))
        return found

    async def _told(self) -> Snapshot:
        """Return what is shown: the counts as reported, then the gauges, in portions."""
        found = await self._counted_in_turns()
        await asyncio.sleep(0)
        found.values.update(await self._own_metrics.gauges_in_turns())
        return of_scheduler(found) if self._is_scheduler else found

    async def _answer(self) -> bytes:
        return encode(await self._told())


def add_up(past: bytes, report: bytes, present: Collection[bytes]) -> bytes:
    """Return the counts of dead workers with those of one more, without engines that neither its
    report has nor those of the workers that live: they were removed.
    """
    last = decode(report)
    if not past:
        return encode(merged([last]))
    left = decode(past)
    if present:  # else nobody says which engines there are
        left = left.without_gone([last, *map(decode, present)])
    return encode(merged([left, last]))


def of_scheduler(found: Snapshot) -> Snapshot:
    """Return what the scheduler process shows: what it has done, and no part of the workers."""
    values = {
        name: series
        for name, series in found.values.items()
        if (one := described(name)) is None or one.workers is not MergeRule.MEAN
    }
    values.pop(WORKERS.name, None)
    values[SCHEDULER.name] = {(): 1}
    return msgspec.structs.replace(found, values=values, workers=0)


def together(
    found: dict[int, Readiness], silent: Sequence[str] = (), scheduler: int | None = None
) -> Readiness:
    """Return the answer of all workers: ready if all are, not ready if none is, else degraded.

    What only some workers say is shown with their numbers; the scheduler process speaks of what
    all have. `silent`: sentences on those that have not answered. `scheduler`: the number of the
    scheduler process, which can't make the whole not ready: workers serve without it.
    """
    workers = {number: one for number, one in found.items() if number != scheduler}
    states = [one.state for one in found.values()]
    prompts: dict[str, PromptShare] = {}
    for one in found.values():
        for pool, served in one.prompts.items():
            prompts[pool] = served.combined(prompts.get(pool, PromptShare()))
    details = _details(found, workers)
    reasons = {number: one.reason for number, one in found.items() if one.reason is not None}
    if reasons.keys() >= workers.keys():
        reason = reasons[next(iter(workers))]
        return Readiness(OperationState.NOT_READY, reason, details, prompts)
    details = [
        *silent,
        *(f"{_name(number, workers)}: {reason}" for number, reason in reasons.items()),
        *details,
    ]
    is_ok = not silent and all(state is OperationState.OK for state in states)
    state = OperationState.OK if is_ok else OperationState.DEGRADED
    return Readiness(state, None, details[:MAX_DETAILS], prompts)


def _details(found: dict[int, Readiness], workers: dict[int, Readiness]) -> list[str]:
    counts = Counter(same for one in workers.values() for same in set(map(_same, one.details)))
    shown: dict[str, str] = {}
    for number, one in found.items():
        for detail in one.details:
            is_of_all = counts[_same(detail)] == len(workers) or number not in workers
            text = detail if is_of_all else f"worker {number}: {detail}"
            shown.setdefault(_same(text), text)
    return list(shown.values())


def _same(detail: str) -> str:
    """Return what of a detail is the same at all workers: time passes between their answers."""
    return _SECONDS.sub("s", detail)


def _name(number: int, workers: Collection[int]) -> str:
    return f"worker {number}" if number in workers else SCHEDULER_NAME


class _Ready(msgspec.Struct, array_like=True):
    state: str
    reason: str | None
    details: list[str]
    prompts: dict[str, PromptShare]


_ready_decoder = msgspec.msgpack.Decoder(_Ready)
_decode_work = msgspec.msgpack.Decoder(EngineWork).decode


def _encode_ready(one: Readiness) -> bytes:
    return msgspec.msgpack.encode(
        _Ready(one.state.value, one.reason, one.details, dict(one.prompts))
    )


def _decode_ready(data: bytes) -> Readiness:
    one = _ready_decoder.decode(data)
    return Readiness(OperationState(one.state), one.reason, one.details, one.prompts)
