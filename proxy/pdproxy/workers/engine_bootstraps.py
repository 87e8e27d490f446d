"""Bootstrap servers with several workers: the scheduler process asks them, and all know what they
answer.

The prompts that any worker has given up while decode engines wait for their KV count together: they
keep the same few threads of a prefill engine busy. A new scheduler process hears from workers what
servers have answered, so that it has pairs before it has asked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import msgspec

from pdproxy.fleet.bootstrap import MAX_GIVEN_UP, Bootstraps, Known
from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import Event, Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.settings.health import Probes
from pdproxy.transfer.contract import Contract
from pdproxy.wire.bootstrap import RankAddresses, Ranks
from pdproxy.workers.scheduler_clients import SchedulerClient
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks
from pdproxy.workers.telling import Telling

AT_ONCE = 64
"""Engines of which one message tells."""


class Answer(msgspec.Struct, array_like=True):
    """What is known of one run of an engine: what its server has answered last, or why it can't be
    used. `started`: when that run began, as the engine reports it.

    `stale`: decode engines that keep addresses which are no longer right, with their start times.
    `given_up`: when prompts were given up, in monotonic seconds.
    """

    url: str
    started: float
    ranks: dict[int, RankAddresses] | None
    trouble: str | None
    stale: list[tuple[str, float]]
    given_up: list[float]


class Said(msgspec.Struct, array_like=True):
    """What a worker says. `holds`: what it was told, for a new scheduler process; `stuck`: engines
    that have given up a prompt.
    """

    holds: list[Answer] = []
    stuck: list[str] = []


encode = msgspec.msgpack.Encoder().encode
decode_told = msgspec.msgpack.Decoder(list[Answer]).decode
decode_said = msgspec.msgpack.Decoder(Said).decode


class _SharedBootstraps(Bootstraps):
    """Bootstraps that take answers which this process has not got from the server itself."""

    def _started(self, engine: Engine) -> float | None:
        """Return when an engine's run began, None if the engine is not up."""
        known = engine.in_ledger
        return known.evidence.started if known.up and known.evidence is not None else None

    def _take(self, engine: Engine, known: Known, answer: Answer) -> None:
        for url, started in answer.stale:
            other = self._engines.get(url)
            if other is not None and self._started(other) == started:
                known.stale.add(other.in_ledger.run_number)
        known.given_up.clear()
        known.given_up.extend(answer.given_up[-MAX_GIVEN_UP:])
        if answer.ranks is not None:
            super()._answered(engine, known, answer.ranks)
        if answer.trouble is not None:
            super()._failed(engine, known, answer.trouble)


class AskingBootstraps(_SharedBootstraps):
    """The `Bootstraps` of the scheduler process: it tells workers what servers answer."""

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
        *,
        links: SchedulerLinks,
        topic: str,
    ) -> None:
        super().__init__(engines, ledger, query, observers, tasks, probes, now, contract)
        self._ranks: dict[Engine, Ranks] = {}
        """What servers have answered last."""
        self._telling = Telling(links, topic, engines, self._told, AT_ONCE)
        links.hears[topic] = self._heard

    def removed(self, engine: Engine) -> None:
        """See `Bootstraps`."""
        super().removed(engine)
        self._ranks.pop(engine, None)

    def _answered(self, engine: Engine, known: Known, ranks: Ranks) -> str | None:
        self._ranks[engine] = ranks
        self._telling.post(engine.url)
        return super()._answered(engine, known, ranks)

    def _failed(self, engine: Engine, known: Known, why: str) -> None:
        super()._failed(engine, known, why)
        self._telling.post(engine.url)

    def _stuck(self, engine: Engine) -> None:
        super()._stuck(engine)
        self._telling.post(engine.url)

    def _told(self, urls: Iterable[str]) -> bytes:
        told = [self._answer(engine) for url in urls if (engine := self._engines.get(url))]
        return encode([answer for answer in told if answer is not None])

    def _answer(self, engine: Engine) -> Answer | None:
        known, started = self._known.get(engine), self._started(engine)
        if known is None or started is None:
            return None
        is_of_run = known.run == engine.in_ledger.run_number
        ranks = self._ranks.get(engine) if is_of_run else None
        runs = {other.in_ledger.run_number: other for other in self._engines.values()}
        stale = [
            (runs[run].url, since)
            for run in sorted(known.stale)
            if run in runs and (since := self._started(runs[run])) is not None
        ]
        told = None if ranks is None else dict(ranks)
        return Answer(engine.url, started, told, known.trouble, stale, [*known.given_up])

    def _heard(self, _: SchedulerClient, body: bytes) -> None:
        said: Said = decode_said(body)
        for answer in said.holds:
            engine = self._engines.get(answer.url)
            known = None if engine is None else self._known.get(engine)
            if engine is None or known is None or self._started(engine) != answer.started:
                continue
            if known.run != engine.in_ledger.run_number and answer.ranks is not None:
                self._ranks[engine] = answer.ranks
                self._take(engine, known, answer)
                self._telling.post(engine.url)
        for url in said.stuck:
            if (engine := self._engines.get(url)) is not None:
                self._stuck(engine)


class ToldBootstraps(_SharedBootstraps):
    """The `Bootstraps` of a worker: it asks no server."""

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
        *,
        link: SchedulerLink,
        topic: str,
    ) -> None:
        super().__init__(engines, ledger, query, observers, tasks, probes, now, contract)
        self._link = link
        self._topic = topic
        self._told: dict[str, Answer] = {}
        link.hears[topic] = self._hear
        link.holds[topic] = self._holds

    def removed(self, engine: Engine) -> None:
        """See `Bootstraps`."""
        super().removed(engine)
        if engine.url != self._engines.replaced:
            self._told.pop(engine.url, None)

    def notify(self, event: Event) -> None:
        """See `Bootstraps`. What was told before the engine was up here counts, too."""
        super().notify(event)
        engine = self._engines.get(getattr(event, "node", ""))
        if engine is None or (known := self._known.get(engine)) is None:
            return
        answer = self._told.get(engine.url)
        # without a start time it may be of the run before
        if answer is not None and (answer.started or known.run is None):
            self._follow(engine, known, answer)

    def _keep_asking(self, engine: Engine) -> None:
        """The scheduler process asks."""

    def _stuck(self, engine: Engine) -> None:
        super()._stuck(engine)
        self._link.say(self._topic, encode(Said(stuck=[engine.url])))

    def _hear(self, body: bytes) -> None:
        for answer in decode_told(body):
            self._told[answer.url] = answer
            engine = self._engines.get(answer.url)
            if engine is not None and (known := self._known.get(engine)) is not None:
                self._follow(engine, known, answer)

    def _follow(self, engine: Engine, known: Known, answer: Answer) -> None:
        if self._started(engine) == answer.started:
            self._take(engine, known, answer)

    def _holds(self) -> bytes | None:
        return encode(Said(holds=[*self._told.values()])) if self._told else None
