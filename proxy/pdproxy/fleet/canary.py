"""Canaries: whether the engines make the same token ids of a prompt as this process.

Owns the judgements in each `EngineRun`, and the tokenizers that were found for the engines' models. Every engine, P and D, is
asked for the ids of `tokens.canaries` when it comes up and each time that it has changed. Prompts of a model are tokenized here
as long as all engines that are up and serve it make the same ids. One that differs ends that, with a warning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from pdproxy.fleet.engine import Engine, Judgement
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.errors import EngineError, EngineRefusedError, OverloadedError
from pdproxy.kit.frames import drop_traceback, frames
from pdproxy.kit.text import truncate
from pdproxy.observe.events import Event, NodeChanged, Observers, TokenizerJudged
from pdproxy.scheduling.nodes import Node
from pdproxy.tokens.canaries import CANARIES, Agreement, CanaryIds, compare
from pdproxy.tokens.chat import ContentFormat
from pdproxy.tokens.errors import UnusableError
from pdproxy.tokens.tokenizer import LocalTokenizer
from pdproxy.upstream.admin import EngineAdmin, ModelCard
from pdproxy.wire.request import Route

logger = logging.getLogger("pdproxy.fleet")

AGAIN = 5.0
"""Seconds until an engine that was too busy to answer is asked again."""
MAX_BASES = 16
"""Base models of an engine whose prompts may be tokenized here: an engine has one, under some names."""
MAX_ANSWER = 64 << 10
"""Bytes of an engine's ids of one canary."""
MAX_NAMES = 16_384
"""Names of models that are remembered. Beyond that, names that no engine lists are forgotten."""
_NO_ROUTE = (403, 404, 405, 501)
_NOTHING: Mapping[bool, ContentFormat] = {False: "string", True: "string"}

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Trusted:
    """A tokenizer that all engines of a model agree with. `forms`: how its template gets a message's content."""

    tokenizer: LocalTokenizer
    forms: Mapping[bool, ContentFormat]


class Canaries:
    """Asks engines, and judges their answers.

    `tokenizer`: the one that the settings name, for all models. None: `find` returns one for the root that an engine reports for
    its model, or raises UnusableError; it runs in a thread of `threads`. An observer and a watcher of engines.
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
        engines.watch(self)

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
            if not engine.node.up or not (model is None or engine.node.serves(model)):
                continue
            judged = engine.run.judgements or {}
            if model is None and len(judged) != 1:
                return None  # the engine decides which model it means
            judgement = judged.get(next(iter(judged)) if model is None else self._bases.get(model, model))
            if judgement is None or judgement.tokenizer is None:
                return None
            agreement = judgement.agreement
            if not (agreement.chats if route is Route.CHAT else agreement.texts):
                return None
            trusted = Trusted(judgement.tokenizer, agreement.forms if route is Route.CHAT else _NOTHING)
            if agreed is None:
                agreed = trusted, judgement
            elif trusted.forms != agreed[0].forms or not judgement.compatible(agreed[1]):
                return None
        return agreed[0] if agreed is not None else None

    def refuted(self, url: str, model: str | None, route: Route, why: str) -> None:
        """Stop tokenizing a model's prompts here until this engine restarts: a request has shown that it makes other ids."""
        engine = self._engines.get(url)
        judged = (engine.run.judgements if engine is not None else None) or {}
        name = next(iter(judged), "") if model is None else self._bases.get(model, model)
        if (known := judged.get(name)) is None:
            return
        off = {"chats": False} if route is Route.CHAT else {"texts": False}
        judged[name] = replace(known, agreement=msgspec.structs.replace(known.agreement, **off), why=why)
        self._trusted.clear()
        self._observers.notify(TokenizerJudged(url, name, False, why))

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
        """Forget which tokenizers are trusted, and ask engines again: one came up, went down or was replaced."""
        self._trusted.clear()
        self._wake.set()

    # -- asking

    async def run(self) -> None:
        """Ask engines until cancelled: each once in each of its runs, and again while it is too busy to answer."""
        while True:
            self._wake.clear()
            done = await self.look()
            try:
                async with asyncio.timeout(None if done else AGAIN):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def look(self) -> bool:
        """Ask each engine that is up and was not asked in this run, or has new names. Return whether all have answered."""
        new = [
            engine
            for engine in self._engines.values()
            if engine.node.up and (engine.run.judgements is None or self._has_new_names(engine.node))
        ]
        return all(await asyncio.gather(*(self._ask(engine) for engine in new)))

    def _has_new_names(self, node: Node) -> bool:
        return node.evidence is not None and not node.evidence.models <= self._bases.keys()

    async def _ask(self, engine: Engine) -> bool:
        run, url = engine.run, engine.url
        try:
            cards = await self._cards(url)
            if run.judgements is not None:  # adapters were loaded: the judgement of their base model holds for them
                self._trusted.clear()
                return True
            judged = await self._judge(url, cards)
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
        for model, judgement in judged.items():
            agrees = False if judgement.agreement.differs else None if judgement.why else True
            self._observers.notify(TokenizerJudged(url, model, agrees, judgement.why or "all canaries agree"))
        return True

    async def _cards(self, url: str) -> list[ModelCard]:
        """Return an engine's models, and remember the base models of adapters."""
        cards = await self._admin.models(url)
        self._bases |= {card.id: card.parent or card.id for card in cards}
        if len(self._bases) > MAX_NAMES:
            served = {card.id for card in cards}.union(
                *(one.node.evidence.models for one in self._engines.values() if one.node.evidence is not None)
            )
            self._bases = {name: base for name, base in self._bases.items() if name in served}
        return cards

    async def _judge(self, url: str, cards: list[ModelCard]) -> dict[str, Judgement]:
        judged: dict[str, Judgement] = {}
        for card in [one for one in cards if one.parent is None][:MAX_BASES]:
            try:
                tokenizer = self._tokenizer or await self._tokenizer_of(card.root or card.id)
            except UnusableError as error:
                drop_traceback(error)  # the future that it came by refers to it, and a frame of it to the future
                why = f"{truncate(card.root or card.id)}: {truncate(error)}: name its folder with `tokenizer`"
                judged[card.id] = Judgement(None, Agreement(False, False, _NOTHING), why)
                continue
            judged[card.id] = await self._compared(url, card.id, tokenizer)
        return judged

    async def _compared(self, url: str, model: str, tokenizer: LocalTokenizer) -> Judgement:
        answers: dict[str, CanaryIds] = {}
        for canary in CANARIES:
            try:
                answers[canary.name] = await self._admin.token_ids(
                    url, canary.tokenize_body(model), max_bytes=MAX_ANSWER
                )
            except EngineRefusedError as error:
                if error.status in _NO_ROUTE:
                    why = f"its /tokenize answers {error.status}: nothing can be compared"
                    return Judgement(None, Agreement(False, False, _NOTHING), why)
                if error.status != 400:
                    raise
                answers[canary.name] = None
        agreement = await self._thread(lambda: compare(tokenizer, answers, model))
        why = ""
        if agreement.differs:
            kinds = (("completions", agreement.texts), ("chats", agreement.chats))
            off = " and ".join(name for name, on in kinds if not on)
            why = f"other token ids than the engine's for {_list(agreement.differs)}: {off} are left to the engines"
        elif agreement.unsure:
            why = f"no ids were made here for {_list(agreement.unsure)}"
        return Judgement(tokenizer, agreement, why, answers)

    async def _tokenizer_of(self, root: str) -> LocalTokenizer:
        found = self._found.get(root)
        if found is None:  # engines are asked at the same time, and share the tokenizer
            found = self._found[root] = asyncio.ensure_future(self._thread(lambda: self._find(root)))
        try:
            return await asyncio.shield(found)
        except Exception:
            if self._found.get(root) is found:
                del self._found[root]  # it may be there when an engine comes up again
            raise

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

    def agreements(self) -> Iterable[tuple[tuple[str, ...], float]]:
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
