"""Canaries of tokenizers with several workers: the scheduler process asks the engines and publishes
their answers, and each process judges these by its own tokenizer.

What a request has shown of an engine's ids in one worker ends tokenizing for that engine's model in
all: the worker says it, and nothing undoes it in this run of the engine.
"""

from __future__ import annotations

import msgspec

from pdproxy.fleet.canary import Canaries, CanaryAnswers, ModelAnswers, Refuted
from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.workers.calls import told
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks

MAX_TOLD = 1 << 18
"""Bytes of what an engine answers that workers are sent: five times what vLLM answers."""


class Known(msgspec.Struct, array_like=True):
    """What is known of one run of an engine. `started`: when that run began, as the engine reports
    it. `answers`: None where a worker says it.
    """

    started: float
    answers: CanaryAnswers | None
    refuted: list[Refuted]

    def add(self, refuted: Refuted) -> bool:
        """Add what a request has shown. Return whether it is new."""
        is_new = all(
            (one.model, one.route) != (refuted.model, refuted.route) for one in self.refuted
        )
        if is_new:
            self.refuted.append(refuted)
        return is_new


_encode = msgspec.msgpack.Encoder().encode
_TOPIC = "canaries"
"""Behind this word, the topic of the canaries of a pool has the pool's number."""


class _Shared:
    """Shares canaries, `own`. Owns what is known of engines' runs: `known`, by URLs. A watcher of
    engines.
    """

    def __init__(self, own: Canaries, engines: EngineRegistry, known: dict[str, Known]) -> None:
        self.known = known
        self._own = own
        self._engines = engines
        self._numbers: dict[str, int] = {}
        """The numbers of the runs of which that is, where they were known then."""
        own.when_judged = self._distrust
        engines.watch(self)

    def _of(self, engine: Engine) -> Known | None:
        """Return what is known of an engine's present run, None if nothing is."""
        url, run, evidence = engine.url, engine.in_ledger.run_number, engine.in_ledger.evidence
        known = self.known.get(url)
        if known is None or evidence is None or known.started != evidence.started:
            return None
        return known if self._numbers.get(url, run) == run else None

    def _keep(self, url: str, known: Known) -> None:
        """Keep what is known of the present run of an engine, or of one that begins soon."""
        self.known[url] = known
        self._numbers.pop(url, None)
        engine = self._engines.get(url)
        if engine is not None and self._of(engine) is not None:
            self._numbers[url] = engine.in_ledger.run_number

    def _distrust(self, engine: Engine) -> None:
        """Distrust what was refuted."""
        if (known := self._of(engine)) is not None:
            for one in known.refuted:
                self._own.distrust(engine, one)

    def added(self, engine: Engine) -> None:
        """Do nothing: what is known counts once the engine is up."""

    def removed(self, engine: Engine) -> None:
        """Forget an engine, unless only its settings change."""
        if engine.url != self._engines.replaced:
            self._forget(engine.url)

    def _forget(self, url: str) -> None:
        """Forget an engine."""
        self.known.pop(url, None)
        self._numbers.pop(url, None)


class CanariesForWorkers(_Shared):
    """Tells workers what engines answer to the canaries of the scheduler process, in the pool with
    number `pool`.
    """

    def __init__(
        self, links: SchedulerLinks, pool: int, own: Canaries, engines: EngineRegistry
    ) -> None:
        super().__init__(own, engines, {})
        self._topic = links.publisher.topic(f"{_TOPIC} {pool}", self._told, engines.keys)
        self._topic.restore_by(Known, self._restore)
        own.answers = self._answers
        own.when_refuted = self._refuted
        links.serve(CanariesForWorkers, self, pool)

    def __repr__(self) -> str:
        return f"<CanariesForWorkers {self._own!r}>"

    def _forget(self, url: str) -> None:
        super()._forget(url)
        self._topic.gone(url)

    def _told(self, url: str) -> Known | None:
        engine = self._engines.get(url)
        known = None if engine is None else self._of(engine)
        return None if known is None or known.answers is None else known

    async def _answers(self, engine: Engine) -> CanaryAnswers | None:
        answers = await self._own.ask(engine)
        evidence = engine.in_ledger.evidence
        if evidence is not None:
            known = self._of_run(engine, evidence.started)
            before = known.answers or CanaryAnswers([])
            known.answers = CanaryAnswers(answers.cards, answers.models or before.models)
            if len(_encode(known)) > MAX_TOLD:
                known.answers = _untold(known.answers)
            self._topic.changed(engine.url)
        return answers

    def _of_run(self, engine: Engine, started: float) -> Known:
        known = self._of(engine)
        if known is None:
            known = Known(started, None, [])
            self._keep(engine.url, known)
        return known

    def _refuted(self, engine: Engine, refuted: Refuted) -> None:
        evidence = engine.in_ledger.evidence
        if evidence is not None and self._of_run(engine, evidence.started).add(refuted):
            self._topic.changed(engine.url)

    def _restore(self, url: str, said: Known) -> None:
        for one in said.refuted:
            self.shown(url, said.started, one)

    @told
    def shown(self, url: str, started: float, refuted: Refuted) -> None:
        """Take what a request of a worker has shown of one run of an engine."""
        engine = self._engines.get(url)
        evidence = None if engine is None else engine.in_ledger.evidence
        if engine is not None and evidence is not None and evidence.started == started:
            self._refuted(engine, refuted)  # else it has started again
            self._distrust(engine)


class CanariesOfWorker(_Shared):
    """Has the canaries of a worker judge what it is told: it asks no engine."""

    def __init__(
        self, link: SchedulerLink, pool: int, own: Canaries, engines: EngineRegistry
    ) -> None:
        self._link = link
        self._pool = pool
        topic = f"{_TOPIC} {pool}"
        followed = link.subscriber.subscribe(topic, Known, self._take, self._forget)
        followed.retained = self._said
        super().__init__(own, engines, followed.values)
        own.answers = self._answers
        own.when_refuted = self._refuted
        own.announces = False

    def __repr__(self) -> str:
        return f"<CanariesOfWorker {self._own!r}>"

    async def _answers(self, engine: Engine) -> CanaryAnswers | None:
        known, evidence = self._of(engine), engine.in_ledger.evidence
        if known is None or known.answers is None or evidence is None:
            return None
        names = {card.id for card in known.answers.cards}
        if engine.run.judgements is not None and not evidence.models <= names:
            return None  # adapters were loaded: the engine is asked again
        return known.answers

    def _refuted(self, engine: Engine, refuted: Refuted) -> None:
        if (known := self._of(engine)) is not None and known.add(refuted):
            shown, started = CanariesForWorkers.shown, known.started
            self._link.tell(shown, self._pool, engine.url, started, refuted)

    def _take(self, url: str, now: Known) -> None:
        before = self.known.get(url)
        if before is not None and before.started == now.started:
            for one in before.refuted:  # the scheduler process may not have heard it yet
                now.add(one)
        self._keep(url, now)
        if (engine := self._engines.get(url)) is not None:
            self._distrust(engine)
        self._own.changed()

    def _said(self) -> dict[str, Known]:
        """Return what requests have shown: a new scheduler process asks engines for the rest."""
        known = self.known.items()
        return {url: Known(one.started, None, one.refuted) for url, one in known if one.refuted}


def _untold(answers: CanaryAnswers) -> CanaryAnswers:
    """Return answers without their ids, where these are too many."""
    why = f"its answers to canaries have more than {MAX_TOLD} bytes: workers compare nothing"
    return CanaryAnswers(
        answers.cards,
        {model: ModelAnswers(one.root, why=why) for model, one in answers.models.items()},
    )
