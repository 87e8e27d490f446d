"""What an operator is shown of all workers: `/ready`, `/metrics` and `/load`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from pdproxy.app.readiness import MAX_DETAILS, judged
from pdproxy.app.shown import Shown
from pdproxy.kit.errors import PdproxyError
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.description import MergeRule, counter
from pdproxy.observe.metrics import Metrics
from pdproxy.observe.prompt_shares import PromptShare
from pdproxy.observe.snapshot import Snapshot, decode, encode, merged, of_process, page_of
from pdproxy.serving.request.admission import Admission
from pdproxy.web.operation import OperationState, Readiness
from pdproxy.workers.links import Message
from pdproxy.workers.siblings import LinkedSiblings
from pdproxy.workers.switchboard import REPORT

REPORT_EVERY = 1.0
"""Seconds between two reports of a worker's counts: what a killed one has counted since its last
report is lost.
"""
RESTARTS = counter(
    "pdproxy_worker_restarts_total",
    "starts",
    "How often a worker was started again, because it had ended or was killed",
    workers=MergeRule.MOST,
)


class ShownOfAll(Shown):
    """What one of several workers shows: of all of them. `number`: its own; `everywhere`: the
    requests of all.
    """

    def __init__(
        self,
        admission: Admission,
        readiness: Callable[[], Readiness],
        metrics: Metrics,
        siblings: LinkedSiblings,
        number: int,
        everywhere: Callable[[], int],
    ) -> None:
        super().__init__(admission, readiness, metrics)
        self._siblings = siblings
        self._number = number
        self._everywhere = everywhere
        siblings.answers["metrics"] = lambda: encode(self._told())
        siblings.answers["ready"] = lambda: _encode_ready(self._own_readiness())

    def load(self) -> int:
        """See `Shown`."""
        return self._everywhere()

    async def readiness(self) -> Readiness:
        """See `Shown`. Connections come to all workers: one that is not ready makes the whole
        degraded.
        """
        answers = await self._siblings.ask("ready")
        found = {self._number: self._own_readiness()}
        found |= {number: _decode_ready(answer) for number, answer in answers.of.items()}
        silent = [f"worker {number} does not answer" for number in answers.silent]
        silent += [
            f"worker {number} does not serve: it has ended, or begins" for number in answers.absent
        ]
        if not answers.complete:
            silent.append("the supervisor does not answer")
        return judged(together(found, silent))

    async def metrics(self) -> bytes:
        """See `Shown`. What was counted never decreases: of a worker that does not answer it is
        what it has reported last.

        As in one process, the counts of an engine go with it.

        Raises:
            PdproxyError: the supervisor does not answer.
        """
        answers = await self._siblings.ask("metrics")
        if not answers.complete:
            raise PdproxyError("the supervisor does not answer")
        here = [self._told(), *map(decode, answers.of.values())]
        gone = [
            decode(one).without_gone(here) for one in (*answers.last.values(), answers.past) if one
        ]
        page = merged([*here, *gone])
        page.values[RESTARTS.name] = {(): answers.restarts}
        return page_of(page)

    def start(self, tasks: TaskOwner) -> None:
        """Report the counts to the parent from now on, in a task of this owner."""
        tasks.keep(self._report, "report")

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY)
            self.report()

    def report(self) -> None:
        """Report the counts to the parent."""
        self._told()

    def _told(self) -> Snapshot:
        """Return what is shown, and report it first: a page after the end of this process must not
        show less.
        """
        found = self._snapshot()
        self._siblings.send(Message(REPORT, body=encode(found.without_levels())))
        return found

    def _snapshot(self) -> Snapshot:
        found = self._own_metrics.snapshot()
        found.process = of_process()
        return found


def add_up(past: bytes, report: bytes) -> bytes:
    """Return the counts of dead workers with those of one more."""
    return encode(merged([*([decode(past)] if past else []), decode(report)]))


def together(found: dict[int, Readiness], silent: Sequence[str] = ()) -> Readiness:
    """Return the answer of all workers: ready if all are, not ready if none is, else degraded.

    What only some of them say is shown with their numbers. `silent`: sentences on those that have
    not answered.
    """
    states = [one.state for one in found.values()]
    prompts: dict[str, PromptShare] = {}
    for one in found.values():
        for pool, served in one.prompts.items():
            prompts[pool] = served.combined(prompts.get(pool, PromptShare()))
    reasons = {number: one.reason for number, one in found.items() if one.reason is not None}
    if len(reasons) == len(found):
        reason = next(iter(reasons.values()))
        return Readiness(OperationState.NOT_READY, reason, _details(found), prompts)
    details = [
        *silent,
        *(f"worker {number}: {reason}" for number, reason in reasons.items()),
        *_details(found),
    ]
    is_ok = not silent and all(state is OperationState.OK for state in states)
    state = OperationState.OK if is_ok else OperationState.DEGRADED
    return Readiness(state, None, details[:MAX_DETAILS], prompts)


def _details(found: dict[int, Readiness]) -> list[str]:
    counts = Counter(detail for one in found.values() for detail in dict.fromkeys(one.details))
    shown: dict[str, None] = {}
    for number, one in found.items():
        for detail in one.details:
            shown[detail if counts[detail] == len(found) else f"worker {number}: {detail}"] = None
    return list(shown)


class _Ready(msgspec.Struct, array_like=True):
    state: str
    reason: str | None
    details: list[str]
    prompts: dict[str, PromptShare]


_ready_decoder = msgspec.msgpack.Decoder(_Ready)


def _encode_ready(one: Readiness) -> bytes:
    return msgspec.msgpack.encode(
        _Ready(one.state.value, one.reason, one.details, dict(one.prompts))
    )


def _decode_ready(data: bytes) -> Readiness:
    one = _ready_decoder.decode(data)
    return Readiness(OperationState(one.state), one.reason, one.details, one.prompts)
