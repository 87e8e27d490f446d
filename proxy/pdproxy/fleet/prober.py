"""Probing: is each engine alive, and is it still the engine that it was?

Owns the rhythm of the questions; what they find is written to the ledger. An engine is asked for its full identity when it
is new or has restarted (its start time changed), and for its health alone otherwise.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pdproxy.fleet.audit import Auditor
from pdproxy.kit.errors import EngineError, EngineRefusedError, EngineTimeoutError, OverloadedError
from pdproxy.kit.frames import frames
from pdproxy.kit.text import cut
from pdproxy.observe.events import DeadlinePassed, NodeChanged, Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.nodes import Evidence, Node
from pdproxy.upstream.admin import EngineAdmin, ModelCard
from pdproxy.upstream.metrics_page import NO_METRICS, Scrape

logger = logging.getLogger("pdproxy.fleet")

CANARY = "The quick brown fox jumps over 13 lazy dogs.\n\tdéjà vu — 日本語 🦊"
"""Words, digits, white space, accents, CJK and an emoji: what tokenizers differ in."""


_T = TypeVar("_T")


MIN_GAP = 1.0
"""Seconds between two probes of an engine at the least."""
MOST_BASES = 16
"""Base models of an engine that are asked for the canary: an engine has one, under some names."""
PATIENCE = 3
"""Health questions in a row that may time out before an engine counts as down: a busy one answers late."""


class Prober:
    """Probes every engine of a pool each `interval` seconds, and reads its metrics each `scrape_interval` seconds."""

    def __init__(
        self,
        ledger: Ledger,
        admin: EngineAdmin,
        auditor: Auditor,
        observers: Observers,
        *,
        interval: float,
        scrape_interval: float,
        block_sizes: dict[str, int],
        now: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._admin = admin
        self._auditor = auditor
        self._observers = observers
        self._interval = interval
        self._scrape_every = max(1, round(scrape_interval / interval))
        self._block_sizes = block_sizes
        self._now = now
        self._late = {node.url: 0 for node in ledger.nodes}
        self._wake: dict[str, asyncio.Event] = {node.url: asyncio.Event() for node in ledger.nodes}

    async def run(self, node: Node) -> None:
        """Probe one engine for ever."""
        beat = 0
        while True:
            try:
                await self.probe(node, scrape=beat % self._scrape_every == 0)
            except OverloadedError as error:
                logger.warning("%s was not probed: %s", node.url, error.message)  # which says nothing of the engine
            except Exception as error:  # the next may not
                logger.error("a probe of %s failed in pdproxy itself: %s", node.url, frames(error))  # noqa: TRY400
            beat += 1
            wake = self._wake[node.url]
            try:
                async with asyncio.timeout(self._interval):
                    await wake.wait()
            except TimeoutError:
                pass
            if wake.is_set():
                wake.clear()
                beat = 0
                await asyncio.sleep(MIN_GAP)  # many legs may fail at once, and the engine be drowning

    def soon(self, url: str) -> None:
        """Probe an engine now: something about it has just changed."""
        self._wake[url].set()

    async def probe(self, node: Node, *, scrape: bool) -> None:
        """Ask one engine how it is, once, and write down the answer."""
        try:
            await self._admin.healthy(node.url)
            self._late[node.url] = 0
        except EngineError as error:
            self._count_late(node, error)
            self._late[node.url] = self._late[node.url] + 1 if isinstance(error, EngineTimeoutError) else PATIENCE
            if not node.alive or self._late[node.url] >= PATIENCE:
                self._lost(node, error)
            return
        if not scrape and node.alive:
            return
        try:
            metrics = await self._scraped(node)
            evidence = await self._evidence(node, metrics)
        except EngineError as error:
            self._count_late(node, error)
            if not node.alive:  # a healthy engine keeps what is known of it until it has time to answer
                self._lost(node, error)
            return
        if self._ledger.saw(node.url, evidence):
            reason = f"{cut(','.join(sorted(evidence.models)))} on vLLM {evidence.version or '?'}"
            self._observers.notify(NodeChanged(node.url, node.role.value, up=True, reason=reason))
        self._auditor.scraped(node, metrics)

    def _count_late(self, node: Node, error: EngineError) -> None:
        if isinstance(error, EngineTimeoutError):
            self._observers.notify(DeadlinePassed(error.wait.value, node.url))

    def _lost(self, node: Node, error: EngineError) -> None:
        if self._ledger.lost(node.url, error.message, self._now()):
            self._observers.notify(NodeChanged(node.url, node.role.value, up=False, reason=error.message))

    async def _scraped(self, node: Node) -> Scrape:
        """Return the engine's metrics, empty ones if it has none to show: they are no condition for serving."""
        return await self._or_default(self._admin.scrape(node.url), NO_METRICS)

    async def _evidence(self, node: Node, metrics: Scrape) -> Evidence:
        known = node.evidence if node.alive else None  # one that was down may be another one now
        cards = await self._admin.models(node.url)
        names = frozenset(card.id for card in cards)
        if known is not None and known.started == metrics.started and known.models == names:
            return known
        version = await self._or_default(self._admin.version(node.url), "")
        canary, template_tokens = await self._canaries(node.url, cards)
        block_size = self._block_sizes.get(node.url) or metrics.block_size
        return Evidence(names, version, block_size, canary, template_tokens, metrics.started)

    async def _canaries(self, url: str, cards: list[ModelCard]) -> tuple[tuple[tuple[int, ...], ...], int]:
        """Return the ids of the canary as a prompt and as a chat for each base model, and the template's own length."""
        found: list[tuple[int, ...]] = []
        overhead = 0
        for card in sorted((c for c in cards if c.parent is None), key=lambda c: c.id)[:MOST_BASES]:
            plain = await self._ids(url, {"model": card.id, "prompt": CANARY})
            chat = await self._ids(url, {"model": card.id, "messages": [{"role": "user", "content": CANARY}]})
            found += [plain, chat]
            overhead = max(overhead, len(chat) - len(plain) + 2)
        return tuple(found), overhead

    async def _ids(self, url: str, body: dict[str, object]) -> tuple[int, ...]:
        # A base model without a chat template answers 400: that is its identity, too.
        return await self._or_default(self._admin.tokenize(url, body), ())

    async def _or_default(self, question: Awaitable[_T], default: _T) -> _T:
        """Return the default where the engine has no such route or refuses it; any other failure may pass and is raised."""
        try:
            return await question
        except EngineRefusedError as error:
            if error.status not in (400, 403, 404, 405, 501):
                raise
            logger.debug("left open: %s", error.message)
            return default
