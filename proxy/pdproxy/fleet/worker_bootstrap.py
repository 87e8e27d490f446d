"""Bootstrap servers with several workers: one asks them, and all learn what they answer.

The prompts that any worker has given up while decode engines wait for their KV count together: they
keep the same few threads of a prefill engine busy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from pdproxy.fleet.bootstrap import MAX_GIVEN_UP, Bootstraps, Known
from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.worker_answers import WorkerAnswers
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.settings.health import Probes
from pdproxy.transfer.contract import Contract
from pdproxy.wire.bootstrap import RankAddresses, Ranks


class _Answer(msgspec.Struct, array_like=True):
    """What is known of one run of an engine: what its server has answered last, or why it can't be
    used.

    `stale`: decode engines that keep addresses which are no longer right, with their start times.
    `given_up`: when prompts were given up, in monotonic seconds.
    """

    ranks: dict[int, RankAddresses] | None
    trouble: str | None
    stale: list[tuple[str, float]]
    given_up: list[float]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Answer).decode


class WorkerBootstraps(Bootstraps):
    """The `Bootstraps` of one of several workers. `shared`: what servers have answered to the one
    that leads.
    """

    def __init__(
        self,
        engines: EngineRegistry,
        ledger: Ledger,
        query: Callable[[str], Awaitable[Ranks]],
        observers: Observers,
        tasks: TaskOwner,
        probes: Probes,
        now: Callable[[], float],
        contract: Contract,
        shared: WorkerAnswers,
    ) -> None:
        super().__init__(engines, ledger, query, observers, tasks, probes, now, contract)
        self._shared = shared
        self.lead = shared.lead
        shared.taken = self._taken
        shared.noted = lambda engine, note: super(WorkerBootstraps, self)._stuck(engine)
        shared.lacking = self._lacking

    def _lacking(self) -> list[str]:
        return [
            engine.url
            for engine, known in self._known.items()
            if engine.in_ledger.up and known.run != engine.in_ledger.run_number
        ]

    def _stuck(self, engine: Engine) -> None:
        super()._stuck(engine)
        self._shared.note(engine, b"")

    def _answered(self, engine: Engine, known: Known, ranks: Ranks) -> str | None:
        why = super()._answered(engine, known, ranks)
        self._tell(engine, known, ranks)
        return why

    def _failed(self, engine: Engine, known: Known, why: str) -> None:
        super()._failed(engine, known, why)
        if known.run != engine.in_ledger.run_number:  # else the ids are known: the others keep them
            self._tell(engine, known, None)

    def _tell(self, engine: Engine, known: Known, ranks: Ranks | None) -> None:
        started = {
            other.in_ledger.run_number: (other.url, other.in_ledger.evidence.started)
            for other in self._engines.values()
            if other.in_ledger.evidence is not None
        }
        stale = [started[run] for run in sorted(known.stale) if run in started]
        told = None if ranks is None else dict(ranks)
        self._shared.tell(engine, _encode(_Answer(told, known.trouble, stale, [*known.given_up])))

    def _taken(self, engine: Engine) -> None:
        """Another worker has asked a server."""
        known, body = self._known.get(engine), self._shared.of(engine)
        if known is None or body is None or not engine.in_ledger.up:
            return
        answer = _decode(body)
        for url, started in answer.stale:
            other = self._engines.get(url)
            if (
                other is not None
                and other.in_ledger.evidence is not None
                and other.in_ledger.evidence.started == started
            ):
                known.stale.add(other.in_ledger.run_number)
        if len(answer.given_up) > len(known.given_up):
            known.given_up.clear()
            known.given_up.extend(answer.given_up[-MAX_GIVEN_UP:])
        if answer.ranks is not None:
            super()._answered(engine, known, answer.ranks)
        if answer.trouble is not None:
            super()._failed(engine, known, answer.trouble)
