"""KV events of engines that connect, with several workers: whoever has a connection, or is killed,
all know the same.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from pdproxy.fleet import worker_kv_sources
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.kv_source import COOLDOWN
from pdproxy.fleet.worker_kv_sources import (
    GONE,
    LEAVE_AFTER,
    LOOK_EVERY,
    MOST_AT_ONCE,
    PATIENCE,
    TOLD_AT_ONCE,
    WorkerKvEventSources,
)
from pdproxy.kit.errors import EngineError
from pdproxy.kit.siblings import STALE
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import Event, NodeChanged, Observers
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.settings.kv import EngineKvEvents, KvEvents
from pdproxy.settings.limits import Deadlines
from pdproxy.upstream.inbound_socket import AT_ONCE
from pdproxy.wire import kv_events as wire
from tests.fakes.clock import ManualClock
from tests.fakes.kv_index import PlainIndex, payload, removed, stored
from tests.fakes.registry import unused_client
from tests.sim.raw import turns
from tests.unit.test_kv_source import Engine as Answers
from tests.unit.test_kv_source import Replay

PORT = 5557
KEPT = 3
"""Blocks that an engine has: each message stores one, and removes the one that is the oldest."""


class Engine(Answers):
    """An engine that connects. What it has sent and nobody has read is lost with its connection,
    what waits for one is not.
    """

    def __init__(self, name: str, *, replays: bool = True) -> None:
        super().__init__()
        self.url, self.topic = f"http://{name}:1", name
        self.replays = replays
        self.at: Worker | None = None
        self.waits: list[int] = []

    @property
    def truth(self) -> set[int | bytes]:
        """The blocks that it has."""
        return {self.block(number) for number in range(len(self.messages))[-KEPT:]}

    def publish(self, count: int = 1) -> None:
        for _ in range(count):
            number = len(self.messages)
            events = [stored(self.block(number))] + (
                [removed(self.block(number - KEPT))] if number >= KEPT else []
            )
            self.messages[number] = payload(*events, ts=float(self.run))
            if self.at is None:
                self.waits.append(number)
            else:
                self.at.sent(self, number)

    def connect(self, worker: Worker) -> None:
        self.at = worker
        waits, self.waits = self.waits, []
        for number in waits:
            worker.sent(self, number)

    def restart(self) -> None:
        super().restart()
        self.at, self.waits = None, []


class Lead:
    """A lead that the test gives and takes."""

    leads = False


class Worker:
    """One worker: what waits in its sockets, and what the parent has for it."""

    def __init__(self, stage: Stage, number: int) -> None:
        self.stage = stage
        self.unread: list[tuple[str, int, bytes]] = []
        self.inbox: list[bytes] = []
        self.lead = Lead()
        self.is_stopped = self.is_behind = False
        self.bound = 0
        self.told = 0
        self.failures: list[Exception] = []
        self.index = PlainIndex()
        self.tasks = TaskOwner("test")
        self.ledger = Ledger([], LedgerOptions(breaker_failures=3, breaker_cooldown=5))
        self.engines = EngineRegistry(self.ledger)
        self.sources = WorkerKvEventSources(
            self.engines,
            self.index,
            KvEvents(enabled=True, host="127.0.0.1", port=PORT),
            lambda url: EngineKvEvents(),
            self._ask,
            Observers([self]),
            stage.clock,
            self.tasks,
            ports=[PORT],
            deadlines=Deadlines(kv_replay=5.0),
            number=number,
            lead=self.lead,  # type: ignore[arg-type]
            tell=self._tell,
        )
        self.sources._sockets = self  # type: ignore[assignment]
        self.sources._failed = self.failures.append  # type: ignore[assignment]
        for engine in stage.engines:
            self.add(engine)
        self.sources._bind = self._bind

    def notify(self, event: Event) -> None:
        """Nobody looks at deadlines here."""

    def add(self, engine: Engine) -> None:
        self.engines.add(EngineSpec(engine.url, Role.AGGREGATED), unused_client(engine.url))
        self.up(engine)

    def up(self, engine: Engine) -> None:
        """A probe has found a run of an engine."""
        self.ledger.mark_up(
            engine.url, Evidence(frozenset({"sim"}), "", 16, (), 0, float(engine.run))
        )
        self.sources.notify(NodeChanged(engine.url, "aggregated", up=True, reason=""))

    def down(self, engine: Engine) -> None:
        self.ledger.mark_down(engine.url, "made to be", 0)
        self.sources.notify(NodeChanged(engine.url, "aggregated", up=False, reason=""))

    async def _ask(self, url: str) -> wire.Sources:
        if self.stage.says_nothing:
            raise EngineError("made to fail")
        engine = self.stage.by_url[url]
        replays = self.stage.replay_address(engine) if engine.replays else None
        return {0: wire.EventPublisher(f"tcp://127.0.0.1:{PORT}", replays, engine.topic)}

    def replay(self, address: str) -> Replay:
        return next(
            one for one in self.stage.engines if address == self.stage.replay_address(one)
        ).replay()

    def close(self) -> None:
        """As `KvEventSockets`, of which there are none."""

    def _tell(self, body: bytes) -> bool:
        if self.is_behind:
            return False
        self.told += 1
        for other in self.stage.workers:
            if other is not self:
                other.inbox.append(body)
        return True

    def _bind(self) -> None:
        self.bound += 1
        self.lose()

    def lose(self) -> None:
        """Lose the connections, and what has come over them."""
        self.unread.clear()
        for engine in self.stage.engines:
            if engine.at is self:
                engine.at = None

    def sent(self, engine: Engine, number: int) -> None:
        """An engine has sent a message. ZMQ drops what nobody has subscribed to."""
        if engine.topic in self.sources.bound[PORT]._topics:
            self.unread.append((engine.topic, number, engine.messages[number]))

    def read(self) -> None:
        """Read what has come over the connections."""
        unread, self.unread = self.unread, []
        for topic, number, found in unread:
            self.sources._received(PORT, topic.encode(), number, found)

    def hear(self) -> None:
        """Take what the parent has for it."""
        inbox, self.inbox = self.inbox, []
        for body in inbox:
            self.sources.received(body)

    def known(self, engine: Engine) -> set[int | bytes]:
        place = self.sources.places.get((engine.url, 0))
        return set(self.index.blocks[place]) if place is not None else set()

    def skipped(self) -> int:
        """Messages that did not reach all."""
        return self.sources.counts.skipped["not_passed"]


class Stage:
    """Workers and engines. Connections are made where a test says it."""

    def __init__(self, workers: int, *engines: Engine) -> None:
        self.clock = ManualClock()
        self.engines = engines
        self.by_url = {engine.url: engine for engine in engines}
        self.workers: list[Worker] = []
        self.dead: list[Worker] = []
        self.says_nothing = False
        """Whether engines can't be asked where they publish."""
        for number in range(workers):
            self.workers.append(Worker(self, number))
            self.workers[-1].lead.leads = number == 0

    def replay_address(self, engine: Engine) -> str:
        """Where the engine says that it can be asked for lost messages."""
        return f"tcp://127.1.0.{self.engines.index(engine)}:1"

    async def settled(self, count: int = 40) -> None:
        """Let everything happen that needs no time."""
        for _ in range(3):
            for worker in self.workers:
                if not worker.is_stopped:
                    worker.read()
                    worker.hear()
            await turns(count)

    async def passes(self, seconds: float) -> None:
        """Let time pass, with all looks that belong to it."""
        for _ in range(round(seconds / LOOK_EVERY)):
            await self.clock.advance(LOOK_EVERY)
            for worker in self.workers:
                if not worker.is_stopped:
                    worker.sources.look()
            await self.settled()

    async def kill(self, worker: Worker) -> Worker:
        """Kill a worker. Return its successor."""
        at = self.workers.index(worker)
        worker.lose()
        self.dead.append(worker)
        worker.sources.close()
        await worker.tasks.settle(0)
        self.workers[at] = Worker(self, at)
        self.workers[at].lead.leads = worker.lead.leads
        return self.workers[at]

    def agree(self, engine: Engine) -> bool:
        """Whether all workers know what an engine has."""
        return all(worker.known(engine) == engine.truth for worker in self.workers)

    def counted(self, name: str) -> Counter[Any]:
        """What all have counted, also those that have ended."""
        return sum(
            (getattr(one.sources.counts, name) for one in (*self.workers, *self.dead)), Counter()
        )

    def messages(self, how: str) -> int:
        return sum(count for (_, name), count in self.counted("messages").items() if name == how)

    async def end(self) -> None:
        for worker in self.workers:
            worker.sources.close()
            await worker.tasks.settle(0)
            assert not worker.failures
        assert all(engine.open == 0 for engine in self.engines)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """Three workers, of which the first one leads, and two engines, of which one answers
    replays.
    """
    made = Stage(3, Engine("a"), Engine("b", replays=False))
    await made.settled()
    await made.passes(3)
    yield made
    await made.end()


async def test_all_take_what_comes_to_one_and_count_it_once(stage: Stage) -> None:
    a, b = stage.engines
    a.connect(stage.workers[1])
    b.connect(stage.workers[2])
    before = stage.counted("replays").total()
    for _ in range(7):
        a.publish(2)
        b.publish()
        await stage.settled()
    assert stage.agree(a)
    assert stage.agree(b)
    assert stage.counted("messages") == {(a.url, "live"): 14, (b.url, "live"): 7}
    assert stage.counted("blocks") == {"stored": 21, "removed": 15}
    assert stage.workers[1].sources.counts.messages.total() == 14
    assert (stage.counted("gaps"), stage.counted("replays").total()) == ({}, before)


async def test_at_the_start_one_worker_counts_what_all_ask_for() -> None:
    engine = Engine("a")
    engine.publish(5)
    engine.waits.clear()  # long before
    stage = Stage(3, engine)
    await stage.settled()
    assert stage.agree(engine)
    assert stage.messages("replayed") == 5
    assert stage.workers[0].sources.counts.replays["complete"] == 1
    await stage.end()


@pytest.mark.parametrize("replays", [True, False])
async def test_messages_that_a_killed_worker_had_not_read_are_a_gap(replays: bool) -> None:
    engine = Engine("a", replays=replays)
    stage = Stage(3, engine)
    await stage.settled()
    await stage.passes(2)
    first, second, _ = stage.workers
    engine.connect(first)
    engine.publish(5)
    await stage.settled()
    engine.publish(2)  # not read
    await stage.kill(first)
    await stage.passes(LOOK_EVERY)
    await stage.clock.advance(0.1)
    engine.connect(second)
    engine.publish()
    await stage.settled()
    await stage.passes(2 * COOLDOWN)
    if replays:
        assert stage.agree(engine)
    else:  # forgotten, and known again from there on
        assert [worker.known(engine) for worker in stage.workers] == [{7}] * 3
    assert stage.counted("gaps") == {(engine.url, "lost"): 1}
    engine.publish(KEPT)
    await stage.settled()
    assert stage.agree(engine)
    await stage.end()


async def test_what_is_lost_without_a_later_message_is_asked_for_once_its_worker_has_gone(
    stage: Stage,
) -> None:
    engine, other = stage.engines
    for one in stage.engines:
        one.connect(stage.workers[2])
        one.publish(5)
    await stage.settled()
    engine.publish()
    other.publish()
    stage.workers[2].lose()
    stage.workers[2].is_stopped = True
    for one in stage.engines:
        one.connect(stage.workers[1])
    await stage.passes(GONE - 1)
    assert not any(worker.known(engine) == engine.truth for worker in stage.workers[:2])
    await stage.passes(3)
    assert all(worker.known(engine) == engine.truth for worker in stage.workers[:2])
    assert [worker.known(other) for worker in stage.workers[:2]] == [
        set(),
        set(),
    ]  # rather nothing than what may be wrong


async def test_one_that_subscribes_late_has_all_ask_again(stage: Stage) -> None:
    """What came to it before was dropped by ZMQ: the others can't know of it."""
    engine, _ = stage.engines
    engine.connect(stage.workers[1])
    engine.publish(5)
    await stage.settled()
    stage.workers[1].engines.remove(engine.url)
    engine.publish()
    assert stage.workers[1].unread == []
    stage.workers[1].add(engine)
    await stage.settled()
    assert stage.workers[1].known(engine) == engine.truth
    assert stage.workers[0].known(engine) != engine.truth
    await stage.passes(2)
    assert stage.agree(engine)


async def test_one_that_begins_takes_no_connections_before_it_knows_what_comes(
    stage: Stage,
) -> None:
    stage.says_nothing = True
    successor = await stage.kill(stage.workers[1])
    await stage.passes(PATIENCE - 1)
    assert successor.bound == 0
    stage.says_nothing = False
    await stage.clock.advance(30)
    await stage.passes(LOOK_EVERY)
    assert successor.bound == 1
    stage.says_nothing = True  # one whose engine does not answer at all serves the others
    successor = await stage.kill(successor)
    await stage.passes(PATIENCE + 1)
    assert successor.bound == 1
    stage.says_nothing = False
    await stage.clock.advance(30)
    await stage.passes(1)
    for engine in stage.engines:
        engine.connect(successor)
        engine.publish(KEPT)
    await stage.settled()
    assert all(map(stage.agree, stage.engines))


async def test_a_stopped_worker_takes_nothing_of_connections_that_are_over(stage: Stage) -> None:
    """Its engines have gone to another worker meanwhile: what it has not read is older than what
    that one has told.
    """
    first, second, _ = stage.workers
    for engine in stage.engines:
        engine.connect(first)
        engine.publish(4)
    await stage.settled()
    first.is_stopped = True
    for engine in stage.engines:
        engine.publish(2)
    await stage.passes(LEAVE_AFTER)
    for engine in stage.engines:
        engine.connect(second)
        engine.publish(5)
    await stage.passes(1)
    assert len(first.unread) == 4
    first.is_stopped = False
    first.read()
    assert stage.messages("dropped") == 4
    await stage.passes(2)
    assert first.bound == 2
    assert stage.counted("gaps")[stage.engines[0].url, "restart"] == 0
    for engine in stage.engines:
        engine.publish(KEPT)
    await stage.settled()
    assert all(stage.agree(engine) for engine in stage.engines)


async def test_one_that_can_not_bind_again_tries_it_again(stage: Stage) -> None:
    worker = stage.workers[0]

    def fails() -> None:
        raise OSError

    worker.sources._bind = fails
    await stage.clock.advance(STALE + 1)
    worker.sources.look()
    worker.sources.look()
    assert len(worker.failures) == 2
    worker.failures.clear()
    worker.sources._bind = worker._bind
    worker.sources.look()
    assert worker.bound == 2
    stage.engines[0].connect(worker)
    stage.engines[0].publish()
    await stage.passes(2)
    assert stage.agree(stage.engines[0])


async def test_what_a_dead_worker_had_told_may_come_after_its_successors(stage: Stage) -> None:
    engine, _ = stage.engines
    first, second, third = stage.workers
    engine.connect(first)
    engine.publish(3)
    await stage.settled()
    engine.publish(2)
    first.read()
    await turns(3)
    late, third.inbox = third.inbox, []
    await stage.kill(first)
    await stage.clock.advance(0.2)
    engine.connect(second)
    engine.publish(2)
    await stage.settled()
    assert third.known(engine) == engine.truth
    third.inbox += late
    await stage.settled()
    assert third.known(engine) == engine.truth
    assert third.sources._uncounted.messages[engine.url, "stale"] == 2


async def test_messages_that_were_read_before_a_run_was_found_are_not_of_it(stage: Stage) -> None:
    _, engine = stage.engines
    reader, _, late = stage.workers
    engine.connect(reader)
    engine.publish(3)
    reader.read()
    await turns(5)
    engine.restart()
    await stage.clock.advance(0.1)
    for worker in stage.workers:
        worker.down(engine)
        worker.up(engine)
    late.hear()
    await turns(10)
    assert late.known(engine) == set()
    engine.connect(reader)
    engine.publish(2)
    await stage.settled()
    assert stage.agree(engine)


async def test_a_worker_that_stood_still_asks_for_what_it_had_not_read(stage: Stage) -> None:
    """Nothing follows it. Where it can't be asked for, it is forgotten; what another worker has
    read is not.
    """
    asked, forgotten = stage.engines
    worker = stage.workers[0]
    for engine in stage.engines:
        engine.connect(worker)
        engine.publish(3)
    await stage.settled()
    worker.is_stopped = True
    for engine in stage.engines:
        engine.publish()
    await stage.passes(STALE + 1)
    worker.is_stopped = False
    await stage.passes(3)
    assert stage.agree(asked)
    assert [one.known(forgotten) for one in stage.workers] == [set()] * 3


async def test_a_worker_that_stood_still_reads_what_others_have_told(stage: Stage) -> None:
    """They have not gone, although nothing has come from them for long."""
    _, engine = stage.engines
    engine.connect(stage.workers[0])
    engine.publish(3)
    await stage.settled()
    worker = stage.workers[2]
    worker.is_stopped = True
    await stage.passes(GONE + 1)
    engine.publish(2)
    stage.workers[0].read()
    await turns(5)
    before = worker.index.count("restart")
    worker.is_stopped = False
    worker.sources.look()
    await stage.settled()
    assert stage.agree(engine)
    assert worker.index.count("restart") == before


async def test_a_connection_that_has_moved_to_a_worker_that_dies(stage: Stage) -> None:
    """Nobody has read anything there: for all others it is where it was."""
    engine, _ = stage.engines
    engine.connect(stage.workers[0])
    engine.publish(3)
    await stage.settled()
    engine.connect(stage.workers[1])
    engine.publish(2)
    await stage.kill(stage.workers[1])
    await stage.passes(4)
    assert stage.agree(engine)


async def test_the_first_messages_of_a_worker_that_binds_again_may_be_missed(stage: Stage) -> None:
    """By one that is behind. The engine can't be asked, and another worker had its connection: so
    it is forgotten there.
    """
    _, engine = stage.engines
    engine.connect(stage.workers[0])
    engine.publish(3)
    await stage.settled()
    stage.workers[1].is_stopped = True
    await stage.passes(STALE + 1)
    stage.workers[1].is_stopped = False
    await stage.clock.advance(0.1)
    stage.workers[1].sources.look()
    engine.connect(stage.workers[1])
    engine.publish()
    stage.workers[1].read()
    await turns(5)
    stage.workers[2].inbox.clear()
    await stage.passes(3)
    assert [worker.known(engine) for worker in stage.workers] == [engine.truth, engine.truth, set()]


@pytest.mark.parametrize("how", ["parent", "behind", "queue"])
async def test_who_misses_messages_asks_for_them(
    stage: Stage, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing follows the lost ones. An engine without replays is forgotten: nothing wrong
    stays.
    """
    reader, other, third = stage.workers
    for engine in stage.engines:
        engine.connect(reader)
        engine.publish(5)
    await stage.settled()
    if how == "queue":
        monkeypatch.setattr(worker_kv_sources, "MAX_QUEUED", 0)
    reader.is_behind = how == "behind"
    for engine in stage.engines:
        engine.publish(2)
    reader.read()
    await turns(3)
    if how == "parent":
        other.inbox.clear()
        third.inbox.clear()
    await stage.settled()
    assert other.known(stage.engines[0]) != stage.engines[0].truth
    assert reader.known(stage.engines[0]) == stage.engines[0].truth
    reader.is_behind = False
    monkeypatch.undo()
    await stage.passes(3)
    assert stage.agree(stage.engines[0])
    assert [worker.known(stage.engines[1]) for worker in stage.workers[1:]] == [set(), set()]
    assert reader.known(stage.engines[1]) == stage.engines[1].truth
    assert (
        sum(worker.skipped() for worker in stage.workers)
        == {"parent": 0, "behind": 4, "queue": 8}[how]
    )


async def test_a_flood_is_told_in_part_and_holds_up_nobody(stage: Stage) -> None:
    """One who publishes as an engine as fast as he can: the others' messages go on, and what waits
    is bounded.
    """
    hostile, other = stage.engines
    reader = stage.workers[0]
    hostile.connect(reader)
    other.connect(reader)
    other.publish(2)
    await stage.settled()
    junk = bytes(64 << 10)
    asked = len(hostile.asked)
    for second in range(4):
        for number in range(500):
            reader.sources._received(PORT, b"a", 1000 * second + number, junk)
            if number % 50 == 0:
                other.publish()
                reader.read()
        assert sum(map(len, stage.workers[1].inbox)) < MOST_AT_ONCE + TOLD_AT_ONCE
        assert reader.sources._size <= TOLD_AT_ONCE
        await stage.passes(1)
    assert stage.agree(other)
    assert reader.skipped() > 1000
    # passes of replays: one or two a second of each worker
    assert len(hostile.asked) - asked <= 3 * 4 * 5
    assert stage.counted("messages")[other.url, "live"] == 42


async def test_what_may_be_told_grows_again(stage: Stage) -> None:
    """An engine that was told in part is told in whole again once it has published less for a
    second.
    """
    engine, _ = stage.engines
    engine.connect(stage.workers[0])
    reader = stage.workers[0]
    engine.publish()
    await stage.settled()
    for number in range(200):
        reader.sources._received(PORT, b"a", 10_000 + number, bytes(64 << 10))
    assert (skipped := reader.skipped()) > 0
    await stage.passes(3)
    for number in range(16):
        reader.sources._received(PORT, b"a", 20_000 + number, bytes(64 << 10))
    assert reader.skipped() == skipped


async def test_what_is_told_is_taken_in_portions(stage: Stage) -> None:
    engine, _ = stage.engines
    engine.connect(stage.workers[0])
    engine.publish(5 * AT_ONCE)
    stage.workers[0].read()
    await turns(2)
    other = stage.workers[1]
    place = other.sources.places[engine.url, 0]
    source = other.sources._shared[PORT, "a"].source
    assert source.place == place
    other.hear()
    seen = [0]
    while seen[-1] < 5 * AT_ONCE:
        await turns(1)
        seen.append(source._next or 0)
    assert max(after - before for before, after in itertools.pairwise(seen)) == AT_ONCE
    assert other.sources._queued == 0


async def test_a_defect_loses_nothing_behind_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = stage.engines
    engine.connect(stage.workers[0])
    engine.publish(3)
    other = stage.workers[1]
    receive, fails = other.sources._shared[PORT, "a"].source.receive, [True]

    def once(number: int, found: bytes) -> None:
        if fails:
            fails.clear()
            raise ValueError
        receive(number, found)

    monkeypatch.setattr(other.sources._shared[PORT, "a"].source, "receive", once)
    await stage.settled()
    await stage.passes(1)
    assert stage.agree(engine)
    assert len(other.failures) == 1
    other.failures.clear()


async def test_an_engine_that_is_removed_leaves_nothing(stage: Stage) -> None:
    engine, _ = stage.engines
    engine.connect(stage.workers[0])
    engine.publish(3)
    await stage.settled()
    for worker in stage.workers:
        worker.sources._doubt([(PORT, "a")])
        worker.sources._opened[PORT, "a"] = None
        worker.engines.remove(engine.url)
        sources = worker.sources
        assert (list(sources._shared), list(sources._doubted), list(sources._opened)) == (
            [(PORT, "b")],
            [],
            [],
        )
        assert not any(
            url == engine.url for url, _ in (*sources.counts.messages, *sources._uncounted.messages)
        )
    engine.publish()
    await stage.settled()
    assert stage.workers[0].sources.counts.skipped["unknown_topic"] == 0  # ZMQ drops it
    stage.workers[0].sources._received(PORT, b"a", 4, b"")
    assert stage.workers[0].sources.counts.skipped["unknown_topic"] == 1
    await stage.passes(1)


def test_messages_are_short() -> None:
    """What a message costs besides its payload, on its way through the parent."""
    message = worker_kv_sources._Message((PORT, "engine-17"), 1 << 20, 123456.789, b"")
    assert len(msgspec.msgpack.encode(message)) < 40


def _is_a_state(engine: Engine, known: set[int | bytes]) -> bool:
    """Whether an engine has had all of these blocks at once: nothing that was removed stays beside
    what came later.
    """
    numbers = sorted(one for one in known if isinstance(one, int))
    return not numbers or numbers[-1] - numbers[0] < KEPT


async def _happens(stage: Stage, chance: random.Random) -> None:
    engine, worker = chance.choice(stage.engines), chance.choice(stage.workers)
    match chance.choice(
        ("publish",) * 6 + ("read",) * 4 + ("hear",) * 4 + ("time",) * 3
        + ("kill", "stop", "stop", "drop", "behind", "break", "restart")
    ):  # fmt: skip
        case "publish":
            engine.publish(chance.randint(1, 4))
        case "read" if not worker.is_stopped:
            worker.read()
        case "hear" if not worker.is_stopped:
            worker.hear()
        case "time":
            for _ in range(chance.randint(1, 4)):
                await stage.clock.advance(0.25)
                for one in stage.workers:
                    if not one.is_stopped:
                        one.sources.look()
        case "kill":
            await stage.kill(worker)
        case "stop":
            worker.is_stopped = True
            await stage.clock.advance(chance.choice((0.3, 1.5, 2.5, 4.0)))
            # the engine sees no sign of it; the system may not know it yet
            if chance.random() < 0.5:
                for open_one in stage.engines:
                    if (
                        open_one.at is worker
                        and stage.clock.now() - worker.sources._looked > LEAVE_AFTER - STALE
                    ):
                        open_one.at = None
            worker.is_stopped = chance.random() < 0.3
        case "drop":
            worker.inbox.clear()
        case "behind":
            worker.is_behind = not worker.is_behind
        case "break" if engine.at is not None and not engine.at.is_stopped:
            engine.at.read()
            engine.at = None
        case "restart" if engine.at is None or not engine.at.is_stopped:
            if engine.at is not None:
                engine.at.read()
            engine.restart()
            await stage.clock.advance(0.1)
            for one in stage.workers:
                one.down(engine)
                one.up(engine)
    takers = [one for one in stage.workers if one.sources._listens and not one.is_stopped]
    for each in stage.engines:
        if each.at is None and takers and chance.random() < 0.5:
            each.connect(chance.choice(takers))
    await turns(30)


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens_nothing_wrong_is_known_and_all_is_known_in_the_end(
    seed: int,
) -> None:
    """Kills, stops, lost and late messages, engines that connect elsewhere or start again."""
    chance = random.Random(seed)
    stage = Stage(3, Engine("a"), Engine("b", replays=False))
    await stage.settled()
    for _ in range(60):
        await _happens(stage, chance)
        for engine in stage.engines:
            for worker in stage.workers:
                assert _is_a_state(engine, worker.known(engine))
    for worker in stage.workers:
        worker.is_stopped = worker.is_behind = False
    await stage.passes(3)
    for engine in stage.engines:
        if engine.at is None:
            engine.connect(chance.choice(stage.workers))
    await stage.passes(GONE + 6)
    with_replays, without = stage.engines
    assert stage.agree(with_replays)
    without.publish(KEPT)
    await stage.settled()
    assert stage.agree(without)
    await stage.end()
