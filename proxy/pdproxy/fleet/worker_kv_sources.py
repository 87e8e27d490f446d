"""KV events with several workers, of engines that connect: each connection is that of one worker,
and all need its messages.

The worker that has an engine's connection takes the messages itself, and tells them to the others.
Each has sources of its own for all engines: it finds gaps, and asks for replays, as a process that
serves alone. Nothing that is lost between workers stays unseen; whoever may lack something of an
engine asks it again, as behind a lost connection, once per second at most. These rules are kept:

- A message that was read before the newest one that was taken, by another worker, is dropped: that
  worker has lost the connection since. So is one that was read before the engine's present run was
  found. Times are those of the machine's clock, which all processes have in common.
- A worker that stood still may have lost connections: its sockets are closed and bound again before
  it takes anything more. Engines that see no sign of it for `LEAVE_AFTER` seconds connect again by
  themselves, to another worker.
- What a worker tells is numbered. Who misses a number may have missed anything.
- What is not told since it would be too much is named.
- Each worker tells something every `LOOK_EVERY` seconds. One that is silent for `GONE` seconds, or
  has bound its sockets again, has lost its connections, and perhaps messages that it had not read.
- Before a worker has subscribed to a topic, ZMQ drops messages that come to it. So one that begins
  binds its sockets once it knows the topics of all engines that are up, and each tells what it
  subscribes to.

A message is counted by the worker that has the connection. What happens to an engine that no worker
has heard is counted by the one that leads.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import msgspec

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.kv_events import Index, SourceCounts
from pdproxy.fleet.kv_source import COOLDOWN, KvEventReader, SourceParts
from pdproxy.fleet.kv_sources import Key, KvEventSources
from pdproxy.kit.clock import Clock
from pdproxy.kit.engine_networks import USUAL, EngineNetworks
from pdproxy.kit.leading import Lead
from pdproxy.kit.siblings import STALE
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import Observers
from pdproxy.settings.kv import EngineKvEvents, KvEvents
from pdproxy.settings.limits import Deadlines
from pdproxy.upstream.addresses import Resolve, by_system
from pdproxy.upstream.inbound_socket import AT_ONCE, AT_ONCE_BYTES
from pdproxy.upstream.kv_events import Replay
from pdproxy.wire import kv_events as wire
from pdproxy.wire.kv_events import MAX_BYTES

LOOK_EVERY = 0.5
LEAVE_AFTER = 5.0
"""More than `STALE` and the time between two signs of life (`upstream.kv_events.PING_MS`): no
engine leaves a worker that takes its messages.
"""
GONE = 5.0
PATIENCE = 5.0
"""Seconds for engines that are up to say where they publish. Then engines may connect to this
worker, too.
"""
BYTES_PER_SECOND, MOST_AT_ONCE = 4 << 20, MAX_BYTES + (1 << 20)
"""Bytes of one engine's rank that are told per second, and after a pause at once. Usual ones have
some hundred KB.
"""
TOLD_AT_ONCE = 1 << 20
"""Bytes of messages that wait to be told at once, but for the last message."""
MAX_QUEUED = 8 << 20
"""Bytes of messages of others that wait to be taken."""
MAX_NAMED = 1024
"""Topics that are named at once."""
_OF_ITS_OWN = 1024
"""Bytes for which a message counts beside its payload."""


class _Message(msgspec.Struct, array_like=True, frozen=True):
    """`at`: when it was read, in seconds of the machine's clock."""

    key: Key
    number: int
    at: float
    payload: bytes


class _Told(msgspec.Struct, array_like=True, frozen=True):
    """What a worker tells. `since`: when its sockets were bound; `count`: what it has told since
    then before this.

    `lost`: topics of which messages were not told; `opened`: those to which it has just subscribed.
    """

    worker: int
    since: float
    count: int
    messages: list[_Message]
    lost: list[Key]
    opened: list[Key]


@dataclass(slots=True)
class _Worker:
    """Another worker. `heard`: when, in seconds of the clock, infinite: it has gone; `count`: what
    it tells next.
    """

    since: float
    count: int
    heard: float


@dataclass(slots=True, eq=False)
class _Rank:
    """A rank that connects. `reader`: the worker that has read its newest message, at `at`, and
    when that had bound its sockets.

    `space`: bytes that may be told, as of `filled`; `asked`: when it was last asked because of a
    doubt.
    """

    url: str
    has_replays: bool
    source: _Source
    counts: SourceCounts
    reader: tuple[int, float] | None = None
    at: float = -math.inf
    space: float = MOST_AT_ONCE
    filled: float = 0.0
    asked: float = -math.inf


class _Source(KvEventReader):
    """A source that knows when its engine's run was found: what any worker had read before belongs
    to another one.
    """

    def __init__(
        self,
        parts: SourceParts,
        place: int,
        engine: str,
        open_replay: Callable[[], Replay] | None,
        counts: SourceCounts,
    ) -> None:
        super().__init__(parts, place, engine, open_replay, counts=counts)
        self.since = self._parts.clock.now()

    def restarted(self, *, ask: bool = True) -> None:
        """See the base."""
        self.since = self._parts.clock.now()
        super().restarted(ask=ask)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Told).decode


class WorkerKvEventSources(KvEventSources):
    """The sources of worker `number`. `tell`: sends something to all others, and returns whether it
    could.

    `lead`: who counts what belongs to no worker.
    """

    leave_after = LEAVE_AFTER

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
        number: int,
        lead: Lead,
        tell: Callable[[bytes], bool],
    ) -> None:
        self._number = number
        self._lead = lead
        self._tell = tell
        self._shared: dict[Key, _Rank] = {}
        self._uncounted = SourceCounts()
        self._workers: dict[int, _Worker] = {}
        self._count = 0
        self._due: list[_Message] = []
        self._size = 0
        self._lost: dict[Key, None] = {}
        self._opened: dict[Key, None] = {}
        self._is_due = False
        self._queue: deque[tuple[tuple[int, float], _Message]] = deque()
        self._queued = 0
        self._doubted: dict[Key, float] = {}
        """Since when messages of a topic may be lost: its engine is to be asked, unless a later
        message comes.
        """
        self._taking = False
        self._listens = False
        """Whether the sockets are bound, and what comes there is taken."""
        self._bind: Callable[[], None] = lambda: None
        super().__init__(
            engines,
            index,
            own,
            of_engine,
            ask,
            observers,
            clock,
            tasks,
            ports=ports,
            deadlines=deadlines,
            networks=networks,
            resolved=resolved,
        )
        self._born = self._since = self._looked = self._clock.now()

    def start(self, bind: Callable[[], None]) -> None:
        """Take what comes, and tell it, once engines' topics are known. `bind` binds the sockets,
        also after they were closed.
        """
        self._bind = bind
        self._tasks.keep(self._follow, "KV events of all workers")

    async def _follow(self) -> None:
        while True:
            self.look()
            # At the same moments in all workers: those that begin bind at once, and connections
            # that wait are spread over them.
            await asyncio.sleep(LOOK_EVERY - self._clock.now() % LOOK_EVERY)

    def look(self) -> None:
        """Show that this worker is there, and look who else is. Call it every `LOOK_EVERY`
        seconds.
        """
        now = self._clock.now()
        self._stood_still(now)
        self._looked = now
        if not self._listens and (self._knows_topics() or now - self._born > PATIENCE):
            self._listen()
        self._pass_on()
        for number, worker in self._workers.items():
            if now - worker.heard > GONE:
                worker.heard = math.inf  # once; its next message goes on from its last one
                self._left(number, worker.since)
        for rank in self._shared.values():
            if rank.reader is None:
                self._count_in(rank)
        for key in [key for key in self._doubted if now - self._shared[key].asked >= COOLDOWN]:
            del self._doubted[key]
            self._shared[key].asked = now
            self._shared[key].source.look_again()

    # -- what comes to this worker

    def _received(self, port: int, topic: bytes, number: int, payload: bytes) -> None:
        key, now = (port, topic.decode(errors="replace")), self._clock.now()
        rank = self._shared.get(key)
        if rank is None:
            self.counts.skipped["unknown_topic"] += 1
        elif not self._listens or self._stood_still(now):
            self.counts.messages[rank.url, "dropped"] += 1
        else:
            message = _Message(key, number, now, payload)
            self._put(message, rank)
            self._take((self._number, self._since), rank, message)

    def _stood_still(self, now: float) -> bool:
        """Return whether this worker has stood still. Its sockets are closed then: soon, since one
        may be read just now.
        """
        stood = self._listens and now - self._looked > STALE
        if stood:
            self._listens = False
            asyncio.get_running_loop().call_soon(self._listen)
        return stood

    def _knows_topics(self) -> bool:
        """Return whether all engines that are up were asked where they publish."""
        return all(
            engine.in_ledger.probed
            and (not engine.in_ledger.up or (entry.task is not None and entry.task.done()))
            for engine, entry in self._entries.items()
        )

    def _listen(self) -> None:
        """Bind the sockets, and begin anew with telling."""
        if self._listens:
            return
        for subscription in self.bound.values():
            subscription.close()
        try:
            self._bind()
        except Exception as error:  # no file is left, perhaps: it is tried again
            self._failed(error)
            return
        before, self._since, self._count = self._since, self._clock.now(), 0
        self._listens, self._looked = True, self._since
        for worker in self._workers.values():
            worker.heard = self._since  # what they have told meanwhile is not read yet
        self._left(self._number, before)

    # -- telling others

    def _put(self, message: _Message, rank: _Rank) -> None:
        """Have a message told to the others, as much as one rank may take of that."""
        size = len(message.payload) + _OF_ITS_OWN
        rank.space = min(rank.space + (message.at - rank.filled) * BYTES_PER_SECOND, MOST_AT_ONCE)
        rank.filled = message.at
        if size > rank.space:
            self._not_told([message])
            return
        rank.space -= size
        self._due.append(message)
        self._size += size
        if self._size >= TOLD_AT_ONCE:
            self._pass_on()
        else:
            self._soon()

    def _soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._pass_on)

    def _not_told(self, messages: Iterable[_Message]) -> None:
        for message in messages:
            self.counts.skipped["not_passed"] += 1
            self._lost[message.key] = None

    def _pass_on(self) -> None:
        due, self._due, self._size, self._is_due = self._due, [], 0, False
        lost, opened = list(islice(self._lost, MAX_NAMED)), list(islice(self._opened, MAX_NAMED))
        if not self._tell(
            _encode(_Told(self._number, self._since, self._count, due, lost, opened))
        ):
            self._not_told(due)  # they are named later
            return
        self._count += 1
        for named, found in ((self._lost, lost), (self._opened, opened)):
            for key in found:
                del named[key]

    # -- what others tell

    def received(self, body: bytes) -> None:
        """Take what another worker tells."""
        told, now = _decode(body), self._clock.now()
        worker = self._workers.get(told.worker)
        # what it told before that, this worker had no use for
        if worker is None and told.since <= self._born:
            worker = _Worker(told.since, told.count, now)
        if worker is None or worker.since != told.since:  # it may have had connections before
            self._left(told.worker, self._born if worker is None else worker.since)
            missed = told.count > 0
        else:
            missed = told.count != worker.count
        self._workers[told.worker] = _Worker(told.since, told.count + 1, now)
        if missed:
            self._doubt(self._shared)
        self._doubt(told.lost)
        self._doubt(key for key in told.opened if self._may_be_at(key, told.worker))
        for message in told.messages:
            if self._queued >= MAX_QUEUED:
                self.counts.skipped["not_passed"] += 1
                self._doubt([message.key])
            else:
                self._queue.append(((told.worker, told.since), message))
                self._queued += len(message.payload) + _OF_ITS_OWN
        self._go_on()

    def _may_be_at(self, key: Key, number: int) -> bool:
        """Return whether a rank may have, or have had, its connection with a worker.

        It may have moved there without anybody having read anything. To ask is cheap; to forget
        what can't be asked for is not: that is left where another worker has its newest message.
        """
        rank = self._shared.get(key)
        return rank is not None and (
            rank.has_replays or rank.reader is None or rank.reader[0] == number
        )

    def _left(self, number: int, since: float) -> None:
        """A worker has lost its connections."""
        self._doubt([key for key in self._shared if self._may_be_at(key, number)])
        for rank in self._shared.values():
            if rank.reader == (number, since):
                rank.reader = None
                self._count_in(rank)

    def _doubt(self, keys: Iterable[Key]) -> None:
        now = self._clock.now()
        self._doubted |= {key: now for key in keys if key in self._shared}

    def _go_on(self) -> None:
        if self._queue and not self._taking:
            self._taking = True
            asyncio.get_running_loop().call_soon(self._take_some)

    def _take_some(self) -> None:
        """Take a portion of what others have told, so that streams flow in between."""
        self._taking = False
        taken = 0
        for _ in range(AT_ONCE):
            if not self._queue or taken >= AT_ONCE_BYTES:
                break
            reader, message = self._queue.popleft()
            taken += len(message.payload)
            self._queued -= len(message.payload) + _OF_ITS_OWN
            if (rank := self._shared.get(message.key)) is not None:
                try:
                    self._take(reader, rank, message)
                except Exception as error:
                    # a defect here must not lose the messages behind this one
                    self._failed(error)
        self._go_on()

    def _take(self, reader: tuple[int, float], rank: _Rank, message: _Message) -> None:
        if message.at < rank.source.since or (rank.reader != reader and message.at < rank.at):
            rank.counts.messages[rank.url, "stale"] += 1
            return
        if rank.reader != reader:
            rank.reader = reader
            self._count_in(rank)
        rank.at = message.at
        if self._doubted.get(message.key, math.inf) < message.at:
            del self._doubted[message.key]  # if anything is missing before it, its number says so
        rank.source.receive(message.number, message.payload)

    # -- engines

    def _connecting(
        self, key: Key, place: int, url: str, replays: Callable[[], Replay] | None
    ) -> KvEventReader:
        counts = SourceCounts()
        source = _Source(self.parts, place, url, replays, counts=counts)
        rank = self._shared[key] = _Rank(url, replays is not None, source, counts)
        self._count_in(rank)
        self._opened[key] = None
        self._soon()
        return source

    def _count_in(self, rank: _Rank) -> None:
        """Have one worker count what is done with a rank's messages."""
        counts = self._lead.leads if rank.reader is None else rank.reader[0] == self._number
        to = self.counts if counts else self._uncounted
        own = rank.counts
        own.messages, own.gaps, own.replays = to.messages, to.gaps, to.replays
        own.blocks, own.skipped = to.blocks, to.skipped

    def _disconnected(self, key: Key) -> None:
        super()._disconnected(key)
        del self._shared[key]
        for named in (self._lost, self._opened):
            named.pop(key, None)
        self._doubted.pop(key, None)

    def close(self) -> None:
        """See the base."""
        super().close()
        self._shared.clear()

    def removed(self, engine: Engine) -> None:
        """See the base."""
        super().removed(engine)
        for counted in (self._uncounted.messages, self._uncounted.gaps):
            for labels in [labels for labels in counted if labels[0] == engine.url]:
                del counted[labels]
