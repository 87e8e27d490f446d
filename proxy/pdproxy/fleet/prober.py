"""Probing: whether each engine is up, and whether it is still the same run of it.

Owns the tasks that ask, and how often; what they find is written to the ledger. An engine is asked
for its full identity when it is new or has restarted (its start time changed), and for its health
alone otherwise. Engines that make different prompts of the canaries are asked for these again: a
template may print the date, and engines that were asked on different days differ by that alone. A
removed engine is asked for its health until the legs to it have ended: they end early once it is
down.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.errors import EngineError, EngineRefusedError, EngineTimeoutError, OverloadedError
from pdproxy.kit.frames import frames
from pdproxy.kit.tasks import TaskOwner
from pdproxy.kit.text import truncate
from pdproxy.observe.events import DeadlinePassed, Event, LegFailed, NodeChanged, Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import Evidence
from pdproxy.settings.health import Probes
from pdproxy.upstream.admin import EngineAdmin, ModelCard
from pdproxy.upstream.derenders import derenders
from pdproxy.upstream.metrics_page import NO_METRICS, Scrape

logger = logging.getLogger("pdproxy.fleet")

CANARY = "The quick brown fox jumps over 13 lazy dogs.\n\tdéjà vu — 日本語 🦊"
"""A text with everything in which tokenizers differ: words, digits, white space, accents, CJK and
an emoji.
"""


_T = TypeVar("_T")


MIN_GAP = 1.0
"""Minimum of seconds between two probes of an engine, and the interval for a removed one to which
legs run.
"""
MAX_BASES = 16
"""Base models of an engine that are asked for the canary: an engine has one, under some names."""
MAX_LATE = 3
"""An engine counts as down when so many health questions in a row have timed out: a busy one
answers late.
"""


def _bases(cards: list[ModelCard]) -> list[ModelCard]:
    return sorted((card for card in cards if card.parent is None), key=lambda c: c.id)[:MAX_BASES]


class ScrapeReader(Protocol):
    """Takes what engines report of themselves."""

    def scraped(self, engine: Engine, metrics: Scrape) -> None:
        """Take an engine's metrics."""


class Prober:
    """Probes every engine of a pool, and reads its metrics, at the intervals of `probes`.

    An observer: an engine to which a leg has failed is probed at once. `tasks` runs a task for each
    engine. `derenders`: engines are asked whether they derender; `messages`: also for the length of
    a message.
    """

    only = (LegFailed,)

    def __init__(
        self,
        engines: EngineRegistry,
        ledger: Ledger,
        admin: EngineAdmin,
        auditor: ScrapeReader,
        observers: Observers,
        tasks: TaskOwner,
        probes: Probes,
        now: Callable[[], float],
        *,
        derenders: bool = False,
        messages: bool = False,
    ) -> None:
        self._asks_derender = derenders
        self._asks_messages = messages
        self._engines = engines
        self._ledger = ledger
        self._admin = admin
        self._auditor = auditor
        self._observers = observers
        self._tasks = tasks
        self._now = now
        self._probes = probes
        self._started = False
        self._running: dict[Engine, asyncio.Task[None]] = {}
        engines.watch(self)

    def start(self) -> None:
        """Probe all engines from now on, and those that are added later. Needs a running event
        loop.
        """
        self._started = True
        for engine in self._engines.values():
            self.added(engine)

    def added(self, engine: Engine) -> None:
        """Probe one more engine."""
        if self._started:
            self._running[engine] = self._tasks.keep(
                partial(self.run, engine), f"probe {engine.url}"
            )

    def removed(self, engine: Engine) -> None:
        """Stop the probes of an engine. While legs to it run, its health is still asked."""
        if (task := self._running.pop(engine, None)) is not None:
            self._tasks.end(task)
            self._tasks.spawn(self._watch_removed(engine), f"probe removed {engine.url}")

    def notify(self, event: Event) -> None:
        """Have an engine probed at once when a leg to it failed."""
        if isinstance(event, LegFailed) and (engine := self._engines.get(event.node)) is not None:
            self.soon(engine)

    def _scrape_every(self) -> int:
        return max(1, round(self._probes.scrape_interval / self._probes.interval))

    async def run(self, engine: Engine) -> None:
        """Probe one engine until cancelled."""
        count = 0
        while True:
            await self._logged(engine, self.probe(engine, scrape=count % self._scrape_every() == 0))
            count += 1
            wake = engine.probes.wake
            try:
                async with asyncio.timeout(self._probes.interval):
                    await wake.wait()
            except TimeoutError:
                pass
            if wake.is_set():
                wake.clear()
                count = 0
                # many legs may fail at once while the engine is overloaded
                await asyncio.sleep(MIN_GAP)

    def soon(self, engine: Engine) -> None:
        """Probe an engine now: something about it has just changed."""
        engine.probes.wake.set()

    async def _watch_removed(self, engine: Engine) -> None:
        while engine.in_ledger.requests:
            await self._logged(engine, self._probe_removed(engine))
            await asyncio.sleep(MIN_GAP)

    async def _logged(self, engine: Engine, probe: Coroutine[object, object, None]) -> None:
        """Run one probe. Its failures in the proxy itself are logged: the next one may succeed."""
        try:
            await probe
        except OverloadedError as error:
            # which shows nothing of the engine
            logger.warning("%s was not probed: %s", engine.url, error.message)
        except Exception as error:
            logger.error("a probe of %s failed in pdproxy itself: %s", engine.url, frames(error))  # noqa: TRY400

    async def probe(self, engine: Engine, *, scrape: bool) -> None:
        """Ask one engine how it is, once, and write the answer to the ledger. `scrape`: read its
        metrics, too.
        """
        ledger_engine = engine.in_ledger
        if (failure := await self._health(engine)) is not None:
            if not ledger_engine.up or engine.probes.late >= MAX_LATE:
                self._lost(engine, failure)
            return
        if not scrape and ledger_engine.up:
            return
        try:
            metrics = await self._scraped(engine)
            evidence = await self._evidence(engine, metrics)
        except EngineError as error:
            self._count_late(engine, error)
            # a healthy engine keeps what is known of it until it has time to answer
            if not ledger_engine.up:
                self._lost(engine, error)
            return
        if self._ledger.mark_up(engine.url, evidence):
            reason = (
                f"{truncate(','.join(sorted(evidence.models)))} on vLLM {evidence.version or '?'}"
            )
            self._observers.notify(
                NodeChanged(engine.url, ledger_engine.role.value, up=True, reason=reason)
            )
        self._auditor.scraped(engine, metrics)

    async def _probe_removed(self, engine: Engine) -> None:
        failure = await self._health(engine)
        if failure is None or engine.probes.late >= MAX_LATE:
            self._ledger.mark_removed(
                engine.in_ledger, failure.message if failure is not None else None, self._now()
            )

    async def _health(self, engine: Engine) -> EngineError | None:
        """Ask an engine for its health; return the failure, None if it is healthy."""
        probes = engine.probes
        try:
            await self._admin.healthy(engine.url)
        except EngineError as error:
            self._count_late(engine, error)
            probes.late = probes.late + 1 if isinstance(error, EngineTimeoutError) else MAX_LATE
            return error
        probes.late = 0
        return None

    def _count_late(self, engine: Engine, error: EngineError) -> None:
        if isinstance(error, EngineTimeoutError):
            self._observers.notify(DeadlinePassed(error.wait.value, engine.url))

    def _lost(self, engine: Engine, error: EngineError) -> None:
        first = (
            not engine.in_ledger.probed
        )  # an engine that was never up has not changed, but the log must say why it is not used
        if self._ledger.mark_down(engine.url, error.message, self._now()) or first:
            role = engine.in_ledger.role.value
            self._observers.notify(NodeChanged(engine.url, role, up=False, reason=error.message))

    async def _scraped(self, engine: Engine) -> Scrape:
        """Return the engine's metrics, empty ones if it shows none: they are no condition for
        serving.
        """
        return await self._or_default(self._admin.scrape(engine.url), NO_METRICS)

    async def _evidence(self, engine: Engine, metrics: Scrape) -> Evidence:
        # one that was down may be another one now
        known = engine.in_ledger.evidence if engine.in_ledger.up else None
        cards = await self._admin.models(engine.url)
        names = frozenset(card.id for card in cards)
        if known is not None and known.started == metrics.started and known.models == names:
            if not known.started or self._renders_as_others(known):
                return known
            canary, _ = await self._canaries(engine.url, cards)
            return replace(known, canary=canary, counts=await self._counts(engine.url, cards))
        version = await self._or_default(self._admin.version(engine.url), "")
        canary, template_tokens = await self._canaries(engine.url, cards)
        block_size = engine.block_size or metrics.block_size
        longest = min((card.max_model_len for card in cards if card.max_model_len), default=None)
        adapters = frozenset(card.id for card in cards if card.parent is not None)
        return Evidence(
            names,
            version,
            block_size,
            canary,
            template_tokens,
            metrics.started,
            longest,
            adapters,
            metrics.kv_blocks,
            self._asks_derender and await derenders(self._admin, engine.url),
            await self._counts(engine.url, cards),
            metrics.caches_prefixes,
        )

    def _renders_as_others(self, known: Evidence) -> bool:
        others = (one.in_ledger for one in self._engines.values())
        return all(
            other.evidence is None or not other.up or known.renders_as(other.evidence)
            for other in others
        )

    async def _canaries(
        self, url: str, cards: list[ModelCard]
    ) -> tuple[tuple[tuple[int, ...], ...], int]:
        """Return the ids of the canary as a prompt and as a chat for each base model, and the
        template's own length.
        """
        found: list[tuple[int, ...]] = []
        overhead = 0
        for card in _bases(cards):
            plain = await self._ids(url, {"model": card.id, "prompt": CANARY})
            chat = await self._ids(
                url, {"model": card.id, "messages": [{"role": "user", "content": CANARY}]}
            )
            found += [plain, chat]
            overhead = max(overhead, len(chat) - len(plain) + 2)
        return tuple(found), overhead

    async def _counts(self, url: str, cards: list[ModelCard]) -> tuple[int | None, ...]:
        """Return the length of the canary as a message for each base model. Engines render messages
        by options of their own: whether thinking is off may be an effort of the template.
        """
        if not self._asks_messages:
            return ()
        said = {
            "system": CANARY,
            "messages": [{"role": "user", "content": CANARY}],
            "thinking": {"type": "disabled"},
        }
        questions = (
            self._admin.message_tokens(url, {"model": card.id, **said}) for card in _bases(cards)
        )
        return tuple([await self._or_default(question, None) for question in questions])

    async def _ids(self, url: str, body: dict[str, object]) -> tuple[int, ...]:
        # A base model without a chat template answers 400. This distinguishes it, too.
        return await self._or_default(self._admin.tokenize(url, body), ())

    async def _or_default(self, question: Awaitable[_T], default: _T) -> _T:
        """Return the default where the engine has no such route or refuses it; raise other
        failures, which may be temporary.
        """
        try:
            return await question
        except EngineRefusedError as error:
            if error.status not in (400, 403, 404, 405, 501):
                raise
            logger.debug("left open: %s", error.message)
            return default
