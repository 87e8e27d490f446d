"""Engines that stand still: who is suspected, who is asked, who is blamed and when, by looks at a
passed time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.stalls import Stalls
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import EngineError, EngineTimeoutError, Wait
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import NodeChanged, Observers
from pdproxy.scheduling.leases import Verdict
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Role
from pdproxy.scheduling.policy import Ask
from pdproxy.settings.health import Health
from pdproxy.settings.limits import Deadlines
from pdproxy.upstream.metrics_page import NO_METRICS, Scrape
from tests.fakes.recorder import Recorder
from tests.unit.test_ledger import SPLIT, evidence

AFTER = 8.0
STEP = 1.0
"""Seconds between two looks."""
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "a": Role.AGGREGATED}


@dataclass(eq=False)
class Leg:
    """A leg, as a test says."""

    since: float
    phase: str = "decode"
    sign: float = 0.0
    must_progress: bool = True
    is_counted: bool = True
    in_silence: bool = False
    waits_for: str | None = None
    prompt_bytes: int = 0
    stalled_before: int = 0
    failed: list[EngineError] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def last_sign(self) -> float:
        return self.sign

    def source_lost(self, why: str) -> None:
        self.lost.append(why)

    def fail(self, error: EngineError) -> None:
        self.failed.append(error)


class Pool(Recorder):
    """Engines whose cores a test stops: then they answer no canary, and their metrics do not
    move.
    """

    def __init__(
        self,
        *urls: str,
        ranks: int = 1,
        metrics: bool = True,
        canaries: bool = True,
        **health: float,
    ) -> None:
        self.now = 100.0
        self.frozen: set[str] = set()
        self.busy: set[str] = set()
        """Engines that answer canaries late, and whose metrics stand still: they compute one long
        step.
        """
        self.refuse = False
        self.asked: list[tuple[str, int | None]] = []
        super().__init__()
        self.metrics, self.canaries = metrics, canaries
        self.ledger = Ledger(
            [], LedgerOptions(breaker_failures=3, breaker_cooldown=10, slow_start=0)
        )
        self.engines = EngineRegistry(self.ledger)
        self.clock = Clock()
        self.clock.now = lambda: self.now
        self.tasks = TaskOwner("test")
        settings = Health(stalled_after=AFTER, **health)
        clock, deadlines, scrape = self.clock, Deadlines(prefill=120.0), self._scrape
        self.stalls = Stalls(
            self.engines, self.ledger, self, scrape, Observers([self]), self.tasks, clock, settings,  # type: ignore[arg-type]
            deadlines,
        )  # fmt: skip
        for url in urls:
            self.engines.add(EngineSpec(url, ROLES[url[0]]), None, ranks=ranks)  # type: ignore[arg-type]
            self.ledger.mark_up(url, evidence())
        self._count = 0.0

    def may_ask(self, engine: Engine) -> bool:
        return self.canaries

    async def works(self, engine: Engine, rank: int | None) -> bool | None:
        self.asked.append((engine.url, rank))
        while self._stands(engine.url, rank):
            await asyncio.sleep(0)
        return None if self.refuse else True

    def _stands(self, url: str, rank: int | None = None) -> bool:
        return url in self.busy or url in self.frozen or f"{url}/{rank}" in self.frozen

    async def _scrape(self, url: str) -> Scrape:
        if not self.metrics:
            return NO_METRICS
        self._count += 1
        ranks = range(self.engines[url].ranks)
        moved = {
            str(r): (
                0.0
                if self._stands(url, r) or not self.engines[url].open_legs.legs
                else self._count,
            )
            for r in ranks
        }
        return Scrape(0.0, None, 0.0, None, 0.0, {}, progress=moved)

    def leg(self, url: str, **fields: Any) -> Leg:
        """A leg to an engine from now on."""
        made = Leg(self.now, **fields)
        self.engines[url].open_legs.add(made)
        return made

    async def look(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        """Let time pass, with a look after each step."""
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            each()
            self.stalls.look(self.now)
            for _ in range(6):
                await asyncio.sleep(0)

    @property
    def stalled(self) -> list[str]:
        return [engine.url for engine in self.ledger.engines if engine.stalled is not None]

    async def close(self) -> None:
        for url in list(self.engines):
            self.engines._engines.pop(url)
        self.frozen.clear()
        self.busy.clear()
        await self.tasks.settle(1)


@pytest.fixture
def pools() -> Any:
    return Pool


async def test_a_core_that_stands_still_is_found_in_time_and_its_legs_end() -> None:
    """All of them, streamed or not. What the proxy did is reported, and shown."""
    pool = Pool("d1", "d2")
    pool.frozen.add("d1")
    legs = [pool.leg("d1"), pool.leg("d1", sign=pool.now + 0.5, must_progress=False)]
    other = pool.leg("d2")
    await pool.look(AFTER)
    assert pool.stalled == ["d1"]
    for leg in legs:
        (error, *_) = leg.failed
        assert isinstance(error, EngineTimeoutError)
        assert error.wait is Wait.STALLED
    assert not other.failed
    assert pool.stalls.stalls() == [(("d1",), 1), (("d2",), 0)]
    assert dict(pool.stalls.canaries())["d1", "failed"] == 0, (
        "it has not answered yet: only its end is counted"
    )
    assert [(event.node, event.up) for event in pool.events if isinstance(event, NodeChanged)] == [
        ("d1", False)
    ]
    assert "stands still: no sign of its core for" in pool.ledger.shortcomings(pool.now)[0]
    await pool.close()


async def test_an_engine_without_legs_is_not_asked() -> None:
    """Nothing is expected of it; a request that comes later finds out."""
    pool = Pool("d1", "d2")
    pool.frozen.add("d1")
    await pool.look(10 * AFTER)
    assert (pool.asked, pool.stalled) == ([], [])
    leg = pool.leg("d1")
    await pool.look(AFTER)
    assert pool.stalled == ["d1"]
    assert leg.failed
    await pool.close()


async def test_new_requests_do_not_hide_a_stall() -> None:
    """A leg is no sign. Clients that give up after a second, and others that come, keep the engine
    without any.
    """
    pool = Pool("d1", "d2")
    pool.frozen.add("d1")
    legs = [pool.leg("d1")]

    def replace() -> None:
        legs.append(pool.leg("d1"))
        if len(legs) > 2:
            old = legs.pop(0)
            pool.engines["d1"].open_legs.remove(old)

    await pool.look(2 * AFTER, replace)
    assert pool.stalled == ["d1"]
    await pool.close()


@pytest.mark.parametrize(
    ("metrics", "canaries", "stalled"),
    [(True, True, False), (False, True, False), (True, False, False), (False, False, True)],
)
async def test_what_clears_a_silent_engine(metrics: bool, canaries: bool, stalled: bool) -> None:
    """It answers a canary, or its metrics move. Without both, silence alone decides: the legs must
    go on.
    """
    pool = Pool("d1", "d2", metrics=metrics, canaries=canaries)
    leg = pool.leg("d1", sign=pool.now + 0.5)
    await pool.look(3 * AFTER)
    assert bool(pool.stalled) is bool(leg.failed) is stalled
    await pool.close()


async def test_where_nothing_can_be_asked_only_legs_that_must_go_on_count() -> None:
    """A leg that waits for KV or for its client may be silent for ever; and no role loses its last
    engine by silence alone.
    """
    pool = Pool("d1", "d2", "a1", metrics=False, canaries=False)
    waits = pool.leg("d1", must_progress=False, sign=pool.now + 0.5)
    await pool.look(4 * AFTER)
    assert pool.stalled == []
    pool.ledger.mark_down("d2", "gone", pool.now)
    waits.must_progress = True
    await pool.look(4 * AFTER)
    assert pool.stalled == [], "the last decode engine"
    pool.ledger.mark_up("d2", evidence())
    await pool.look(AFTER)
    assert pool.stalled == ["d1"]
    await pool.close()


async def test_a_refused_canary_shows_nothing() -> None:
    """An engine with a full queue, or without that route: its legs and its metrics decide."""
    pool = Pool("d1", "d2", metrics=False)
    pool.refuse = True
    waits = pool.leg("d1", must_progress=False, sign=pool.now + 0.5)
    await pool.look(4 * AFTER)
    assert pool.stalled == []
    waits.must_progress = True
    await pool.look(2 * AFTER)
    assert pool.stalled == ["d1"]
    await pool.close()


async def test_an_engine_without_metrics_may_be_full_of_answers_that_are_not_streamed() -> None:
    """Then a canary waits, too. It gets the longest time; a prefill engine, or one whose streams
    fall silent, does not.
    """
    pool = Pool("d1", "d2", "d3", "d4", "p1", "p2", metrics=False)
    pool.frozen |= {"d1", "d2", "p1"}
    whole = pool.leg("d1")
    pool.leg("d2", sign=pool.now + 0.5)
    pool.leg("p1")
    await pool.look(2 * AFTER)
    assert sorted(pool.stalled) == ["d2", "p1"]
    assert not whole.failed
    await pool.look(110)
    assert sorted(pool.stalled) == ["d1", "d2", "p1"]
    await pool.close()


async def test_signs_of_legs_need_no_question() -> None:
    """Streams that flow, and answers that end well."""
    pool = Pool("d1")
    stream = pool.leg("d1")
    legs = [pool.leg("d1")]

    def flow() -> None:
        stream.sign = pool.now

    await pool.look(3 * AFTER, flow)

    def answer() -> None:
        pool.engines["d1"].open_legs.remove(legs.pop(), ended_well=pool.now)
        legs.append(pool.leg("d1"))

    pool.engines["d1"].open_legs.remove(stream)
    await pool.look(3 * AFTER, answer)
    assert pool.asked == []
    await pool.close()


# -- who is to blame


@pytest.mark.parametrize(
    ("frozen", "stalled"),
    [({"p1"}, ["p1"]), ({"d1"}, ["d1"]), ({"p1", "d1"}, ["p1", "d1"]), (set(), [])],
)
async def test_a_decode_engine_that_waits_for_a_frozen_prefill_engine_is_not_to_blame(
    frozen: set[str], stalled: list[str]
) -> None:
    """Both are asked: each is judged by its own answer. The prefill engine has no leg of its own
    any more.
    """
    pool = Pool("p1", "p2", "d1", "d2")
    pool.frozen |= frozen
    leg = pool.leg("d1", must_progress=False, waits_for="p1")
    await pool.look(AFTER)
    assert pool.stalled == stalled
    assert bool(leg.lost) is ("p1" in frozen)
    assert bool(leg.failed) is ("d1" in frozen)
    assert not {url for url, _ in pool.asked} & {"p2", "d2"}
    await pool.close()


async def test_a_prefill_engine_that_stands_still_after_it_was_cleared_is_found() -> None:
    """One that answered a canary may stand still a moment later, while the leg elsewhere waits
    on.
    """
    pool = Pool("p1", "p2", "d1", "d2")
    leg = pool.leg("d1", must_progress=False, waits_for="p1")
    await pool.look(AFTER)
    assert pool.stalled == []
    pool.frozen.add("p1")
    await pool.look(2 * AFTER)
    assert pool.stalled == ["p1"]
    assert leg.lost
    await pool.close()


async def test_one_rank_of_several_that_stands_still() -> None:
    """The others answer and their streams flow: the silent leg raises the suspicion, and each rank
    is asked.
    """
    pool = Pool("d1", "d2", ranks=2)
    pool.frozen.add("d1/1")
    silent, flowing = pool.leg("d1"), pool.leg("d1")

    def flow() -> None:
        flowing.sign = pool.now

    await pool.look(AFTER, flow)
    assert pool.stalled == ["d1"]
    assert {rank for _, rank in pool.asked} == {0, 1}
    assert silent.failed
    assert not flowing.failed, "its rank works: it goes on to its end"
    await pool.close()


async def test_a_rank_that_only_waits_is_cleared() -> None:
    """As with one rank: all answer, and none is blamed for the silence of a leg that waits for
    KV.
    """
    pool = Pool("d1", "d2", ranks=2)
    leg = pool.leg("d1", must_progress=False, waits_for="p9")
    await pool.look(5 * AFTER)
    assert pool.stalled == []
    assert not leg.failed
    await pool.close()


# -- false verdicts


async def test_a_long_step_is_suspicious_once() -> None:
    """A compile, or a long chunk: the engine comes back in time, and may be silent for four times
    as long then.
    """
    pool = Pool("d1", "d2")
    pool.leg("d1")
    pool.busy.add("d1")
    await pool.look(AFTER - 2)
    pool.busy.clear()
    await pool.look(2)
    assert pool.stalled == []
    pool.busy.add("d1")
    await pool.look(AFTER + 2)
    assert pool.stalled == [], "it was silent for six seconds, and may be silent for twenty-four"
    await pool.look(2 * AFTER)
    assert pool.stalled == ["d1"]
    await pool.close()


@pytest.mark.parametrize(("seconds", "stalled"), [(AFTER + 2, False), (3 * AFTER, True)])
async def test_a_step_that_was_taken_for_a_standstill_is_allowed_next_time(
    seconds: float, stalled: bool
) -> None:
    """If it ends soon after the verdict: then twice as long a silence is. One that lasted is not
    learned.
    """
    pool = Pool("d1", "d2")
    for _ in range(2):
        leg = pool.leg("d1")
        pool.busy.add("d1")
        await pool.look(seconds)
        found = pool.stalled
        pool.busy.clear()
        pool.engines["d1"].open_legs.remove(leg)
        await pool.look(35)
        assert pool.stalled == []
    assert (found == ["d1"]) is stalled
    await pool.close()


async def test_a_proxy_that_was_held_up_blames_nobody() -> None:
    """It has not read what came meanwhile."""
    pool = Pool("d1", "d2")
    stream = pool.leg("d1")
    stream.sign = pool.now
    pool.frozen.add("d1")
    await pool.look(AFTER - 2)
    pool.now += 600
    pool.stalls.look(pool.now, held_up=True)
    assert pool.stalled == []
    await pool.look(AFTER - 2)
    assert pool.stalled == []
    await pool.look(2)
    assert pool.stalled == ["d1"]
    await pool.close()


# -- let in again


async def test_a_stalled_engine_is_let_in_by_a_sign_and_gets_one_request() -> None:
    """It goes on, and answers a canary."""
    pool = Pool("d1", "d2", "p1")
    pool.frozen.add("d1")
    leg = pool.leg("d1")
    await pool.look(AFTER)
    pool.engines["d1"].open_legs.remove(leg)
    await pool.look(40)
    assert pool.stalled == ["d1"]
    asked = len(pool.asked)
    assert asked < 12, "ever more rarely"
    pool.frozen.clear()
    await pool.look(31)
    assert pool.stalled == []
    assert pool.ledger.engines[0].half_open(pool.now)
    assert [event.up for event in pool.events if isinstance(event, NodeChanged)] == [False, True]
    leased = [pool.ledger.assign(SPLIT, Ask("m", 1, pool.now)) for _ in range(6)]
    trials = [
        one[Role.DECODE]
        for one in leased
        if one is not None and one[Role.DECODE].engine.url == "d1"
    ]
    assert len(trials) == 1
    pool.ledger.close(trials[0], Verdict.GOOD, pool.now)
    assert pool.ledger.engines[0].state(pool.now) == "up"
    await pool.close()


async def test_what_still_comes_to_a_stalled_engine_ends_at_the_next_look() -> None:
    """It was leased before, while its prefill was under way."""
    pool = Pool("d1", "d2")
    pool.frozen.add("d1")
    pool.engines["d1"].open_legs.remove(pool.leg("d1"))
    pool.leg("d1")
    await pool.look(AFTER)
    late = pool.leg("d1")
    await pool.look(1)
    assert late.failed
    await pool.close()


async def test_one_that_stands_still_again_and_again_is_let_in_later_each_time() -> None:
    """A canary may pass while every long prompt hangs."""
    pool = Pool("d1", "d2")
    out: list[float] = []
    for _ in range(4):
        pool.frozen.add("d1")
        leg = pool.leg("d1")
        while not pool.stalled:
            await pool.look(1)
        began = pool.now
        pool.frozen.clear()
        while pool.stalled:
            await pool.look(1)
        pool.engines["d1"].open_legs.remove(leg)
        out.append(pool.now - began)
    assert out[0] <= 3
    assert [first < second for first, second in pairwise(out)] == [True] * 3
    await pool.close()


async def test_another_run_begins_anew() -> None:
    """It is let in by its probes, and nothing is known of its pace."""
    pool = Pool("d1", "d2")
    pool.frozen.add("d1")
    pool.leg("d1")
    await pool.look(AFTER)
    assert pool.stalled == ["d1"]
    pool.ledger.mark_down("d1", "gone", pool.now)
    await pool.look(2)
    pool.frozen.clear()
    pool.engines["d1"].open_legs.legs.clear()
    pool.ledger.mark_up("d1", evidence(started=2.0))
    await pool.look(AFTER)
    assert pool.stalled == []
    await pool.close()


async def test_an_engine_that_is_removed_is_asked_no_more() -> None:
    """Its series vanish with it."""
    pool = Pool("d1", "d2")
    pool.frozen.add("d1")
    pool.leg("d1")
    await pool.look(AFTER)
    watch = pool.stalls._watches["d1"]
    pool.stalls.removed(pool.engines["d1"])
    assert watch._enquiry is None
    assert [labels for labels, _ in pool.stalls.stalls()] == [("d2",)]
    await pool.close()


@pytest.mark.parametrize("metrics", [False, True])
async def test_an_engine_that_cannot_be_asked_is_let_in_after_some_time(metrics: bool) -> None:
    """Without requests its metrics need not move: a request is what shows how it is."""
    pool = Pool("d1", "d2", metrics=metrics, canaries=False)
    pool.frozen.add("d1")
    leg = pool.leg("d1", sign=pool.now + 0.5)
    await pool.look(AFTER)
    assert pool.stalled == ["d1"]
    pool.engines["d1"].open_legs.remove(leg)
    await pool.look(25)
    assert pool.stalled == ["d1"]
    await pool.look(15)
    assert pool.stalled == []
    assert pool.ledger.engines[0].half_open(pool.now)
    await pool.close()


@pytest.mark.parametrize("metrics", [False, True])
async def test_one_that_cannot_be_asked_and_still_stands_still_is_let_in_later_each_time(
    metrics: bool,
) -> None:
    """A request is lost each time, so there are ever fewer of them. One that has worked for a while
    begins anew.
    """
    pool = Pool("d1", "d2", metrics=metrics, canaries=False)
    pool.frozen.add("d1")
    out: list[float] = []
    for pause in (0, 0, 0, 0, 0, 70):
        await pool.look(pause)
        leg = pool.leg("d1", sign=pool.now + 0.5)
        while not pool.stalled:
            await pool.look(1)
        began = pool.now
        pool.engines["d1"].open_legs.remove(leg)
        while pool.stalled:
            await pool.look(1)
        out.append(pool.now - began)
    assert out == [30, 60, 120, 240, 300, 30]
    await pool.close()


async def test_a_canary_that_was_refused_is_sent_again() -> None:
    """The engine's queue was full as it stopped."""
    pool = Pool("d1", "d2")
    pool.frozen.add("d1")
    pool.refuse = True
    leg = pool.leg("d1")
    pool.frozen.clear()
    pool.busy.clear()
    pool.metrics = False
    leg.sign = pool.now + 0.5
    await pool.look(AFTER)
    assert pool.stalled == ["d1"]
    pool.engines["d1"].open_legs.remove(leg)
    pool.refuse = False
    await pool.look(5)
    assert pool.stalled == []
    await pool.close()


async def test_a_long_prompt_without_metrics_may_take_its_time_once() -> None:
    """Its engine starves a canary meanwhile. As soon as the pace is known, that decides."""
    pool = Pool("p1", "p2", metrics=False)
    pool.busy.add("p1")
    leg = pool.leg("p1", prompt_bytes=1 << 20)
    await pool.look(30)
    assert pool.stalled == []
    pool.engines["p1"].open_legs.remove(leg, ended_well=pool.now)
    pool.leg("p1", prompt_bytes=1 << 20)
    await pool.look(100)
    assert pool.stalled == []
    await pool.look(20)
    assert pool.stalled == ["p1"]
    await pool.close()


async def test_a_suspected_engine_that_refuses_canaries_is_not_asked_for_ever() -> None:
    """The decode engine that waited has its answer; nobody waits for the other one any more."""
    pool = Pool("p1", "p2", "d1", "d2")
    pool.refuse = True
    leg = pool.leg("d1", waits_for="p1", must_progress=False)
    await pool.look(2 * AFTER)
    pool.engines["d1"].open_legs.remove(leg, ended_well=pool.now)
    asked = len(pool.asked)
    await pool.look(100)
    assert len(pool.asked) <= asked + 1
    await pool.close()


def blamed(*legs: Leg) -> list[bool | None]:
    """Whether each leg may have brought the standstill about; None: it goes on."""
    return [leg.failed[0].may_be_cause if leg.failed else None for leg in legs]  # type: ignore[attr-defined]


async def test_what_has_data_and_what_came_later_is_not_the_cause() -> None:
    """Where data flowed until a step that did not end."""
    pool = Pool("d1", "d2")
    pool.now += 10
    flowing = pool.leg("d1")
    pool.now += 5
    cause = pool.leg("d1")
    flowing.sign = pool.now
    pool.frozen.add("d1")
    late: list[Leg] = []
    await pool.look(AFTER, lambda: late.append(pool.leg("d1")))
    assert pool.stalled == ["d1"]
    assert blamed(flowing, cause) == [False, True]
    assert blamed(*late)[1:] == [False] * (len(late) - 1)
    await pool.close()


async def test_without_data_the_cause_may_be_any_that_was_sent_before_it_was_asked() -> None:
    """It may have worked in silence, on answers that are not streamed."""
    pool = Pool("d1", "d2")
    pool.frozen.add("d1")
    legs: list[Leg] = []
    await pool.look(AFTER, lambda: legs.append(pool.leg("d1")))
    assert pool.stalled == ["d1"]
    found = blamed(*legs)
    assert found[0]
    assert found == sorted(found, key=bool, reverse=True)
    assert not found[-1]
    await pool.close()


async def test_only_streams_are_all_suspected() -> None:
    """The step of one of them does not end."""
    pool = Pool("d1", "d2")
    legs = [pool.leg("d1", sign=pool.now + 0.5), pool.leg("d1", sign=pool.now + 0.5)]
    pool.frozen.add("d1")
    await pool.look(AFTER)
    assert blamed(*legs) == [True, True]
    await pool.close()


async def test_a_request_that_has_stopped_an_engine_before_is_waited_for() -> None:
    """So are streams that flow. Those without data end: others serve them. A sign lets all go
    on.
    """
    pool = Pool("d1", "d2")
    legs = [pool.leg("d1", stalled_before=1), pool.leg("d1", sign=pool.now + 0.5), pool.leg("d1")]
    pool.frozen.add("d1")
    await pool.look(4 * AFTER)
    assert pool.stalled == ["d1"]
    assert blamed(*legs) == [None, None, False]
    assert pool.engines["d1"].open_legs.waits_out
    pool.frozen.clear()
    await pool.look(3 * STEP)
    assert pool.stalled == []
    assert not pool.engines["d1"].open_legs.waits_out
    assert blamed(*legs) == [None, None, False]
    await pool.close()


async def test_it_is_waited_for_up_to_the_longest_time() -> None:
    """Then the one of them with the longest prompt is the cause."""
    pool = Pool("d1", "d2")
    legs = [
        pool.leg("d1", stalled_before=1),
        pool.leg("d1", stalled_before=1, prompt_bytes=9),
        pool.leg("d1"),
    ]
    pool.frozen.add("d1")
    await pool.look(119)
    assert blamed(*legs) == [None, None, False]
    await pool.look(2)
    assert blamed(*legs) == [False, True, False]
    assert not pool.engines["d1"].open_legs.waits_out
    await pool.close()
