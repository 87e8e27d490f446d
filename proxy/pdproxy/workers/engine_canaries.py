"""Canaries of tokenizers with several workers: the scheduler process asks the engines, and each
process judges the answers by its own tokenizer.

What a request has shown of an engine's ids in one worker ends tokenizing for that engine's model in
all: the worker says it, and nothing undoes it in this run of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor

import msgspec

from pdproxy.fleet.canary import Canaries, CanaryAnswers, ModelAnswers
from pdproxy.fleet.engine import Engine, Judgement
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.observe.events import Observers
from pdproxy.tokens.tokenizer import LocalTokenizer
from pdproxy.upstream.admin import EngineAdmin
from pdproxy.wire.route import Route
from pdproxy.workers.scheduler_clients import SchedulerClient
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks
from pdproxy.workers.telling import Telling

MAX_TOLD = 1 << 18
"""Bytes of what an engine answers that workers are sent: five times what vLLM answers."""


class Refuted(msgspec.Struct, array_like=True, frozen=True):
    """A request has shown that an engine makes other ids for a base model."""

    model: str
    route: Route
    why: str


class Known(msgspec.Struct, array_like=True):
    """What is known of one run of an engine. `started`: when that run began, as the engine reports
    it. `answers`: None where a worker says it, and of an engine that was removed.
    """

    url: str
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


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(list[Known]).decode


class _RefutedCanaries(Canaries):
    """Canaries that keep what is known of each engine's run."""

    _kept: dict[str, Known]
    _runs: dict[str, int]
    """The number of the run of which that is, if it was known then."""

    def _known(self, engine: Engine) -> Known | None:
        """Return what is known of an engine's present run, None if nothing is."""
        url, run, evidence = engine.url, engine.in_ledger.run_number, engine.in_ledger.evidence
        known = self._kept.get(url)
        if known is None or evidence is None or known.started != evidence.started:
            return None
        return known if self._runs.get(url, run) == run else None

    def _keep(self, known: Known) -> None:
        url = known.url
        self._kept[url] = known
        self._runs.pop(url, None)
        engine = self._engines.get(url)
        if engine is not None and self._known(engine) is not None:
            self._runs[url] = engine.in_ledger.run_number

    def _distrust_all(self, engine: Engine) -> None:
        """Distrust what was refuted."""
        if (known := self._known(engine)) is not None:
            for one in known.refuted:
                super()._distrust(engine, one.model, one.route, one.why)

    def removed(self, engine: Engine) -> None:
        """See `Canaries`."""
        if engine.url != self._engines.replaced:
            self._kept.pop(engine.url, None)
            self._runs.pop(engine.url, None)
        super().removed(engine)


class AskingCanaries(_RefutedCanaries):
    """The `Canaries` of the scheduler process: it tells workers what engines answer."""

    def __init__(
        self,
        engines: EngineRegistry,
        admin: EngineAdmin,
        observers: Observers,
        threads: Executor,
        *,
        tokenizer: LocalTokenizer | None,
        find: Callable[[str], LocalTokenizer],
        links: SchedulerLinks,
        topic: str,
    ) -> None:
        self._kept, self._runs = {}, {}
        super().__init__(engines, admin, observers, threads, tokenizer=tokenizer, find=find)
        self._telling = Telling(links, topic, engines, self._told, 1)
        links.hears[topic] = self._heard

    def _told(self, urls: Iterable[str]) -> bytes:
        told: list[Known] = []
        for url in urls:
            engine = self._engines.get(url)
            known = None if engine is None else self._known(engine)
            if engine is None:
                told.append(Known(url, 0.0, None, []))
            elif known is not None and known.answers is not None:
                told.append(known)
        return encode(told)

    def removed(self, engine: Engine) -> None:
        """See `Canaries`."""
        super().removed(engine)
        self._telling.post(engine.url)

    def _of_run(self, engine: Engine, started: float) -> Known:
        known = self._known(engine)
        if known is None:
            known = Known(engine.url, started, None, [])
            self._keep(known)
        return known

    async def _answers(self, engine: Engine) -> CanaryAnswers | None:
        """See `Canaries`."""
        answers = await super()._answers(engine)
        evidence = engine.in_ledger.evidence
        if answers is not None and evidence is not None:
            known = self._of_run(engine, evidence.started)
            before = known.answers or CanaryAnswers([])
            known.answers = CanaryAnswers(answers.cards, answers.models or before.models)
            if len(encode(known)) > MAX_TOLD:
                known.answers = _untold(known.answers)
            self._telling.post(engine.url)
        return answers

    def _announce(self, engine: Engine, judged: Mapping[str, Judgement]) -> None:
        super()._announce(engine, judged)
        self._distrust_all(engine)

    def _distrust(self, engine: Engine, model: str, route: Route, why: str) -> bool:
        was_judged = super()._distrust(engine, model, route, why)
        evidence = engine.in_ledger.evidence
        if was_judged and evidence is not None:
            self._add(engine, evidence.started, Refuted(model, route, why))
        return was_judged

    def _add(self, engine: Engine, started: float, refuted: Refuted) -> None:
        if self._of_run(engine, started).add(refuted):
            self._telling.post(engine.url)

    def _heard(self, _: SchedulerClient, body: bytes) -> None:
        """Take what a worker's requests have shown."""
        for said in decode(body):
            engine = self._engines.get(said.url)
            evidence = None if engine is None else engine.in_ledger.evidence
            if engine is None or evidence is None or evidence.started != said.started:
                continue  # it has started again
            for one in said.refuted:
                self._add(engine, said.started, one)
            self._distrust_all(engine)


class ToldCanaries(_RefutedCanaries):
    """The `Canaries` of a worker: it asks no engine."""

    def __init__(
        self,
        engines: EngineRegistry,
        admin: EngineAdmin,
        observers: Observers,
        threads: Executor,
        *,
        tokenizer: LocalTokenizer | None,
        find: Callable[[str], LocalTokenizer],
        link: SchedulerLink,
        topic: str,
    ) -> None:
        self._kept, self._runs = {}, {}
        super().__init__(engines, admin, observers, threads, tokenizer=tokenizer, find=find)
        self._link = link
        self._topic = topic
        link.hears[topic] = self._hear
        link.holds[topic] = self._holds

    async def _answers(self, engine: Engine) -> CanaryAnswers | None:
        """See `Canaries`."""
        known, evidence = self._known(engine), engine.in_ledger.evidence
        if known is None or known.answers is None or evidence is None:
            return None
        names = {card.id for card in known.answers.cards}
        if engine.run.judgements is not None and not evidence.models <= names:
            return None  # adapters were loaded: the engine is asked again
        return known.answers

    def _announce(self, engine: Engine, judged: Mapping[str, Judgement]) -> None:
        self._distrust_all(engine)

    def _distrust(self, engine: Engine, model: str, route: Route, why: str) -> bool:
        was_judged, known = super()._distrust(engine, model, route, why), self._known(engine)
        if was_judged and known is not None and known.add(refuted := Refuted(model, route, why)):
            self._link.say(self._topic, encode([Known(known.url, known.started, None, [refuted])]))
        return was_judged

    def _hear(self, body: bytes) -> None:
        for told in decode(body):
            before = self._kept.pop(told.url, None)
            if told.answers is None:
                self._runs.pop(told.url, None)
                continue
            if before is not None and before.started == told.started:
                for one in before.refuted:  # the scheduler process may not have heard it yet
                    told.add(one)
            self._keep(told)
            if (engine := self._engines.get(told.url)) is not None:
                self._distrust_all(engine)
        self._wake.set()

    def _holds(self) -> bytes | None:
        held = [
            Known(known.url, known.started, None, known.refuted)
            for known in self._kept.values()
            if known.refuted
        ]
        return encode(held) if held else None


def _untold(answers: CanaryAnswers) -> CanaryAnswers:
    """Return answers without their ids, where these are too many."""
    why = f"its answers to canaries have more than {MAX_TOLD} bytes: workers compare nothing"
    return CanaryAnswers(
        answers.cards,
        {model: ModelAnswers(one.root, why=why) for model, one in answers.models.items()},
    )
