"""Canaries: whether the engines make the same token ids of a prompt as this process.

Owns the judgements in each `EngineRun`, and the tokenizers that were found for the engines' models.
Every engine, P and D, is asked for the ids of `tokens.canaries` when it comes up and each time that
it has changed. Prompts of a model are tokenized here as long as all engines that are up and serve
it make the same ids. One that differs ends that, with a warning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from pdproxy.fleet.engine import Engine, Judgement
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.errors import EngineError, EngineRefusedError, OverloadedError
from pdproxy.kit.frames import drop_traceback, frames
from pdproxy.kit.text import truncate
from pdproxy.observe.description import NODE, Label, MergeRule, Samples, gauge
from pdproxy.observe.events import Event, NodeChanged, Observers, TokenizerJudged
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.tokens.canaries import CANARIES, Agreement, CanaryIds, compare
from pdproxy.tokens.chat import ContentFormat
from pdproxy.tokens.errors import NotInstalledError, UnusableError
from pdproxy.tokens.tokenizer import LocalTokenizer
from pdproxy.upstream.admin import EngineAdmin, ModelCard
from pdproxy.wire.route import Route

logger = logging.getLogger("pdproxy.fleet")

AGAIN = 5.0
"""Seconds until an engine that was too busy to answer is asked again."""
MAX_BASES = 16
"""Base models of an engine whose prompts may be tokenized here: an engine has one base model, under
some names.
"""
MAX_ANSWER = 64 << 10
"""Bytes of an engine's ids of one canary."""
MAX_NAMES = 16_384
"""Names of models that are remembered. Beyond that, names that no engine lists are forgotten."""
MAX_TOKENIZERS = 16
"""Tokenizers that are kept beside those of engines that are there. An engine may name one model in
any number of ways.
"""
_NO_ROUTE = (403, 404, 405, 501)
_NOTHING: Mapping[bool, ContentFormat] = {False: "string", True: "string"}

_T = TypeVar("_T")
TOKENIZE_AGREES = gauge(
    "pdproxy_tokenize_agrees",
    "bool",
    "Whether prompts may become token ids here, as the engine would make them",
    NODE,
    Label("model", text="a model of the engine"),
    workers=MergeRule.LEAST,
)


class ModelAnswers(msgspec.Struct, array_like=True):
    """What an engine answered for one base model, by the canaries' names. `why`: why there is
    nothing to compare, "" if there is.

    `root`: by which a tokenizer is found.
    """

    root: str
    ids: dict[str, CanaryIds] = {}
    why: str = ""


class CanaryAnswers(msgspec.Struct, array_like=True):
    """What an engine answered in one run: its models, and for each base model the ids of
    canaries.
    """

    cards: list[ModelCard]
    models: dict[str, ModelAnswers] = {}


class Refuted(msgspec.Struct, array_like=True, frozen=True):
    """A request has shown that an engine makes other ids for a base model."""

    model: str
    route: Route
    why: str


@dataclass(frozen=True, slots=True)
class Trusted:
    """A tokenizer that all engines of a model agree with. `forms`: how its template gets a
    message's content.
    """

    tokenizer: LocalTokenizer
    forms: Mapping[bool, ContentFormat]


class Canaries:
    """Asks engines, and judges their answers.

    `tokenizer`: the one that the settings name, for all models. None: `find` returns one for the
    root that an engine reports for its model, or raises UnusableError; it runs in a thread of
    `threads`. An observer and a watcher of engines.
    """

    only = (NodeChanged,)

    def __init__(
        self,
        engines: EngineRegistry,
        admin: EngineAdmin,
        observers: Observers,
        threads: Executor,
        *,
        tokenizer: LocalTokenizer | None,
        find: Callable[[str], LocalTokenizer],
    ) -> None:
        self._engines = engines
        self._admin = admin
        self._observers = observers
        self._threads = threads
        self._tokenizer = tokenizer
        self._find = find
        self._found: dict[str, asyncio.Future[LocalTokenizer]] = {}
        self._bases: dict[str, str] = {}
        self._trusted: dict[tuple[str | None, Route], Trusted | None] = {}
        self._wake = asyncio.Event()
        self.answers: Callable[[Engine], Awaitable[CanaryAnswers | None]] = self.ask
        """Returns what an engine answers, None: it is not known yet. Raises as `ask`. Set where
        several processes judge, as those behind it are.
        """
        self.announces = True
        """Whether judgements are events."""
        self.when_judged: Callable[[Engine], None] = lambda _: None
        """Called with an engine that was judged."""
        self.when_refuted: Callable[[Engine, Refuted], None] = lambda _, __: None
        """Called with what a request of this process has shown of an engine that was judged."""
        engines.watch(self)
        observers.show(TOKENIZE_AGREES, self.agreements)

    def __repr__(self) -> str:
        return f"<Canaries of {len(self._engines)} engines, {len(self._trusted)} answers kept>"

    # -- what requests ask

    def trusted(self, model: str | None, route: Route) -> Trusted | None:
        """Return the tokenizer for a model's prompts, None if they are not tokenized here."""
        key = model, route
        if key not in self._trusted:
            found = self._agreed(model, route)
            if found is None and (model is None or model not in self._bases):
                return None  # not kept either: clients choose these names
            self._trusted[key] = found
        return self._trusted[key]

    def _agreed(self, model: str | None, route: Route) -> Trusted | None:
        agreed: tuple[Trusted, Judgement] | None = None
        for engine in self._engines.values():
            if not engine.in_ledger.up or not (model is None or engine.in_ledger.serves(model)):
                continue
            judged = engine.run.judgements or {}
            if model is None and len(judged) != 1:
                return None  # the engine decides which model it means
            judgement = judged.get(
                next(iter(judged)) if model is None else self._bases.get(model, model)
            )
            if judgement is None or judgement.tokenizer is None:
                return None
            agreement = judgement.agreement
            if not (agreement.chats if route is Route.CHAT else agreement.texts):
                return None
            trusted = Trusted(
                judgement.tokenizer, agreement.forms if route is Route.CHAT else _NOTHING
            )
            if agreed is None:
                agreed = trusted, judgement
            elif trusted.forms != agreed[0].forms or not judgement.compatible(agreed[1]):
                return None
        return agreed[0] if agreed is not None else None

    def refuted(self, url: str, model: str | None, route: Route, why: str) -> None:
        """Stop tokenizing a model's prompts here until this engine restarts: a request has shown
        that it makes other ids.
        """
        engine = self._engines.get(url)
        if engine is None:
            return
        name = (
            next(iter(engine.run.judgements or {}), "")
            if model is None
            else self._bases.get(model, model)
        )
        refuted = Refuted(name, route, why)
        if self.distrust(engine, refuted):
            self.when_refuted(engine, refuted)
            self._observers.notify(TokenizerJudged(url, name, False, why))

    def distrust(self, engine: Engine, refuted: Refuted) -> bool:
        """Tokenize a base model's prompts here no more. Return whether the engine was judged for
        it.
        """
        judged = engine.run.judgements or {}
        if (known := judged.get(refuted.model)) is None:
            return False
        off = {"chats": False} if refuted.route is Route.CHAT else {"texts": False}
        judged[refuted.model] = replace(
            known, agreement=msgspec.structs.replace(known.agreement, **off), why=refuted.why
        )
        self._trusted.clear()
        return True

    # -- what happens to engines

    def notify(self, event: Event) -> None:
        """Ask again when an engine has changed."""
        if isinstance(event, NodeChanged):
            self.changed()

    def added(self, engine: Engine) -> None:
        """Do nothing: the engine is asked once it is up."""

    def removed(self, engine: Engine) -> None:
        """Judge without an engine from now on."""
        self.changed()

    def changed(self) -> None:
        """Forget which tokenizers are trusted, and ask engines again: one came up, went down or was
        replaced.
        """
        self._trusted.clear()
        self._wake.set()

    # -- asking

    async def run(self) -> None:
        """Ask engines until cancelled: each once in each of its runs, and again while it is too
        busy to answer.
        """
        while True:
            self._wake.clear()
            done = await self.look()
            try:
                async with asyncio.timeout(None if done else AGAIN):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def look(self) -> bool:
        """Ask each engine that is up and was not asked in this run, or has new names. Return
        whether all have answered.
        """
        new = [
            engine
            for engine in self._engines.values()
            if engine.in_ledger.up
            and (engine.run.judgements is None or self._has_new_names(engine.in_ledger))
        ]
        return all(await asyncio.gather(*(self._ask(engine) for engine in new)))

    def _has_new_names(self, engine: LedgerEngine) -> bool:
        return engine.evidence is not None and not engine.evidence.models <= self._bases.keys()

    async def _ask(self, engine: Engine) -> bool:
        run, url = engine.run, engine.url
        try:
            answers = await self.answers(engine)
            if answers is None:
                return False
            self._remember(answers.cards)
            # adapters were loaded: the judgement of their base model holds for them
            if run.judgements is not None:
                self._trusted.clear()
                return True
            judged = {
                model: await self._judged(model, answer) for model, answer in answers.models.items()
            }
        except (EngineError, OverloadedError) as error:
            logger.debug("%s was not asked for canaries: %s", url, error.message)
            return False
        except Exception as error:
            logger.error("canaries of %s failed in pdproxy itself: %s", url, frames(error))  # noqa: TRY400
            return False
        if self._engines.get(url) is not engine:
            return True  # it was removed meanwhile
        run.judgements = judged
        self._trusted.clear()
        self._announce(engine, judged)
        self.when_judged(engine)
        return True

    def _announce(self, engine: Engine, judged: Mapping[str, Judgement]) -> None:
        for model, judgement in judged.items() if self.announces else ():
            agrees = False if judgement.agreement.differs else None if judgement.why else True
            self._observers.notify(
                TokenizerJudged(engine.url, model, agrees, judgement.why or "all canaries agree")
            )

    async def ask(self, engine: Engine) -> CanaryAnswers:
        """Return what an engine answers, without canaries if it was judged already.

        Raises:
            EngineError: it does not answer as it should.
            OverloadedError: there are no more connections.
        """
        answers = CanaryAnswers(await self._admin.models(engine.url))
        if engine.run.judgements is None:
            for card in [one for one in answers.cards if one.parent is None][:MAX_BASES]:
                answers.models[card.id] = await self._asked(engine.url, card)
        return answers

    def _remember(self, cards: list[ModelCard]) -> None:
        """Remember the base models of adapters."""
        self._bases |= {card.id: card.parent or card.id for card in cards}
        if len(self._bases) > MAX_NAMES:
            served = {card.id for card in cards}.union(
                *(
                    one.in_ledger.evidence.models
                    for one in self._engines.values()
                    if one.in_ledger.evidence is not None
                )
            )
            self._bases = {name: base for name, base in self._bases.items() if name in served}

    async def _asked(self, url: str, card: ModelCard) -> ModelAnswers:
        """Ask an engine for the ids of all canaries, if there is a tokenizer with which they can be
        compared.
        """
        found = ModelAnswers(card.root or card.id)
        if isinstance(tokenizer := await self._usable(found.root), str):
            return ModelAnswers(found.root, why=tokenizer)
        for canary in CANARIES:
            try:
                found.ids[canary.name] = await self._admin.token_ids(
                    url, canary.tokenize_body(card.id), max_bytes=MAX_ANSWER
                )
            except EngineRefusedError as error:
                if error.status in _NO_ROUTE:
                    return ModelAnswers(
                        found.root,
                        why=f"its /tokenize answers {error.status}: nothing can be compared",
                    )
                if error.status != 400:
                    raise
                found.ids[canary.name] = None
        return found

    async def _usable(self, root: str) -> LocalTokenizer | str:
        """Return the tokenizer for a model, or why there is none."""
        try:
            return self._tokenizer or await self._tokenizer_of(root)
        except UnusableError as error:
            # the future that it came by refers to it, and a frame of it to the future
            drop_traceback(error)
            advice = ": name its folder with `tokenizer`"
            if isinstance(error, NotInstalledError):
                advice = ""
            return f"{truncate(root)}: {truncate(error)}{advice}"

    async def _judged(self, model: str, answer: ModelAnswers) -> Judgement:
        found = answer.why or await self._usable(answer.root)
        if isinstance(found, str):
            return Judgement(None, Agreement(False, False, _NOTHING), found)
        tokenizer, answers = found, answer.ids
        agreement = await self._thread(lambda: compare(tokenizer, answers, model))
        why = ""
        if agreement.differs:
            kinds = (("completions", agreement.texts), ("chats", agreement.chats))
            off = " and ".join(name for name, on in kinds if not on)
            why = (
                f"other token ids than the engine's for {_list(agreement.differs)}: {off} are "
                f"left to the engines"
            )
        elif agreement.unsure:
            why = f"no ids were made here for {_list(agreement.unsure)}"
        return Judgement(tokenizer, agreement, why, answers)

    async def _tokenizer_of(self, root: str) -> LocalTokenizer:
        found = self._found.get(root)
        if found is None:  # engines are asked at the same time, and share the tokenizer
            if len(self._found) >= MAX_TOKENIZERS:
                self._forget_unused()
            found = self._found[root] = asyncio.ensure_future(
                self._thread(lambda: self._find(root))
            )
        try:
            return await asyncio.shield(found)
        except Exception:
            if self._found.get(root) is found:
                del self._found[root]  # it may be there when an engine comes up again
            raise

    def _forget_unused(self) -> None:
        """Forget the tokenizers of engines that are gone, or that name other models now."""
        used = {id(judgement.tokenizer) for _, _, judgement in self._judgements()}
        for root, found in list(self._found.items()):
            if found.done() and (found.exception() or id(found.result()) not in used):
                del self._found[root]

    async def _thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # -- what an operator asks

    def shortcomings(self) -> list[str]:
        """Return what is not tokenized here although it should be, a sentence each."""
        return [
            f"{url}: prompts of {model} are not tokenized here: {judgement.why}"
            for url, model, judgement in self._judgements()
            if judgement.why
        ]

    def agreements(self) -> Samples:
        """Yield ((engine, model), 1 or 0) for each engine that was asked."""
        for url, model, judgement in self._judgements():
            yield (url, model), float(not judgement.why)

    def _judgements(self) -> Iterable[tuple[str, str, Judgement]]:
        for url, engine in self._engines.items():
            for model, judgement in (engine.run.judgements or {}).items():
                yield url, model, judgement


def _list(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
