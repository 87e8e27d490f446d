"""Wiring of what is known of engines' prefix caches: the indexes, the engines that they are about,
their metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields

from pdproxy.app.kv_events import ReadingKvEvents
from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.description import Label, MergeRule, Samples, counter, gauge
from pdproxy.observe.events import Event, NodeChanged, Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.prefix.block_index import BlockIndex
from pdproxy.scheduling.prefix.knowledge import Knowledge
from pdproxy.scheduling.prefix.refreshing import Refreshing
from pdproxy.scheduling.prefix.routed import RoutedIndex
from pdproxy.scheduling.prefix.speculative import SpeculativeIndex
from pdproxy.serving.dispatch.prefixes import PrefixQuestions
from pdproxy.settings.pools import Pool

TIDY_AT_ONCE = 2048
"""Blocks that are removed in one turn of the event loop: half a millisecond."""
TIDY_PAUSE = 0.01
IDLE = 1.0
"""Seconds between two looks for blocks that are to be removed."""
SPECULATIVE_KEYS = 200_000
"""Keys of prompts that were just routed, in each of two generations."""
BASES = (
    ("events", "the engine's KV events"),
    ("routing", "the prompts that were sent to it"),
    ("text", "the text of prompts that were sent to it: an estimate"),
)
RESULTS = (
    ("exact", "the engine had found as much in its cache"),
    ("too_high", "it had found less"),
    ("too_low", "it had found more"),
)
TOKENS = (
    ("predicted", "expected in the cache"),
    ("reported", "found there"),
    ("over", "expected and not found"),
    ("under", "found and not expected"),
)
_BASIS = Label("basis", BASES)
PREFIX_PREDICTIONS = counter(
    "pdproxy_prefix_predictions_total",
    "answers",
    "Answers by how right the expectation was of what the engine had in its cache of the prompt "
    "(cached_tokens)",
    _BASIS,
    Label("result", RESULTS),
)
PREFIX_TOKENS = counter(
    "pdproxy_prefix_tokens_total",
    "tokens",
    "Prompt tokens of these answers",
    _BASIS,
    Label("what", TOKENS),
)
PREFIX_BLOCKS = gauge(
    "pdproxy_prefix_blocks",
    "blocks",
    "Blocks that are known of engines' prefix caches",
    Label(
        "from",
        (
            ("events", "of KV events (prefixes.max_blocks)"),
            ("routing", "of what was sent to engines without events, and of texts"),
            ("just_routed", "of what was sent in the last seconds (prefixes.ttl)"),
        ),
    ),
    workers=MergeRule.MOST,  # each has what all were told
)
PREFIX_EVENT_BLOCKS = counter(
    "pdproxy_prefix_event_blocks_total",
    "blocks",
    "Blocks of KV events by what became of them in the index",
    Label(
        "result",
        (
            ("stored", "entered"),
            ("removed", "taken out: evicted"),
            ("repeated", "known already"),
            (
                "unknown_parent",
                (
                    "not entered: the block before them is not known, for its message was lost, "
                    "or came before anybody listened"
                ),
            ),
            ("unknown_block", "evicted, or stored without tokens, and not known"),
            ("odd", "not entered: their size does not fit prefixes.unit, or a token id is none"),
            ("not_counted", "of groups that say nothing about hits"),
            ("no_space", "not entered, or taken out, for prefixes.max_blocks"),
        ),
    ),
)
PREFIX_DISPROVED = counter(
    "pdproxy_prefix_disproved_total",
    "prompts",
    "Beginnings that were dropped: an engine lacked what its events had said of them more than "
    "once",
)
PREFIX_SKIPPED = counter(
    "pdproxy_prefix_skipped_total",
    "prompts",
    "Prompts of which less is known because of a bound",
    Label(
        "reason",
        (
            (
                "busy",
                "64 long prompts were waiting for their keys already: no cache was searched for it",
            ),
            (
                "no_space",
                (
                    "prompts of the last seconds have more keys than are kept: some do not count "
                    "as "
                    "just sent"
                ),
            ),
        ),
    ),
)
PREFIX_REFRESHES = counter(
    "pdproxy_prefix_refreshes_total",
    "requests",
    "Requests that asked their engine to report the blocks that it reuses, since it had more in "
    "its cache than was known",
    Label(
        "result",
        (
            ("asked", "sent with vllm_xargs"),
            ("refused", "answered 400; an engine that does so three times in a row gets no more"),
        ),
    ),
)


class KnowingPrefixes:
    """What a pool knows of its engines' prefix caches. A watcher of engines and an observer."""

    only = (NodeChanged,)

    def __init__(
        self, knowledge: Knowledge, engines: EngineRegistry, now: Callable[[], float]
    ) -> None:
        self.knowledge = knowledge
        self.of_requests = PrefixQuestions(knowledge, now)
        self._engines = engines
        self._runs: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<KnowingPrefixes {len(self.knowledge.blocks)} blocks>"

    def added(self, engine: Engine) -> None:
        """Know one more engine."""
        self.knowledge.add(engine.url)

    def removed(self, engine: Engine) -> None:
        """Forget an engine."""
        if engine.url == self._engines.replaced:
            return  # its cache is the same
        self.knowledge.remove(engine.url)
        self._runs.pop(engine.url, None)

    def notify(self, event: Event) -> None:
        """An engine has come up: perhaps another run of it."""
        if not isinstance(event, NodeChanged) or (engine := self._engines.get(event.node)) is None:
            return
        ledger_engine = engine.in_ledger
        if not ledger_engine.up or ledger_engine.evidence is None:
            return
        same = (
            self._runs.get(engine.url, ledger_engine.run_number) == ledger_engine.run_number
            or engine.url == self._engines.replaced
        )
        if not same:
            self.knowledge.restarted(engine.url)
        self._runs[engine.url] = ledger_engine.run_number
        blocks = ledger_engine.evidence.kv_blocks
        self.knowledge.add(
            engine.url,
            engine.block_size or ledger_engine.evidence.block_size,
            None if blocks is None else blocks * engine.ranks,
        )

    def stop(self) -> None:
        """End the thread."""
        self.of_requests.stop()

    def start(self, tasks: TaskOwner) -> None:
        """Begin to remove what matches nothing any more."""
        tasks.keep(self.tidy, "prefixes")

    async def tidy(self) -> None:
        """Remove what matches nothing any more, in small steps, until cancelled."""
        while True:  # noqa: ASYNC110 - events leave something to remove so often that a signal would cost more
            await asyncio.sleep(TIDY_PAUSE if self.knowledge.tidy(TIDY_AT_ONCE) else IDLE)

    def show(self, observers: Observers) -> None:
        """Show the metrics."""
        knowledge = self.knowledge

        def predictions() -> Samples:
            for basis, score in knowledge.scores.items():
                for result, _ in RESULTS:
                    yield (basis, result), getattr(score, result)

        def tokens() -> Samples:
            for basis, score in knowledge.scores.items():
                for what, _ in TOKENS:
                    yield (basis, what), getattr(score, what)

        def kept() -> Samples:
            yield ("events",), len(knowledge.blocks)
            yield ("routing",), len(knowledge.routing)
            yield ("just_routed",), len(knowledge.speculative)

        def blocks() -> Samples:
            counters = knowledge.blocks.counters
            return [((one.name,), getattr(counters, one.name)) for one in fields(counters)]

        def skipped() -> Samples:
            return [
                (("busy",), self.of_requests.skipped),
                (("no_space",), knowledge.speculative.no_space),
            ]

        def refreshes() -> Samples:
            return [
                (("asked",), knowledge.refreshing.asked),
                (("refused",), knowledge.refreshing.refused),
            ]

        observers.show(PREFIX_PREDICTIONS, predictions)
        observers.show(PREFIX_TOKENS, tokens)
        observers.show(PREFIX_BLOCKS, kept)
        observers.show(PREFIX_EVENT_BLOCKS, blocks)
        observers.show(PREFIX_DISPROVED, lambda: [((), knowledge.disproved)])
        observers.show(PREFIX_SKIPPED, skipped)
        observers.show(PREFIX_REFRESHES, refreshes)


def build_knowledge(pool: Pool, *, several: bool) -> Knowledge | None:
    """Return what knows engines' prefix caches, None if the pool's policies do not ask for it.
    `several`: whether engines have several proxies.
    """
    own = pool.prefixes
    if not pool.asks_the_index:
        return None
    refreshes = own.refresh and pool.kv_events.enabled
    return Knowledge(
        own.unit,
        BlockIndex(own.unit, own.max_blocks, others_ask=refreshes and several),
        RoutedIndex(own.engine_blocks, own.max_blocks),
        SpeculativeIndex(own.ttl, SPECULATIVE_KEYS),
        Refreshing(on=refreshes),
    )


def build_prefixes(
    knowledge: Knowledge | None,
    engines: EngineRegistry,
    ledger: Ledger,
    observers: Observers,
    now: Callable[[], float],
    kv_events: ReadingKvEvents | None,
    *,
    chooses: bool,
) -> KnowingPrefixes | None:
    """Return what keeps this knowledge, None where there is none. Call it before engines are added.
    `chooses`: whether this process chooses engines by it; if not, it only says what prompts are
    known by.
    """
    if knowledge is None:
        return None
    knowledge.adapters = lambda: ledger.adapters
    if kv_events is not None:
        knowledge.places, knowledge.connected = (
            kv_events.sources.places,
            kv_events.sources.connected,
        )
    prefixes = KnowingPrefixes(knowledge, engines, now)
    prefixes.show(observers)
    if chooses:
        engines.watch(prefixes)
        engines.when_forgotten(knowledge.remove)
        observers.add(prefixes)
    return prefixes
