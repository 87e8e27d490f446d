"""Canaries of tokenizers with several workers: one asks the engines, and each judges the answers by
its own tokenizer.

What a request has shown of an engine's ids in one worker ends tokenizing for that engine's model in
all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor

import msgspec

from pdproxy.fleet.canary import Canaries, CanaryAnswers, ModelAnswers
from pdproxy.fleet.engine import Engine, Judgement
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.worker_answers import WorkerAnswers
from pdproxy.observe.events import Observers
from pdproxy.tokens.tokenizer import LocalTokenizer
from pdproxy.upstream.admin import EngineAdmin
from pdproxy.wire.route import Route

MAX_TOLD = 1 << 20
"""Bytes of what an engine answers that are sent to other workers: twenty times what vLLM
answers.
"""


class _Refuted(msgspec.Struct, array_like=True, frozen=True):
    """A request has shown that an engine makes other ids for a base model."""

    model: str
    route: Route
    why: str


class _Known(msgspec.Struct, array_like=True):
    """What is known of one run of an engine."""

    answers: CanaryAnswers
    refuted: list[_Refuted] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Known).decode
_decode_refuted = msgspec.msgpack.Decoder(_Refuted).decode


class WorkerCanaries(Canaries):
    """The `Canaries` of one of several workers. `shared`: what engines have answered to the one
    that leads.
    """

    def __init__(
        self,
        engines: EngineRegistry,
        admin: EngineAdmin,
        observers: Observers,
        threads: Executor,
        *,
        tokenizer: LocalTokenizer | None,
        find: Callable[[str], LocalTokenizer],
        shared: WorkerAnswers,
    ) -> None:
        super().__init__(engines, admin, observers, threads, tokenizer=tokenizer, find=find)
        self._shared = shared
        shared.taken = lambda engine: self._wake.set()
        shared.noted = self._noted
        shared.replaced = self._replaced
        shared.lacking = self._lacking

    def _lacking(self) -> list[str]:
        return [
            url
            for url, engine in self._engines.items()
            if engine.in_ledger.up
            and (engine.run.judgements is None or self._has_new_names(engine.in_ledger))
            and self._known(engine) is None
        ]

    def _known(self, engine: Engine) -> _Known | None:
        """Return what is known of an engine's run, None if that is too little."""
        if (kept := self._shared.of(engine)) is None:
            return None
        known, evidence = _decode(kept), engine.in_ledger.evidence
        if engine.run.judgements is not None and evidence is not None:
            return known if evidence.models <= {card.id for card in known.answers.cards} else None
        return known

    async def _answers(self, engine: Engine) -> CanaryAnswers | None:
        """See `Canaries`. Only the process that leads asks the engine, and only what no worker has
        asked before.
        """
        if (known := self._known(engine)) is not None:
            return known.answers
        if not self._shared.lead.leads:
            return None
        answers = await super()._answers(engine)
        if answers is not None:
            kept = self._shared.of(engine)
            before = _Known(CanaryAnswers([])) if kept is None else _decode(kept)
            told = _Known(
                CanaryAnswers(answers.cards, answers.models or before.answers.models),
                before.refuted,
            )
            if len(body := _encode(told)) > MAX_TOLD:
                body = _encode(_Known(_untold(answers)))
            self._shared.tell(engine, body)
        return answers

    def _announce(self, engine: Engine, judged: Mapping[str, Judgement]) -> None:
        if self._shared.lead.leads:
            super()._announce(engine, judged)
        if (known := self._known(engine)) is not None:
            for refuted in known.refuted:
                super()._distrust(engine, refuted.model, refuted.route, refuted.why)

    def _distrust(self, engine: Engine, model: str, route: Route, why: str) -> bool:
        refuted = _Refuted(model, route, why)
        if was_trusted := super()._distrust(engine, model, route, why):
            self._keep(engine, refuted)
            self._shared.note(engine, _encode(refuted))
        return was_trusted

    def _noted(self, engine: Engine, note: bytes) -> None:
        """Another worker has found that an engine makes other ids."""
        refuted = _decode_refuted(note)
        self._keep(engine, refuted)
        super()._distrust(engine, refuted.model, refuted.route, refuted.why)

    def _replaced(self, engine: Engine, before: bytes) -> None:
        """Tell the leader what requests have shown: one that leads in place of a dead one does not
        know it.
        """
        kept = self._shared.of(engine)
        known = [] if kept is None else _decode(kept).refuted
        for refuted in _decode(before).refuted:
            if refuted not in known:
                self._keep(engine, refuted)
                self._shared.note(engine, _encode(refuted))

    def _keep(self, engine: Engine, refuted: _Refuted) -> None:
        kept = self._shared.of(engine)
        known = None if kept is None else _decode(kept)
        if known is not None and not any(
            (one.model, one.route) == (refuted.model, refuted.route) for one in known.refuted
        ):
            known.refuted.append(refuted)
            self._shared.keep(engine, _encode(known))


def _untold(answers: CanaryAnswers) -> CanaryAnswers:
    """Return answers without their ids, where these are too many."""
    why = f"its answers to canaries have more than {MAX_TOLD} bytes: other workers compare nothing"
    return CanaryAnswers(
        answers.cards,
        {model: ModelAnswers(one.root, why=why) for model, one in answers.models.items()},
    )
