"""One source of KV events: gaps, restarts and replays, with an engine that is only a list of
messages.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from typing import Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.fleet import kv_events, kv_source
from pdproxy.fleet.kv_events import Feed, SourceCounts
from pdproxy.fleet.kv_source import (
    COOLDOWN,
    HELD_BYTES,
    MAX_IN_VAIN,
    MAX_PAUSE,
    MAX_REPLAY_S,
    QUIET,
    KvEventReader,
    SourceParts,
)
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.settings.limits import Deadlines
from tests.fakes.clock import ManualClock
from tests.fakes.kv_index import PlainIndex, payload, removed, stored
from tests.fakes.recorder import Recorder
from tests.sim.raw import turns

DEADLINE = 5.0
NODE = "http://engine:1"


class Engine:
    """What an engine has published, and how it answers replays."""

    def __init__(self) -> None:
        self.messages: dict[int, bytes] = {}
        self.asked: list[int] = []
        self.lost: list[set[int]] = []
        """Per replay: numbers that its answer lacks."""
        self.lost_ends = 0
        """How many answers lack their end."""
        self.silent = False
        self.garbage = False
        self.endless = False
        self.run = 0
        self.open = 0
        self.on_ask: Callable[[], None] = lambda: None

    def publish(self, count: int = 1) -> None:
        """Publish one block per message: its hash is the run and the number."""
        for _ in range(count):
            number = len(self.messages)
            self.messages[number] = payload(stored(self.block(number)), ts=float(self.run))

    def block(self, number: int) -> int:
        return self.run * 1000 + number

    def restart(self) -> None:
        self.run += 1
        self.messages.clear()

    def keep(self, count: int) -> None:
        """Keep only the last messages for replays."""
        for number in sorted(self.messages)[:-count]:
            del self.messages[number]

    def replay(self) -> Replay:
        return Replay(self)


class Replay:
    """One connection for a replay."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._answers: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self._engine.open += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._engine.open -= 1

    def ask(self, start: int) -> None:
        engine = self._engine
        engine.asked.append(start)
        engine.on_ask()
        if engine.silent:
            return
        lost = engine.lost.pop(0) if engine.lost else set()
        first = min((number for number in engine.messages if number >= start), default=start)
        lost = lost - {first}  # a new connection has space for one message at least
        for number, found in sorted(engine.messages.items()):
            if number >= start and number not in lost:
                self._answers.put_nowait((number, found))
        if engine.lost_ends:
            engine.lost_ends -= 1
        else:
            self._answers.put_nowait(None)

    async def next(self) -> tuple[int, bytes] | None:
        if self._engine.garbage:
            raise ValueError("no answer to a replay")
        if self._engine.endless:
            return 0, self._engine.messages[0]
        return await self._answers.get()


class Stage(Recorder):
    """A source with what it needs."""

    def __init__(self, *, replays: bool = True) -> None:
        self.index = PlainIndex()
        self.counts = SourceCounts()
        self.clock = ManualClock()
        self.tasks = TaskOwner("test")
        self.failures: list[Exception] = []
        super().__init__()
        self.engine = Engine()
        self.resumed = 0
        self.parts = SourceParts(
            Feed(self.index, self.failures.append),
            self.counts,
            self.clock,
            Observers([self]),
            self.tasks,
            Deadlines(kv_replay=DEADLINE),
            asyncio.Semaphore(1),
        )
        replay = self.engine.replay if replays else None
        self.source = KvEventReader(self.parts, self.index.add_place(), NODE, replay, self._resume)  # type: ignore[arg-type]

    def _resume(self) -> None:
        self.resumed += 1

    def send(self, *numbers: int) -> None:
        """Have messages arrive by themselves."""
        for number in numbers:
            self.source.receive(number, self.engine.messages[number])

    async def settled(self) -> set[int | bytes]:
        """Let everything happen that needs no time; return the blocks that are known."""
        await turns(200)
        return self.index.hashes

    def messages(self, how: str) -> int:
        return self.counts.messages[NODE, how]

    def gaps(self, cause: str) -> int:
        return self.counts.gaps[NODE, cause]


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    made = Stage()
    yield made
    await made.tasks.settle(0)
    assert made.engine.open == 0
    assert not made.failures


async def test_messages_in_order_are_taken_without_a_replay(stage: Stage) -> None:
    stage.engine.publish(3)
    stage.send(0, 1, 2)
    assert await stage.settled() == {0, 1, 2}
    assert stage.engine.asked == []
    assert stage.messages("live") == 3


async def test_it_begins_with_what_was_published_before(stage: Stage) -> None:
    stage.engine.publish(5)
    stage.source.begin()
    assert await stage.settled() == set(range(5))
    stage.engine.publish()
    stage.send(5)
    assert await stage.settled() == set(range(6))
    assert stage.counts.replays == {"complete": 1}
    assert (stage.messages("replayed"), stage.messages("live")) == (5, 1)


async def test_a_first_message_with_a_higher_number_asks_for_those_before(stage: Stage) -> None:
    stage.engine.publish(4)
    stage.send(3)
    assert await stage.settled() == set(range(4))
    assert (stage.engine.asked, stage.gaps("lost")) == ([0], 0)


async def test_a_gap_is_closed_from_the_last_message_on(stage: Stage) -> None:
    stage.engine.publish(9)
    stage.send(0, 1, 6)
    stage.send(7)  # waits meanwhile
    assert await stage.settled() == set(range(9))
    stage.send(8)
    assert await stage.settled() == set(range(9))
    assert stage.engine.asked == [1]
    assert (stage.gaps("lost"), stage.messages("repeated")) == (1, 3)
    assert stage.index.count("restart") == 0


async def test_one_turn_of_the_loop_takes_a_bounded_part_of_a_replay(stage: Stage) -> None:
    stage.engine.publish(200)
    stage.source.begin()
    seen = [0]
    while seen[-1] < 200:
        await turns(1)
        seen.append(stage.messages("replayed"))
    assert (
        max(after - before for before, after in itertools.pairwise(seen))
        <= kv_source.REPLAYED_AT_ONCE // 1024
    )


async def test_events_keep_their_order_through_a_replay(stage: Stage) -> None:
    stage.engine.publish(2)
    stage.engine.messages |= {2: payload(removed(0)), 3: payload(stored(0)), 4: payload(removed(0))}
    stage.send(0, 1, 3, 4)
    assert await stage.settled() == {1}


async def test_a_lower_number_is_another_run(stage: Stage) -> None:
    stage.engine.publish(5)
    stage.send(*range(5))
    await stage.settled()
    stage.engine.restart()
    stage.engine.publish(3)
    stage.send(2)
    assert await stage.settled() == {1000, 1001, 1002}
    assert (stage.index.count("restart"), stage.gaps("restart"), stage.engine.asked) == (1, 1, [0])


async def test_the_same_number_again_is_another_run(stage: Stage) -> None:
    stage.engine.publish()
    stage.send(0)
    stage.engine.restart()
    stage.engine.publish()
    stage.send(0)
    assert await stage.settled() == {1000}


async def test_another_run_that_has_published_more_is_not_taken_for_a_gap(stage: Stage) -> None:
    stage.engine.publish(3)
    stage.send(0, 1, 2)
    await stage.settled()
    stage.engine.restart()
    stage.engine.publish(10)
    stage.send(9)
    assert await stage.settled() == set(range(1000, 1010))
    assert stage.engine.asked == [2, 0]
    assert (stage.gaps("lost"), stage.gaps("restart"), stage.index.count("restart")) == (1, 1, 1)


async def test_another_run_that_has_published_less_than_was_known(stage: Stage) -> None:
    stage.engine.publish(8)
    stage.send(*range(8))
    await stage.settled()
    stage.engine.restart()
    stage.engine.publish(2)
    stage.source.state_changed(True)  # connected again
    assert await stage.settled() == {1000, 1001}
    assert stage.engine.asked == [7, 0]


async def test_a_connection_that_is_there_again_asks_for_what_was_lost(stage: Stage) -> None:
    stage.engine.publish(2)
    stage.send(0, 1)
    stage.source.state_changed(False)
    assert not stage.source.connected
    stage.engine.publish(3)
    stage.source.state_changed(True)
    assert await stage.settled() == set(range(5))
    assert stage.source.connected


async def test_messages_that_the_replay_lost_are_asked_for_again(stage: Stage) -> None:
    stage.engine.publish(20)
    stage.engine.lost = [{5, 6}, {12}]
    stage.source.begin()
    assert await stage.settled() == set(range(20))
    assert stage.engine.asked == [0, 4, 11]
    assert stage.counts.replays == {"complete": 1}


async def test_a_replay_whose_end_was_lost_is_asked_again_after_a_moment(stage: Stage) -> None:
    stage.engine.publish(20)
    stage.engine.lost, stage.engine.lost_ends = [set(range(10, 20))], 1
    stage.source.begin()
    await stage.settled()
    await stage.clock.reach(QUIET)
    assert await stage.settled() == set(range(20))
    assert stage.engine.asked == [0, 9]


async def test_a_replay_that_gets_nowhere_ends(stage: Stage) -> None:
    stage.engine.publish(20)
    stage.engine.lost = [{5}] * (1 + MAX_IN_VAIN)
    stage.send(0)
    stage.send(19)
    assert await stage.settled() == {19}  # forgotten, and the events go on
    assert stage.counts.replays == {"incomplete": 1}
    assert stage.index.count("restart") == 1
    assert stage.engine.asked == [0, *[4] * MAX_IN_VAIN]


async def test_a_replay_that_never_answers_ends_at_its_deadline(stage: Stage) -> None:
    stage.engine.publish(9)
    stage.engine.silent = True
    stage.send(0, 1, 5)
    await turns()
    stage.send(6)
    assert await stage.settled() == {0, 1}
    await stage.clock.reach(DEADLINE)
    assert await stage.settled() == {5, 6}
    assert stage.counts.replays == {"unanswered": 1}
    assert DeadlinePassed("kv_replay", NODE) in stage.events
    stage.send(7)
    assert await stage.settled() == {5, 6, 7}


async def test_after_a_failed_replay_gaps_are_not_closed_for_a_while(stage: Stage) -> None:
    stage.engine.publish(30)
    stage.engine.silent = True
    stage.source.begin()
    await stage.settled()
    await stage.clock.reach(DEADLINE)
    stage.send(5)
    stage.send(9)
    assert await stage.settled() == {9}
    assert stage.counts.replays == {"unanswered": 1, "unavailable": 1}
    assert stage.engine.asked == [0]
    await stage.clock.advance(COOLDOWN)
    stage.engine.silent = False
    stage.send(10, 14)
    assert await stage.settled() == set(range(9, 30))
    assert stage.engine.asked == [0, 10]


async def test_pauses_grow_while_replays_fail(stage: Stage) -> None:
    stage.engine.publish(100)
    stage.engine.silent = True
    pauses = []
    for number in range(1, 60, 4):
        stage.send(number, number + 2)
        await stage.settled()
        if stage.clock.pending():
            await stage.clock.reach(DEADLINE)
            await stage.settled()
            pauses.append(stage.source._pause)
        await stage.clock.advance(2.0)
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert len(pauses) < 8


async def test_what_is_no_longer_kept_is_forgotten_and_the_rest_is_taken(stage: Stage) -> None:
    stage.engine.publish(30)
    stage.send(0, 1)
    await stage.settled()
    stage.engine.keep(5)
    stage.send(29)
    assert await stage.settled() == set(range(25, 30))
    assert stage.counts.replays == {"too_old": 1}
    assert stage.index.count("restart") == 1


async def test_without_replays_a_gap_forgets_all() -> None:
    stage = Stage(replays=False)
    stage.engine.publish(9)
    stage.source.begin()
    stage.send(4, 5)  # it has run for a while: nothing is to be forgotten
    assert await stage.settled() == {4, 5}
    assert stage.index.count("restart") == 0
    stage.send(8)
    assert await stage.settled() == {8}
    assert (stage.counts.replays, stage.gaps("lost")) == ({"unavailable": 1}, 1)
    stage.engine.restart()
    stage.engine.publish()
    stage.send(0)
    assert await stage.settled() == {1000}


async def test_replays_have_a_pause_between_them(stage: Stage) -> None:
    stage.engine.publish(20)
    stage.send(0, 4)
    await stage.settled()
    stage.engine.publish(20)
    stage.send(30)
    assert await stage.settled() == set(range(20))
    assert stage.engine.asked == [0]
    await stage.clock.advance(COOLDOWN)
    assert await stage.settled() == set(range(40))
    assert stage.engine.asked == [0, 19]


async def test_a_message_of_the_run_before_is_dropped_after_the_replay(stage: Stage) -> None:
    stage.engine.publish(50)
    old = stage.engine.messages[40]
    stage.engine.restart()
    stage.engine.publish(2)
    stage.source.begin()
    stage.source.receive(40, old)  # it was still in a queue
    assert await stage.settled() == {1000, 1001}
    assert stage.messages("stale") == 1
    stage.engine.publish()
    stage.send(2)
    assert await stage.settled() == {1000, 1001, 1002}
    assert stage.index.count("restart") == 0


async def test_what_waits_for_a_replay_is_bounded_and_asked_for_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_source, "HELD_BYTES", 300)
    stage.engine.publish(60)
    stage.engine.silent = True
    stage.send(0, 10)
    await turns()
    stage.send(*range(11, 60))
    assert not stage.source.wanted()
    assert stage.messages("dropped") > 40
    await stage.clock.reach(DEADLINE)  # unanswered: it begins anew with what was kept
    stage.engine.silent = False
    stage.engine.publish()
    await stage.clock.advance(COOLDOWN)
    stage.send(60)
    found = await stage.settled()
    assert found >= set(range(13, 61))
    assert stage.source.wanted()
    assert stage.resumed > 0


async def test_messages_of_no_bytes_that_wait_are_bounded_as_well(stage: Stage) -> None:
    stage.engine.publish(2)
    stage.engine.silent = True
    stage.source.begin()
    await turns()
    for number in range(2, 20_000):
        stage.source.receive(number, b"")
    assert not stage.source.wanted()
    assert len(stage.source._held) <= HELD_BYTES // 1024
    assert stage.messages("dropped") == 20_000 - 2 - len(stage.source._held)
    stage.source.close()
    assert stage.source._held_bytes == 0


async def test_what_can_not_be_left_with_the_engine_is_dropped_and_asked_for_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that connects to the proxy sends on, whatever waits for the index."""
    monkeypatch.setattr(kv_events, "BACKLOG_BYTES", 2000)
    stage.engine.publish(500)
    stage.send(*range(400))
    assert stage.parts.feed.bytes < 2500
    assert 350 < stage.messages("dropped") < 400
    for _ in range(10):  # one message of a replay per turn of the loop
        await stage.settled()
    assert stage.index.hashes == set(range(500))
    assert stage.counts.replays == {"complete": 1}
    assert stage.gaps("lost") == 0


async def test_without_replays_dropped_messages_are_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "BACKLOG_BYTES", 2000)
    stage = Stage(replays=False)
    stage.engine.publish(500)
    stage.send(*range(400))
    known = await stage.settled()
    assert known
    assert known < set(range(400))
    stage.send(400)
    assert await stage.settled() == {400}
    assert (stage.gaps("lost"), stage.counts.replays) == (1, {"unavailable": 1})


async def test_a_publisher_that_seems_to_start_again_and_again_causes_one_replay_per_pause(
    stage: Stage,
) -> None:
    """Anybody who reaches the proxy's port can send an engine's first message. A replay that is
    broken off counts.
    """
    stage.engine.publish(3)
    stage.engine.silent = True
    for _ in range(100):
        stage.send(0)
        await turns(3)
    assert stage.engine.asked == [0]
    assert len(stage.tasks) == 1
    stage.engine.silent = False
    await stage.clock.advance(COOLDOWN)
    assert await stage.settled() == {0, 1, 2}
    assert stage.engine.asked == [0, 0]


async def test_connections_that_come_and_go_do_not_keep_a_replay_running(stage: Stage) -> None:
    """Few replays run at the same time: other sources wait for this one's place."""

    def another_connection() -> None:
        stage.clock._time += 1.0
        stage.source.state_changed(True)

    stage.engine.publish(3)
    stage.engine.on_ask = another_connection
    stage.source.begin()
    for _ in range(5):
        await stage.settled()
    assert 10 < len(stage.engine.asked) <= MAX_REPLAY_S + 1
    assert stage.counts.replays == {"incomplete": 1}


async def test_an_answer_that_is_none_ends_a_replay(stage: Stage) -> None:
    stage.engine.publish(9)
    stage.engine.garbage = True
    stage.send(0, 5)
    assert await stage.settled() == {5}
    assert stage.counts.replays == {"failed": 1}


async def test_an_endless_answer_ends_after_its_time(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_source, "MAX_REPLAY_S", 3.0)
    stage.engine.publish(9)
    stage.engine.endless = True
    stage.send(0, 5)
    await turns()
    for _ in range(8):
        await stage.clock.advance(0.5)
    assert await stage.settled() == {5}
    assert stage.counts.replays == {"incomplete": 1}


async def test_any_jumps_of_numbers_are_survived(stage: Stage) -> None:
    stage.engine.publish(1)
    for number in (5, 1 << 62, 3, (1 << 63) - 1, 0, 1 << 40, 1 << 40, 7):
        stage.source.receive(number, stage.engine.messages[0])
        await turns()
        await stage.clock.advance(0.1)
    assert len(stage.tasks) <= 1
    await stage.clock.advance(10 * COOLDOWN)
    await stage.settled()
    assert len(stage.engine.asked) < 12
    assert len(stage.tasks) == 0


async def test_a_payload_that_is_none_is_counted_and_the_next_is_taken(stage: Stage) -> None:
    stage.engine.publish(2)
    stage.engine.messages[0] = b"\xc1"
    stage.send(0, 1)
    assert await stage.settled() == {1}
    assert stage.counts.skipped == {"undecodable": 1}


async def test_a_run_that_is_over_is_forgotten(stage: Stage) -> None:
    stage.engine.publish(3)
    stage.send(0, 1, 2)
    await stage.settled()
    stage.source.restarted(ask=False)
    assert await stage.settled() == set()
    assert stage.engine.asked == []
    stage.source.restarted()
    assert await stage.settled() == {0, 1, 2}


async def test_a_source_that_is_closed_asks_nothing_more(stage: Stage) -> None:
    stage.engine.publish(3)
    stage.engine.silent = True
    stage.source.begin()
    await turns()
    assert len(stage.tasks) == 1
    stage.source.close()
    await turns()
    assert len(stage.tasks) == 0


async def test_nothing_waits_for_a_replay_while_replays_fail(stage: Stage) -> None:
    stage.engine.publish(9)
    stage.engine.silent = True
    stage.source.begin()
    await stage.settled()
    await stage.clock.reach(DEADLINE)
    stage.source.state_changed(True)
    stage.send(5)
    assert await stage.settled() == {5}
    stage.engine.restart()
    stage.engine.publish(3)
    stage.send(2)
    assert await stage.settled() == {1002}
    assert stage.engine.asked == [0]
    stage.engine.silent = False
    stage.source.restarted()  # a run that the registry knows of may be asked at once
    await stage.clock.advance(COOLDOWN)
    assert await stage.settled() == {1000, 1001, 1002}


async def test_a_connection_made_while_a_replay_runs_is_followed_by_another_one(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits is taken only then: its numbers may go on by chance where the run before has
    ended.
    """
    monkeypatch.setattr(kv_source, "REPLAYED_AT_ONCE", 1)
    stage.engine.publish(3)
    stage.source.begin()
    while not stage.engine.asked:
        await turns(1)
    stage.source.state_changed(False)
    stage.engine.restart()
    stage.engine.publish(3)
    stage.source.state_changed(True)
    stage.engine.publish()
    stage.send(3)
    assert await stage.settled() == {1000, 1001, 1002, 1003}
    assert stage.engine.asked == [0, 2, 0]


async def test_what_waits_is_dropped_when_the_connection_is_another_one(stage: Stage) -> None:
    stage.engine.publish(9)
    stage.engine.silent = True
    stage.send(0, 5)
    await turns()
    stage.source.state_changed(False)
    stage.engine.restart()
    stage.source.state_changed(True)
    await stage.clock.reach(DEADLINE)
    assert await stage.settled() == set()


async def test_a_restart_while_replays_fail_is_not_taken_for_the_same_run(stage: Stage) -> None:
    """The first message of the new run that comes may have just the number that the run before has
    reached.
    """
    stage.engine.silent = True
    stage.source.begin()
    await stage.settled()
    await stage.clock.reach(DEADLINE)  # from now on there is a pause
    stage.engine.silent = False
    stage.engine.publish(2)
    stage.send(0, 1)
    assert await stage.settled() == {0, 1}
    stage.source.state_changed(False)
    stage.engine.restart()
    stage.engine.publish(2)
    stage.source.state_changed(True)
    assert await stage.settled() == set()
    stage.engine.publish()
    stage.send(2)
    assert await stage.settled() == {1002}
    assert stage.engine.asked == [0]
    assert stage.counts.replays == {"unanswered": 1, "unavailable": 1}
    await stage.clock.advance(COOLDOWN)
    stage.source.state_changed(True)  # the engine can be asked again: the same run
    assert await stage.settled() == {1002}
    assert stage.engine.asked == [0, 2]


async def test_without_replays_another_connection_may_be_another_run() -> None:
    """The numbers alone can't tell them apart: all is forgotten, also if the engine is the same and
    nothing was lost.
    """
    stage = Stage(replays=False)
    stage.source.state_changed(True)
    stage.engine.publish(2)
    stage.send(0, 1)
    assert await stage.settled() == {0, 1}
    assert stage.counts.replays == {}
    stage.source.state_changed(False)
    assert await stage.settled() == {0, 1}
    stage.engine.restart()
    stage.engine.publish(2)
    stage.source.state_changed(True)
    stage.engine.publish()
    stage.send(2)
    assert await stage.settled() == {1002}
    assert stage.counts.replays == {"unavailable": 1}


async def over(stage: Stage) -> None:
    """Let time pass until no replay runs, and replays may be asked for again."""
    for _ in range(100):
        await turns(30)
        if not len(stage.tasks):
            break
        await stage.clock.advance(2.0)
    assert not len(stage.tasks)
    await stage.clock.advance(MAX_PAUSE + COOLDOWN)


OPERATIONS = st.sampled_from(
    [
        "deliver",
        "deliver",
        "deliver",
        "lose",
        "restart",
        "reconnect",
        "wait",
        "lossy",
        "no end",
        "evict",
        "silent",
    ]
)
KINDS = st.sampled_from(["replays", "no replays", "connects"])


@settings(max_examples=400, deadline=None)
@given(st.lists(OPERATIONS, max_size=40), st.randoms(use_true_random=False), KINDS)
def test_whatever_is_lost_the_end_is_what_the_engine_has(
    operations: list[str], chance: random.Random, kind: str
) -> None:
    """Any mix of messages, losses, restarts and lossy replays: once messages come again, all is
    known and nothing else.

    If an engine `connects`, nothing shows that its connection is another one, and the first message
    of its next run may have the number that the last one has reached. The registry finds that run,
    some time later.
    """

    async def run() -> None:
        stage = Stage(replays=kind != "no replays")
        engine = stage.engine
        held: set[int | bytes] = set()
        found = 0  # the run that the registry knows

        def publish(*events: object) -> int:
            number = len(engine.messages)
            engine.messages[number] = payload(*events, ts=float(engine.run))
            return number

        def store() -> int:
            found = engine.block(len(engine.messages))
            held.add(found)
            return publish(stored(found))

        def connected(whether: bool) -> None:
            if kind != "connects":
                stage.source.state_changed(whether)

        def probe() -> None:
            nonlocal found
            if kind == "connects" and found != engine.run:
                found = engine.run
                stage.source.restarted()

        stage.source.begin()
        for operation in operations:
            match operation:
                case "deliver":
                    stage.send(store())
                case "lose":
                    store()
                case "evict" if held:
                    gone = chance.choice(sorted(held, key=str))
                    held.discard(gone)
                    number = publish(removed(gone))
                    if chance.random() < 0.5:
                        stage.send(number)
                case "restart":
                    connected(False)
                    engine.restart()
                    held.clear()
                    for _ in range(chance.randrange(4)):
                        store()
                    connected(True)
                case "reconnect":
                    connected(False)
                    store()
                    connected(True)
                case "wait":
                    await turns(30)
                    await stage.clock.advance(chance.choice([0.1, QUIET, DEADLINE]))
                    probe()
                case "lossy":
                    engine.lost.append({chance.randrange(30)})
                case "no end":
                    engine.lost_ends += 1
                case "silent":
                    engine.silent = not engine.silent
            await turns(chance.randrange(4))
        engine.lost, engine.lost_ends, engine.silent = [], 0, False
        probe()
        await over(stage)
        stage.send(store())
        await over(stage)
        incomplete = {
            result for result in stage.counts.replays if result not in ("complete", "too_old")
        }
        known = stage.index.hashes
        assert known <= held
        assert known == held or incomplete or kind == "no replays"
        assert engine.open == 0
        await stage.tasks.settle(0)

    asyncio.run(run())
