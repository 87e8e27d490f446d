"""Canaries: would the engines make the same token ids of a prompt as we do?

Owns what is known of that, for each run of each engine, and the tokenizers that were found for their models. Every engine, P and
D, is asked for the ids of `tokens.canaries` when it comes up and each time that it has changed. Prompts of a model are tokenized
here while all engines that are up and serve it agree with us; one that differs switches that off, loudly.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from pdproxy.kit.errors import EngineError, EngineRefusedError, OverloadedError
from pdproxy.kit.frames import frames
from pdproxy.kit.text import truncate
from pdproxy.observe.events import Observers, TokenizerJudged
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.nodes import Node
from pdproxy.tokens.canaries import CANARIES, Agreement, Answer, compare
from pdproxy.tokens.chat import ContentFormat
from pdproxy.tokens.errors import UnusableError
from pdproxy.tokens.tokenizer import LocalTokenizer
from pdproxy.upstream.admin import EngineAdmin, ModelCard
from pdproxy.wire.request import Route

logger = logging.getLogger("pdproxy.fleet")

AGAIN = 5.0
"""Seconds until an engine that was too busy to answer is asked again."""
MOST_BASES = 16
"""Base models of an engine whose prompts may be tokenized here: an engine has one, under some names."""
MOST_ANSWER = 64 << 10
"""Bytes of an engine's ids of one canary."""
MOST_NAMES = 16_384
"""Names of models that are remembered; then those are forgotten that no engine has."""
_NO_ROUTE = (403, 404, 405, 501)
_NOTHING: Mapping[bool, ContentFormat] = {False: "string", True: "string"}

Life = tuple[str, int]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Trusted:
    """A tokenizer that all engines of a model agree with. `forms`: how its template gets a message's content."""

    tokenizer: LocalTokenizer
    forms: Mapping[bool, ContentFormat]


@dataclass(frozen=True, slots=True)
class _Judgement:
    """What one run of an engine said of one base model. `why`: why nothing is tokenized here for it, "" if it is.

    `answers`: the engine's own ids, by the canaries' names.
    """

    tokenizer: LocalTokenizer | None
    agreement: Agreement
    why: str
    answers: Mapping[str, Answer] = field(default_factory=dict)

    def alike(self, other: _Judgement) -> bool:
        """Tell whether a tokenizer that agrees with one agrees with both: they share it, or say the same of all canaries."""
        return self.tokenizer is other.tokenizer or self.answers == other.answers


class Canaries:
    """Asks engines, and remembers what they said.

    `tokenizer`: the one that the settings name, for all models; None: `find` gives one for what an engine calls its model's
    root, in a thread of `threads`, or raises UnusableError.
    """

    def __init__(
        self,
        ledger: Ledger,
        admin: EngineAdmin,
        observers: Observers,
        threads: Executor,
        *,
        tokenizer: LocalTokenizer | None,
        find: Callable[[str], LocalTokenizer],
    ) -> None:
        self._ledger = ledger
        self._admin = admin
        self._observers = observers
        self._threads = threads
        self._tokenizer = tokenizer
        self._find = find
        self._found: dict[str, asyncio.Future[LocalTokenizer]] = {}
        self._bases: dict[str, str] = {}
        self._judged: dict[Life, dict[str, _Judgement]] = {}
        self._trusted: dict[tuple[str | None, Route], Trusted | None] = {}
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Canaries {len(self._judged)} engines judged>"

    # -- what requests ask

    def trusted(self, model: str | None, route: Route) -> Trusted | None:
        """Return what makes the ids of a model's prompts here, None if they are not made here."""
        key = model, route
        if key not in self._trusted:
            found = self._agreed(model, route)
            if found is None and (model is None or model not in self._bases):
                return None  # nor kept: models are words of clients
            self._trusted[key] = found
        return self._trusted[key]

    def _agreed(self, model: str | None, route: Route) -> Trusted | None:
        agreed: tuple[Trusted, _Judgement] | None = None
        for node in self._ledger.nodes:
            if not node.alive or not (model is None or node.serves(model)):
                continue
            judged = self._judged.get(self._ledger.life(node.url), {})
            if model is None and len(judged) != 1:
                return None  # the engine decides which model it means
            judgement = judged.get(next(iter(judged)) if model is None else self._bases.get(model, model))
            if judgement is None or judgement.tokenizer is None:
                return None
            how = judgement.agreement
            if not (how.chats if route is Route.CHAT else how.texts):
                return None
            trusted = Trusted(judgement.tokenizer, how.forms if route is Route.CHAT else _NOTHING)
            if agreed is None:
                agreed = trusted, judgement
            elif trusted.forms != agreed[0].forms or not judgement.alike(agreed[1]):
                return None
        return agreed[0] if agreed is not None else None

    def refuted(self, url: str, model: str | None, route: Route, why: str) -> None:
        """A request has shown what canaries can't: this engine makes other ids of it. Not here any more, for this life of it."""
        judged = self._judged.get(self._ledger.life(url), {})
        name = next(iter(judged), "") if model is None else self._bases.get(model, model)
        if (known := judged.get(name)) is None:
            return
        off = {"chats": False} if route is Route.CHAT else {"texts": False}
        judged[name] = replace(known, agreement=msgspec.structs.replace(known.agreement, **off), why=why)
        self._trusted.clear()
        self._observers.notify(TokenizerJudged(url, name, False, why))

    # -- asking

    def changed(self) -> None:
        """An engine came up, went down or is another one now."""
        self._trusted.clear()
        self._wake.set()

    async def run(self) -> None:
        """Ask engines for ever: each once in its life, and again while it is too busy to answer."""
        while True:
            self._wake.clear()
            done = await self.look()
            try:
                async with asyncio.timeout(None if done else AGAIN):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def look(self) -> bool:
        """Ask each engine that is up and was not asked in this life, or has new names. Return whether all have answered."""
        lives = {self._ledger.life(node.url): node.url for node in self._ledger.nodes if node.evidence is not None}
        for gone in self._judged.keys() - lives.keys():
            del self._judged[gone]
        new = [
            node.url
            for node in self._ledger.nodes
            if node.alive and (self._ledger.life(node.url) not in self._judged or self._has_new_names(node))
        ]
        return all(await asyncio.gather(*(self._asked(url) for url in new)))

    def _has_new_names(self, node: Node) -> bool:
        return node.evidence is not None and not node.evidence.models <= self._bases.keys()

    async def _asked(self, url: str) -> bool:
        life = self._ledger.life(url)
        try:
            cards = await self._cards(url)
            if life in self._judged:  # adapters were loaded: what their base was found to be holds for them
                self._trusted.clear()
                return True
            judged = await self._judge(url, cards)
        except (EngineError, OverloadedError) as error:
            logger.debug("%s was not asked for canaries: %s", url, error.message)
            return False
        except Exception as error:
            logger.error("canaries of %s failed in pdproxy itself: %s", url, frames(error))  # noqa: TRY400
            return False
        self._judged[life] = judged
        self._trusted.clear()
        for model, judgement in judged.items():
            agrees = False if judgement.agreement.differs else None if judgement.why else True
            self._observers.notify(TokenizerJudged(url, model, agrees, judgement.why or "all canaries agree"))
        return True

    async def _cards(self, url: str) -> list[ModelCard]:
        """Return an engine's models, and note whose adapters they are."""
        cards = await self._admin.models(url)
        self._bases |= {card.id: card.parent or card.id for card in cards}
        if len(self._bases) > MOST_NAMES:
            served = {card.id for card in cards}.union(
                *(node.evidence.models for node in self._ledger.nodes if node.evidence is not None)
            )
            self._bases = {name: base for name, base in self._bases.items() if name in served}
        return cards

    async def _judge(self, url: str, cards: list[ModelCard]) -> dict[str, _Judgement]:
        judged: dict[str, _Judgement] = {}
        for card in [one for one in cards if one.parent is None][:MOST_BASES]:
            try:
                tokenizer = self._tokenizer or await self._tokenizer_of(card.root or card.id)
            except UnusableError as error:
                why = f"{truncate(card.root or card.id)}: {truncate(error)}: name its folder with `tokenizer`"
                judged[card.id] = _Judgement(None, Agreement(False, False, _NOTHING), why)
                continue
            judged[card.id] = await self._compared(url, card.id, tokenizer)
        return judged

    async def _compared(self, url: str, model: str, tokenizer: LocalTokenizer) -> _Judgement:
        answers: dict[str, Answer] = {}
        for canary in CANARIES:
            try:
                answers[canary.name] = await self._admin.token_ids(url, canary.tokenize_body(model), most=MOST_ANSWER)
            except EngineRefusedError as error:
                if error.status in _NO_ROUTE:
                    why = f"its /tokenize answers {error.status}: nothing can be compared"
                    return _Judgement(None, Agreement(False, False, _NOTHING), why)
                if error.status != 400:
                    raise
                answers[canary.name] = None
        how = await self._thread(lambda: compare(tokenizer, answers, model))
        why = ""
        if how.differs:
            what = [name for name, on in (("completions", how.texts), ("chats", how.chats)) if not on]
            why = f"other token ids than the engine's for {_list(how.differs)}: {' and '.join(what)} are left to the engines"
        elif how.unsure:
            why = f"no ids of our own for {_list(how.unsure)}"
        return _Judgement(tokenizer, how, why, answers)

    async def _tokenizer_of(self, root: str) -> LocalTokenizer:
        found = self._found.get(root)
        if found is None:  # engines are asked at the same time, and share what is found
            found = self._found[root] = asyncio.ensure_future(self._thread(lambda: self._find(root)))
        try:
            return await asyncio.shield(found)
        except Exception:
            if self._found.get(root) is found:
                del self._found[root]  # it may be there when an engine comes up the next time
            raise

    async def _thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # -- what an operator asks

    def shortcomings(self) -> list[str]:
        """Return what is not tokenized here although it should be, a sentence each."""
        return [
            f"{url}: prompts of {model} are not tokenized here: {judgement.why}"
            for (url, _), judged in self._judged.items()
            for model, judgement in judged.items()
            if judgement.why
        ]

    def agreements(self) -> Iterable[tuple[tuple[str, ...], float]]:
        """Yield ((engine, model), 1 or 0) for each engine that was asked."""
        for (url, _), judged in self._judged.items():
            for model, judgement in judged.items():
                yield (url, model), float(not judgement.why)


def _list(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
