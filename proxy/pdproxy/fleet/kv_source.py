"""One source of KV events: the messages of one data-parallel rank, in order and without gaps as far
as its engine can help.

Owns what is known of the sequence: which message is next, those that wait while lost ones are asked
for again, and when it was last asked. These rules are kept:

- A message whose number is not above that of the message before it is another run's: all is
  forgotten, and what the run has published so far is asked for.
- A gap is closed by a replay. It begins with the last message that was taken: if its content is
  another one now, the engine has started again, and its numbers only look as if they went on.
- Meanwhile messages wait. Answers may have gaps, too (the engine's socket drops what it can't
  send): the rest is asked for again.
- Behind another connection may be another run: the last message is asked for again. If it can't be,
  all is forgotten.
- If the answer does not come, or what was lost is no longer kept there, what is known of the place
  may be wrong: it is forgotten. The events go on from there.
- A replay that is not answered in time (`deadlines.kv_replay`) has failed. After a replay, also one
  that was broken off, the next one begins `COOLDOWN` seconds later at the earliest; after one that
  failed, gaps are not closed for a while, doubled each time up to `MAX_PAUSE`.
- Messages for which there is no space wait with the engine; those of one that connects are dropped,
  and asked for again.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdproxy.fleet.kv_events import Backlog, Feed, SourceCounts
from pdproxy.kit.clock import Clock, sleep
from pdproxy.kit.errors import Wait
from pdproxy.kit.frames import frames
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.settings.limits import Deadlines
from pdproxy.upstream.kv_events import Replay
from pdproxy.wire.kv_events import read_batch

logger = logging.getLogger("pdproxy.kv")

COOLDOWN, MAX_PAUSE = 1.0, 60.0
QUIET = 0.5
"""Seconds without an answer after which a replay's answer counts as ended. Its end may be lost as
its messages may.
"""
LOG_S = 10.0
"""A source's restarts are logged so many seconds apart: anybody who publishes can cause them."""
HELD_BYTES = 4 << 20
"""Bytes of messages that wait for the end of a replay."""
_OF_ITS_OWN = 1024
"""Bytes for which a message counts beside its payload, which may be empty: it takes time, too, once
the replay has ended.
"""
MAX_REPLAY_S = 60.0
"""Seconds of a whole replay, its repetitions included: vLLM's 10,000 messages take a few."""
MAX_PASSES, MAX_IN_VAIN = 100, 3
"""Questions of one replay, and those in a row that may bring no further message. Usually each
brings a thousand and more.
"""
MAX_REPLAYS = 4
"""Replays at the same time, of all sources together."""
REPLAYED_AT_ONCE = 16 << 10
"""Bytes of a replay's answers that are taken in one turn of the event loop."""


class ReplayResult(enum.Enum):
    """How a replay has ended."""

    COMPLETE = "complete"
    TOO_OLD = "too_old"
    UNANSWERED = "unanswered"
    INCOMPLETE = "incomplete"
    FAILED = "failed"


@dataclass(slots=True)
class SourceParts:
    """What all sources share. `deadlines`: has the deadline of a replay's next message. `slots`
    limits the number of replays.
    """

    feed: Feed
    counts: SourceCounts
    clock: Clock
    observers: Observers
    tasks: TaskOwner
    deadlines: Deadlines
    slots: asyncio.Semaphore


class _Pass(enum.Enum):
    DONE = enum.auto()
    GAP = enum.auto()
    OTHER_RUN = enum.auto()


class KvEventReader:
    """The events of `place`. `engine`: the engine's URL; `open_replay` connects to where lost
    messages can be had, None: nowhere.

    `resume` is called when `wanted` has become true again.
    """

    def __init__(
        self,
        parts: SourceParts,
        place: int,
        engine: str,
        open_replay: Callable[[], Replay] | None,
        resume: Callable[[], None] = lambda: None,
    ) -> None:
        self._parts = parts
        self._engine = engine
        self._open_replay = open_replay
        self._resume = resume
        self._room = asyncio.Event()
        self._counts = parts.counts
        self._backlog = Backlog(place, self._has_room, self._counts)
        self._next: int | None = 0
        """The number of the next message, None: any."""
        self._digest = 0
        """Of the payload of the message before it."""
        self._newest: int | None = None
        """The number of the last message that came by itself."""
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes, self._overflown = 0, False
        self._dropped = False
        """Whether messages were dropped since there was no space."""
        self._replaying: asyncio.Task[None] | None = None
        self._again = False
        """Whether another replay follows the one that runs, before messages that wait are taken."""
        self._not_before = 0.0
        self._pause = 0.0
        """Seconds of the pause after replays that have failed in a row, 0: the last one has not."""
        self._logged = -math.inf
        self.heard: float | None = None
        """When the last message came, in seconds of the clock."""
        self.connected = False
        """Whether there is a connection to the engine, as far as that is known."""

    def __repr__(self) -> str:
        state = "replaying" if self._replaying is not None else f"next {self._next}"
        return f"<Source of {self._engine}, place {self._backlog.place}, {state}>"

    @property
    def place(self) -> int:
        """The place in the index."""
        return self._backlog.place

    def wanted(self) -> bool:
        """Return whether more messages can be taken now."""
        return self._held_bytes < HELD_BYTES and self._parts.feed.room(self._backlog)

    # -- what happens to it

    def begin(self) -> None:
        """Ask for what the engine has published so far, if that can be had."""
        self._ask()

    def state_changed(self, connected: bool) -> None:
        """There is a connection to the engine (again), or it is lost. Messages in between may be
        lost, too, although none is missing so far: ask for what has followed the last one.
        """
        self.connected = connected
        if not connected:
            return
        self._again = self._replaying is not None  # which may have been answered before that
        # of the connection before, and perhaps of another run: the replay that follows has them
        self._drop_held()
        if self._next and self._replaying is None and not self._may_ask():
            # another run's numbers may go on where those of the run before have ended
            self._give_up("unavailable")
        self._ask()

    def receive(self, number: int, payload: bytes) -> None:
        """Take a message that the engine has just published."""
        self.heard = self._parts.clock.now()
        self.connected = True
        if self._newest is not None and number <= self._newest:
            self._count_gap("restart")
            self._log_restart()
            self._forget_run()
            self._ask()
        self._newest = number
        if self._replaying is None and self._parts.feed.room(self._backlog):
            self._take(number, payload)
        elif self._replaying is not None and self._held_bytes < HELD_BYTES:
            self._hold(number, payload)
        else:
            self._overflown = self._replaying is not None
            self._dropped = not self._overflown
            self._count("dropped")

    def restarted(self, *, ask: bool = True) -> None:
        """Forget everything: the engine's run is over. `ask`: for what the next run has
        published.
        """
        self._pause = 0.0
        self._forget_run()
        if ask:
            self._ask()

    def _forget_run(self) -> None:
        self._end_replay()
        self._parts.feed.restart(self._backlog)
        self._drop_held()
        self._next, self._newest, self._again, self._dropped = 0, None, False, False
        self._resume()

    def _log_restart(self) -> None:
        now = self._parts.clock.now()
        if now - self._logged >= LOG_S:
            self._logged = now
            logger.info(
                "%s publishes KV events from the beginning: it has started again", self._engine
            )

    def close(self) -> None:
        """Take nothing more, and drop what waits."""
        self._end_replay()
        self._drop_held()
        self._parts.feed.drop(self._backlog)

    # -- the sequence

    def _take(self, number: int, payload: bytes) -> None:
        if self._next is None or number == self._next:
            self._apply(number, payload, "live")
        elif number < self._next:
            self._count("repeated")
        else:
            if self._next:
                self._count_gap("lost")
            if not self._may_ask():
                if self._next:
                    self._give_up("unavailable")
                self._apply(number, payload, "live")
            else:
                self._hold(number, payload, first=True)
                self._ask()

    def _apply(self, number: int, payload: bytes, how: str) -> None:
        self._next, self._digest = number + 1, hash(payload)
        batch = read_batch(payload)
        self._count(how)
        if batch is None:
            self._counts.skipped["undecodable"] += 1
        else:
            self._parts.feed.put(self._backlog, batch.events)

    def _hold(self, number: int, payload: bytes, *, first: bool = False) -> None:
        (self._held.appendleft if first else self._held.append)((number, payload))
        self._held_bytes += len(payload) + _OF_ITS_OWN

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_bytes, self._overflown = 0, False

    def _take_held(self) -> None:
        """Take what has waited for a replay. What it does not join is a message of another run."""
        overflown, self._overflown = self._overflown, False
        while self._held and self._replaying is None:
            number, payload = self._held.popleft()
            self._held_bytes -= len(payload) + _OF_ITS_OWN
            if self._next is not None and number > self._next and not overflown:
                self._count("stale")
                self._newest = None
                continue
            self._take(number, payload)
        self._resume()

    def _give_up(self, result: str) -> None:
        """Forget what may be wrong, and go on with the next message."""
        self._counts.replays[result] += 1
        self._parts.feed.restart(self._backlog)
        self._next = None

    def _has_room(self) -> None:
        self._room.set()
        if self._dropped:
            self._dropped = False
            self._ask()
        self._resume()

    # -- replays

    def _may_ask(self) -> bool:
        """Return whether lost messages can be asked for. While replays fail, nothing waits for the
        next one.
        """
        return self._open_replay is not None and not (
            self._pause and self._parts.clock.now() < self._not_before
        )

    def _ask(self) -> None:
        if (
            self._open_replay is not None
            and self._may_ask()
            and self._replaying is None
            and self._next is not None
        ):
            self._replaying = self._parts.tasks.spawn(
                self._replay(self._open_replay), f"KV events of {self._engine}"
            )

    def _end_replay(self) -> None:
        if self._replaying is not None:
            self._replaying.cancel()
            self._replaying = None

    async def _replay(self, open_replay: Callable[[], Replay]) -> None:
        parts = self._parts
        if (pause := self._not_before - parts.clock.now()) > 0:
            await sleep(parts.clock, pause)
        async with parts.slots:
            self._not_before = parts.clock.now() + COOLDOWN
            end = parts.clock.now() + MAX_REPLAY_S
            try:
                result = await self._replayed(open_replay, end)
                while self._again and result in (ReplayResult.COMPLETE, ReplayResult.TOO_OLD):
                    self._again = False
                    result = await self._replayed(open_replay, end)
            except TimeoutError:
                parts.observers.notify(DeadlinePassed(Wait.KV_REPLAY.value, self._engine))
                result = ReplayResult.UNANSWERED
            except Exception as error:
                # an answer that can't be read, an address that can't be used
                logger.warning(
                    "a replay of KV events of %s failed: %s", self._engine, frames(error)
                )
                result = ReplayResult.FAILED
        self._replaying = None
        if result in (ReplayResult.COMPLETE, ReplayResult.TOO_OLD):
            self._counts.replays[result.value] += 1
            self._pause = 0.0
            self._not_before = parts.clock.now() + COOLDOWN
        else:
            self._pause = min(max(2 * self._pause, COOLDOWN), MAX_PAUSE)
            self._not_before = parts.clock.now() + self._pause
            logger.warning(
                "a replay of KV events of %s was %s: what it has cached is not known until it "
                "reports it",
                self._engine,
                result.value,
            )
            self._give_up(result.value)
        self._again = False
        self._take_held()

    async def _replayed(self, open_replay: Callable[[], Replay], end: float) -> ReplayResult:
        """Ask until the engine has nothing more, or it is `end`. Raises TimeoutError if it does not
        answer, ValueError, OSError.

        Each question has its own connection: answers to one that was given up can't be taken for
        those of the next.
        """
        result, in_vain = ReplayResult.COMPLETE, 0
        for _ in range(MAX_PASSES):
            before = self._next or 0
            start = max(before - 1, 0)
            async with open_replay() as replay:
                replay.ask(start)
                found, too_old = await self._one_pass(replay, start, before > 0, end)
            if too_old:
                result = ReplayResult.TOO_OLD
            if found is _Pass.DONE:
                return result
            if found is _Pass.OTHER_RUN:
                self._count_gap("restart")
                self._parts.feed.restart(self._backlog)
                self._next = 0
            in_vain = in_vain + 1 if self._next == before else 0
            if in_vain == MAX_IN_VAIN or self._parts.clock.now() >= end:
                break
        return ReplayResult.INCOMPLETE

    async def _one_pass(
        self, replay: Replay, start: int, verify: bool, end: float
    ) -> tuple[_Pass, bool]:
        """Take the answers to one question up to their end. `verify`: the first is a message that
        is known already.

        Return how it has ended, and whether messages were asked for that the engine has no more.
        """
        clock, feed = self._parts.clock, self._parts.feed
        found, too_old, first, taken = _Pass.DONE, False, True, 0
        while True:
            try:
                with clock.within(self._parts.deadlines.kv_replay if first else QUIET):
                    answer = await replay.next()
            except TimeoutError:
                if first:
                    raise
                return _Pass.GAP, too_old  # the end was lost, too
            if answer is None:
                return (_Pass.OTHER_RUN if verify and first else found), too_old
            if clock.now() >= end:
                return _Pass.GAP, too_old
            number, payload = answer
            taken += len(payload) + _OF_ITS_OWN
            # many answers may be here already: other tasks go on in between
            if taken >= REPLAYED_AT_ONCE:
                taken = 0
                await asyncio.sleep(0)
            expected = self._next or 0
            if found is not _Pass.DONE or (first and number < start):
                continue
            if first:
                first = False
                if verify and number == start and hash(payload) != self._digest:
                    found = _Pass.OTHER_RUN
                    continue
                if number > start:
                    too_old = True
                    feed.restart(self._backlog)
                    expected = number
            if number > expected:
                found = _Pass.GAP
            elif number == expected:
                while not feed.room(self._backlog):
                    self._room.clear()
                    await self._room.wait()
                self._apply(number, payload, "replayed")

    # -- counts

    def _count(self, how: str) -> None:
        self._counts.messages[self._engine, how] += 1

    def _count_gap(self, cause: str) -> None:
        self._counts.gaps[self._engine, cause] += 1
