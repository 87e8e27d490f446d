"""Where engines publish KV events: finds their sources, keeps one subscription to each, and has
them forget runs that are over.

Owns the sources by engine and rank, and the places of the index that belong to them. Each engine
that has come up, or has started again, is asked where it publishes (`GET /kv_event_sources`),
unless the settings say it. Most are connected to. Those whose endpoint names a host and a port of
ours connect themselves: they share a socket here, and their topics tell them apart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from urllib.parse import urlsplit

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.kv_events import Feed, Index, SourceCounts
from pdproxy.fleet.kv_source import MAX_REPLAYS, KvEventReader, SourceParts
from pdproxy.kit.addresses import read_address
from pdproxy.kit.clock import Clock, sleep
from pdproxy.kit.engine_networks import USUAL, EngineNetworks
from pdproxy.kit.errors import EngineError, EngineRefusedError, EngineTimeoutError
from pdproxy.kit.tasks import TaskOwner
from pdproxy.kit.text import truncate
from pdproxy.observe.description import NODE, Description, Label, MergeRule, Samples, counter, gauge
from pdproxy.observe.events import DeadlinePassed, Event, NodeChanged, Observers
from pdproxy.settings.kv import EngineKvEvents, KvEvents
from pdproxy.settings.limits import Deadlines
from pdproxy.upstream.addresses import Resolve, by_system
from pdproxy.upstream.kv_events import KvEventSockets, Subscription
from pdproxy.wire import kv_events as wire

logger = logging.getLogger("pdproxy.kv")

SOON, SELDOM = 0.5, 30.0
"""Seconds until an engine that has not answered is asked again: at first, and at most."""
_NO_ROUTE = (404, 405)
"""What older releases answer."""
NONE = "publishes no KV events: start it with --kv-events-config"
Key = tuple[int, str]
"""What tells ranks that connect apart: our port, and their topic."""
RESULTS = (
    ("live", "taken as it was published"),
    ("replayed", "taken from a replay"),
    ("repeated", "a replay had brought it before"),
    ("stale", "it belongs to a run of the engine that is over"),
    ("dropped", "there was no space for it; it is asked for again"),
)
CAUSES = (
    ("lost", "messages are missing before it"),
    ("restart", "it belongs to another run of the engine"),
)
REPLAYS = (
    ("complete", "all that was missing has come"),
    ("too_old", "the engine does not keep that much: what is known of it begins later"),
    ("unanswered", "no answer in deadlines.kv_replay: all of the engine was forgotten"),
    ("incomplete", "messages are still missing: all of the engine was forgotten"),
    (
        "failed",
        "what came was no answer, or the address can't be used: all of the engine was forgotten",
    ),
    (
        "unavailable",
        "the engine has no replay_endpoint, or replays have just failed: all of it was forgotten",
    ),
)
SKIPPED = (
    ("undecodable", "a message or an event that can't be read"),
    ("unknown_event", "an event of a type that pdproxy does not know"),
    ("unknown_field", "a field that pdproxy does not know; the event was taken"),
    ("inconsistent", "the numbers of blocks and tokens do not agree"),
    ("unknown_topic", "a message of a topic that is no engine's"),
)
KV_EVENT_MESSAGES = counter(
    "pdproxy_kv_event_messages_total",
    "messages",
    "Messages with KV events of engines",
    NODE,
    Label("result", RESULTS),
)
KV_EVENT_BLOCKS = counter(
    "pdproxy_kv_event_blocks_total",
    "blocks",
    "Blocks that engines have reported",
    Label(
        "change",
        (
            ("stored", "in a cache now, or announced again"),
            ("removed", "evicted"),
            ("cleared", "counts caches that were emptied, not blocks"),
        ),
    ),
)
KV_EVENTS_SKIPPED = counter(
    "pdproxy_kv_events_skipped_total",
    "events",
    "What was skipped of KV events",
    Label("reason", SKIPPED),
)
KV_EVENT_GAPS = counter(
    "pdproxy_kv_event_gaps_total",
    "gaps",
    "Messages with KV events that do not follow the one before",
    NODE,
    Label("cause", CAUSES),
)
KV_EVENT_REPLAYS = counter(
    "pdproxy_kv_event_replays_total",
    "replays",
    "Requests to engines for messages that were published before, at the start and after gaps",
    Label("result", REPLAYS),
)
KV_EVENT_SOURCES = gauge(
    "pdproxy_kv_event_sources",
    "sources",
    "Data-parallel ranks of engines whose KV events are read",
    Label("state", (("connected", "there is a connection"), ("not_connected", "there is none"))),
    workers=MergeRule.MOST,
)
KV_EVENT_AGE = gauge(
    "pdproxy_kv_event_age_seconds",
    "seconds",
    "Time since the last message of an engine's ranks, once there was one. An idle engine sends "
    "none",
    NODE,
    workers=MergeRule.MOST,
)
KV_EVENT_BACKLOG = gauge(
    "pdproxy_kv_event_backlog_bytes",
    "bytes",
    "KV events that were received and are not indexed yet",
    workers=MergeRule.SUM,
)


@dataclass(frozen=True, slots=True)
class PublisherAddress:
    """Where one rank publishes: ZMQ addresses. `port`: of ours, to which the engine connects; None:
    it is connected to.
    """

    publishes: str
    replays: str | None
    topic: str
    port: int | None = None


@dataclass(slots=True)
class _Rank:
    address: PublisherAddress
    source: KvEventReader
    subscription: Subscription | None


@dataclass(slots=True)
class _Entry:
    """One engine. `run`: the run whose sources are known, None while the engine is down; `trouble`:
    why it has no source.
    """

    ranks: dict[int, _Rank] = field(default_factory=dict)
    run: int | None = None
    trouble: str | None = None
    task: asyncio.Task[None] | None = None


class KvEventSources:
    """The sources of a pool's engines. A watcher of engines and an observer. It feeds `index`.

    `own`: the pool's settings, `of_engine`: those of one engine by its URL. `ask(url)` asks an
    engine, and raises EngineError. `ports`: at which engines may connect, none without `own.host`.
    `deadlines`: that of the answer of a replay. `networks`: those of engines: what they name
    elsewhere is not connected to. `resolved` returns the addresses of a name.
    """

    only = (NodeChanged,)

    def __init__(
        self,
        engines: EngineRegistry,
        index: Index,
        own: KvEvents,
        of_engine: Callable[[str], EngineKvEvents],
        ask: Callable[[str], Awaitable[wire.Sources]],
        observers: Observers,
        clock: Clock,
        tasks: TaskOwner,
        *,
        ports: Iterable[int],
        deadlines: Deadlines,
        networks: EngineNetworks = USUAL,
        resolved: Resolve = by_system,
    ) -> None:
        self._networks, self._resolved = networks, resolved
        self._engines, self._index, self._own, self._of_engine = engines, index, own, of_engine
        self._ask, self._observers, self._clock, self._tasks = ask, observers, clock, tasks
        self.counts = SourceCounts()
        failures = tasks.watch("KV events")
        self._feed = Feed(index, failures.failed)
        self._failed = failures.failed
        slots = asyncio.Semaphore(MAX_REPLAYS)
        self.parts = SourceParts(self._feed, self.counts, clock, observers, tasks, deadlines, slots)
        self._sockets = KvEventSockets()
        self._entries: dict[Engine, _Entry] = {}
        self._places: dict[tuple[str, int], int] = {}
        self._topics: dict[Key, KvEventReader] = {}
        self.bound: Mapping[int, Subscription] = {
            port: Subscription(partial(self._received, port), self._unreadable, self._failed)
            for port in ports
        }
        """The sockets to which engines connect, by port. They are bound by their owner."""
        engines.watch(self)
        self._show()

    def __repr__(self) -> str:
        return f"<KvEventSources {len(self._places)} places>"

    @property
    def places(self) -> Mapping[tuple[str, int], int]:
        """The places of the index by engine (its URL) and rank, for engines whose sources are
        known. Read only.
        """
        return self._places

    def connected(self, url: str) -> bool:
        """Return whether the events of all of an engine's ranks come, as far as that is known."""
        engine = self._engines.get(url)
        entry = None if engine is None else self._entries.get(engine)
        return (
            entry is not None
            and bool(entry.ranks)
            and all(one.source.connected for one in entry.ranks.values())
        )

    # -- engines

    def added(self, engine: Engine) -> None:
        """Read the events of one more engine, once it is up."""
        self._entries[engine] = _Entry()

    def removed(self, engine: Engine) -> None:
        """Read the events of an engine no more, and forget its places."""
        entry = self._entries.pop(engine, None)
        if entry is None:
            return
        if entry.task is not None:
            entry.task.cancel()
        for rank in list(entry.ranks):
            self._drop(engine, entry, rank)
        self._forget_places(engine, entry)
        for counted in (self.counts.messages, self.counts.gaps):
            for labels in [labels for labels in counted if labels[0] == engine.url]:
                del counted[labels]

    def notify(self, event: Event) -> None:
        """An engine has come up, or has gone down."""
        if not isinstance(event, NodeChanged) or (engine := self._engines.get(event.node)) is None:
            return
        entry = self._entries.get(engine)
        if entry is None:
            return
        if not engine.in_ledger.up:
            entry.run = None
            for one in entry.ranks.values():
                one.source.restarted(ask=False)
        elif entry.run != engine.in_ledger.run_number:
            entry.run = engine.in_ledger.run_number
            if entry.task is not None:
                entry.task.cancel()
            entry.task = self._tasks.spawn(
                self._find(engine, entry, entry.run), f"KV event sources {engine.url}"
            )

    async def _find(self, engine: Engine, entry: _Entry, run: int) -> None:
        """Find the sources of an engine's run."""
        override, pause = self._of_engine(engine.url), SOON
        endpoint = override.endpoint or self._own.endpoint
        while entry.run == run:
            try:
                found = (
                    _configured(endpoint, engine.ranks)
                    if endpoint is not None
                    else await self._ask(engine.url)
                )
            except EngineError as error:
                if isinstance(error, EngineRefusedError) and error.status in _NO_ROUTE:
                    self._apply(engine, entry, {}, {})
                    return
                if isinstance(error, EngineTimeoutError):
                    self._observers.notify(DeadlinePassed(error.wait.value, engine.url))
                entry.trouble = f"can't be asked for its KV events: {error.message}"
                await sleep(self._clock, pause)
                pause = min(2 * pause, SELDOM)
                continue
            try:
                wanted = await self._places_of(engine, found, override)
            except OSError:
                entry.trouble = "publishes KV events at a name that does not resolve"
                await sleep(self._clock, pause)
                pause = min(2 * pause, SELDOM)
                continue
            if entry.run == run:
                self._apply(engine, entry, found, wanted)
            return

    async def _places_of(
        self, engine: Engine, found: wire.Sources, override: EngineKvEvents
    ) -> Mapping[int, PublisherAddress | str]:
        """Return where each rank is read, or why it can't be."""
        host = urlsplit(engine.url).hostname or ""
        # a part of a larger group of ranks counts from another number
        in_place = len(found) == engine.ranks
        wanted: dict[int, PublisherAddress | str] = {}
        for place, (rank, config) in enumerate(sorted(found.items())):
            offset = place if in_place else rank
            replay = _offset(override.replay_endpoint or self._own.replay_endpoint, offset)
            topic = override.topic if override.topic is not None else self._own.topic
            config = wire.EventPublisher(
                config.endpoint,
                replay or config.replay_endpoint,
                topic if topic is not None else config.topic,
            )
            address = resolve(config, host, self.bound)
            wanted[offset] = address if isinstance(address, str) else await self._allowed(address)
        return wanted

    async def _allowed(self, address: PublisherAddress) -> PublisherAddress | str:
        """Return what an engine has named with addresses in place of names, or why the proxy does
        not connect there.

        ZMQ would resolve names itself, at each connection: nobody could look at what it finds.

        Raises:
            OSError: a name has no address now.
        """
        found: list[str | None] = []
        for named in (address.publishes if address.port is None else None, address.replays):
            if named is None or (place := wire.address_of(named, "")) is None:
                found.append(named)
                continue
            host, port, _ = place
            hosts = [host] if read_address(host) is not None else await self._resolved(host, port)
            usable = [one for one in hosts if self._networks.why_not(one) is None]
            if not usable:
                return (
                    f"publishes KV events at {truncate(named, 128)}: {hosts[0]} is "
                    f"{self._networks.why_not(hosts[0])}"
                )
            found.append(wire.zmq_address(min(usable, key=lambda one: ":" in one), port))
        publishes, replays = found
        return replace(address, publishes=publishes or address.publishes, replays=replays)

    def _apply(
        self,
        engine: Engine,
        entry: _Entry,
        found: wire.Sources,
        places: Mapping[int, PublisherAddress | str],
    ) -> None:
        """Subscribe to what was found, and to nothing else."""
        entry.trouble = next(
            (one for one in places.values() if isinstance(one, str)), None if found else NONE
        )
        wanted = {rank: one for rank, one in places.items() if not isinstance(one, str)}
        for rank in [rank for rank, one in entry.ranks.items() if wanted.get(rank) != one.address]:
            self._drop(engine, entry, rank)
        for rank, address in wanted.items():
            if rank in entry.ranks:
                entry.ranks[rank].source.restarted()
            else:
                self._open(engine, entry, rank, address)
        self._forget_places(engine, entry)

    def _forget_places(self, engine: Engine, entry: _Entry) -> None:
        """Forget the places of ranks that have no source any more: other knowledge of such an
        engine counts then.
        """
        for key in [
            key for key in self._places if key[0] == engine.url and key[1] not in entry.ranks
        ]:
            self._index.remove_place(self._places.pop(key))

    def _open(self, engine: Engine, entry: _Entry, rank: int, address: PublisherAddress) -> None:
        place = self._places.get((engine.url, rank))
        if place is None:
            place = self._places[engine.url, rank] = self._index.add_place()
        replays = (
            partial(self._sockets.replay, address.replays) if address.replays is not None else None
        )
        if address.port is not None:
            key = (address.port, address.topic)
            if key in self._topics:
                entry.trouble = (
                    f"publishes KV events to port {address.port} with the topic "
                    f"{truncate(address.topic, 64)!r}, as another"
                    " engine does: each one that connects needs its own"
                )
                return
            source = self._topics[key] = KvEventReader(self.parts, place, engine.url, replays)
            self.bound[address.port].subscribe(address.topic)
            entry.ranks[rank] = _Rank(address, source, None)
            source.begin()
        else:
            topic = address.topic.encode()

            def received(of: bytes, number: int, payload: bytes) -> None:
                if of == topic:
                    source.receive(number, payload)
                else:
                    self.counts.skipped["unknown_topic"] += 1

            def resume() -> None:
                subscription.resume()

            source = KvEventReader(self.parts, place, engine.url, replays, resume)
            subscription = Subscription(
                received,
                self._unreadable,
                self._failed,
                topic=address.topic,
                wanted=source.wanted,
                connected=source.state_changed,
            )
            try:
                self._sockets.connect(subscription, address.publishes)
            except OSError as error:
                entry.trouble = (
                    f"publishes KV events at {truncate(address.publishes, 128)}: {error.strerror}"
                )
                return
            entry.ranks[rank] = _Rank(address, source, subscription)
        logger.info(
            "KV events of %s, rank %d: from %s, %s",
            engine.url,
            rank,
            "its connection" if address.port is not None else truncate(address.publishes, 128),
            f"replays from {truncate(address.replays, 128)}"
            if address.replays
            else "no replays: a gap forgets all",
        )

    def _drop(self, engine: Engine, entry: _Entry, rank: int) -> None:
        one = entry.ranks.pop(rank)
        one.source.close()
        if one.subscription is not None:
            one.subscription.close()
        elif one.address.port is not None:
            self._topics.pop((one.address.port, one.address.topic), None)
            self.bound[one.address.port].unsubscribe(one.address.topic)
        self._index.restart(one.source.place)

    # -- messages

    def _received(self, port: int, topic: bytes, number: int, payload: bytes) -> None:
        """Take a message of an engine that connects."""
        source = self._topics.get((port, topic.decode(errors="replace")))
        if source is None:
            self.counts.skipped["unknown_topic"] += 1
        else:
            source.receive(number, payload)

    def _unreadable(self) -> None:
        self.counts.skipped["undecodable"] += 1

    def close(self) -> None:
        """Close all sockets. What was indexed stays."""
        for entry in self._entries.values():
            if entry.task is not None:
                entry.task.cancel()
            for one in entry.ranks.values():
                one.source.close()
                if one.subscription is not None:
                    one.subscription.close()
            entry.ranks.clear()
        for subscription in self.bound.values():
            subscription.close()
        self._topics.clear()
        self._sockets.close()

    # -- what an operator asks

    def _sources(self) -> Iterator[tuple[Engine, _Rank]]:
        for engine, entry in self._entries.items():
            for one in entry.ranks.values():
                yield engine, one

    def shortcomings(self) -> list[str]:
        """Return which engines' events are not read although they are up, a sentence each."""
        found = [
            f"{engine.url} {entry.trouble}"
            for engine, entry in self._entries.items()
            if engine.in_ledger.up and entry.trouble is not None
        ]
        for engine, one in self._sources():
            if engine.in_ledger.up and not one.source.connected and one.address.port is None:
                where = truncate(one.address.publishes, 128)
                found.append(
                    f"{engine.url}: no connection to {where}, where it publishes KV events"
                )
        return found

    def _show(self) -> None:
        """Show the metrics."""
        counts, show = self.counts, self._observers.show

        def sources() -> Samples:
            connected = [one.source.connected for _, one in self._sources()]
            return [
                (("connected",), sum(connected)),
                (("not_connected",), len(connected) - sum(connected)),
            ]

        def age() -> Samples:
            now, heard = self._clock.now(), dict[str, float]()
            for engine, one in self._sources():
                if one.source.heard is not None:
                    heard[engine.url] = max(
                        one.source.heard, heard.get(engine.url, one.source.heard)
                    )
            return [((url,), now - at) for url, at in heard.items()]

        def show_known(metric: Description, counted: Mapping[str, int]) -> None:
            show(
                metric, lambda: [((name,), counted.get(name, 0)) for name in metric.labels[0].known]
            )

        def show_by_engine(metric: Description, counted: Mapping[tuple[str, str], int]) -> None:
            engines, names = self._entries, metric.labels[1].known
            show(
                metric,
                lambda: [
                    ((e.url, name), counted.get((e.url, name), 0))
                    for e in engines
                    for name in names
                ],
            )

        show_by_engine(KV_EVENT_MESSAGES, counts.messages)
        show_by_engine(KV_EVENT_GAPS, counts.gaps)
        show_known(KV_EVENT_BLOCKS, counts.blocks)
        show_known(KV_EVENTS_SKIPPED, counts.skipped)
        show_known(KV_EVENT_REPLAYS, counts.replays)
        show(KV_EVENT_SOURCES, sources)
        show(KV_EVENT_AGE, age)
        show(KV_EVENT_BACKLOG, lambda: [((), self._feed.bytes)])


def resolve(
    config: wire.EventPublisher, host: str, ports: Collection[int]
) -> PublisherAddress | str:
    """Return where a rank is read, or why it can't be, as what follows an engine's name.

    `host`: the engine's own; `ports`: ours, to which engines may connect.
    """
    found = wire.address_of(config.endpoint, host)
    if found is None:
        return (
            f"publishes KV events at {truncate(config.endpoint, 128)!r}: only tcp://host:port "
            f"can be read"
        )
    replays = None
    if config.replay_endpoint is not None:
        # An engine binds this one, whatever its host is.
        if (place := wire.address_of(config.replay_endpoint, host)) is None:
            return (
                f"replays KV events at {truncate(config.replay_endpoint, 128)!r}: only "
                f"tcp://host:port can be read"
            )
        replays = wire.zmq_address(place[0], place[1])
    name, port, wildcard = found
    connects = not wildcard and port in ports
    return PublisherAddress(
        wire.zmq_address(name, port), replays, config.topic, port if connects else None
    )


def _configured(endpoint: str, ranks: int) -> wire.Sources:
    """Return the sources that the settings name: further ranks take the ports after the first
    one's, as in vLLM.
    """
    return {rank: wire.EventPublisher(_offset(endpoint, rank) or "") for rank in range(ranks)}


def _offset(endpoint: str | None, rank: int) -> str | None:
    if endpoint is None:
        return None
    place, _, port = endpoint.rpartition(":")
    return f"{place}:{int(port) + rank}"
