"""An engine's load in several workers: each sees what one process would, and a worker that ends
takes its part along.
"""

from __future__ import annotations

import math
import os
import random
import signal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdproxy.kit.shared_rows import SharedRows
from pdproxy.scheduling.auto.loads import MEMORY_S, PredictedLeg, PredictedLoad
from pdproxy.scheduling.auto.times import WorkTimes
from pdproxy.scheduling.auto.worker_loads import FLOATS, WorkerLoad
from tests.auto.fleets import H200, node
from tests.auto.test_loads import DECODE, PREFILL, WHOLE, opened

COUNTED_BY_STEPS = ("context", "step", "decode_order")
"""These depend on how often steps were counted in between, and a little on their rounding; so does
what is learned from them.
"""


class Workers:
    """One engine in so many workers. `told`: whom another worker has told whether the engine is
    kept.
    """

    def __init__(self, count: int, slots: int = 4) -> None:
        self.memory = SharedRows(count, slots, FLOATS)
        self.told: list[int] = []
        self.loads = [self.load(number) for number in range(count)]

    def load(self, number: int) -> WorkerLoad:
        return WorkerLoad(
            node(),
            WorkTimes(H200, 2048),
            self.memory.column(number),
            self.memory.others(number),
            lambda _: self.told.append(number),
        )

    def killed(self, number: int) -> WorkerLoad:
        """Have a worker killed. Return what its successor has."""
        self.memory.clear(number)
        self.loads[number] = self.load(number)
        return self.loads[number]


def seen(load: PredictedLoad, now: float) -> dict[str, float]:
    """What decisions ask of a load."""
    load.advance(now)
    return {
        "pending_s": load.pending_s,
        "pending_steps": load.pending_steps,
        "free_at": load.free_at,
        "expected": load.expected,
        "expected_tokens": load.expected_tokens,
        "pulls": load.pulls,
        "decoding": load.decoding,
        "context": load.context(),
        "outputs": load.outputs,
        "age": load.decoding * now - load.began_sum,
        "delay": load.delay * math.exp((load.delay_at - now) / MEMORY_S),
        "wait_s": load.wait_s,
        "prefill": load.times.prefill_factor,
        "step": load.times.step_factor,
        "prefill_order": load.prefill_order,
        "decode_order": load.decode_order,
    }


class Both:
    """The same leases in one process, and in workers, each in one of them."""

    def __init__(self, count: int) -> None:
        self.one, self.workers = PredictedLoad(node(), WorkTimes(H200, 2048)), Workers(count)
        self.open: list[tuple[int, str, PredictedLeg, PredictedLeg]] = []
        self.decoding: list[tuple[int, PredictedLeg, PredictedLeg]] = []

    def begin_unseen(self, now: float) -> None:
        """Have answers that come as a whole begin, in the order of their times."""
        self.one.advance(now)
        due = [
            (at, number)
            for number, load in enumerate(self.workers.loads)
            for at, *_ in load._unseen
            if at <= now
        ]
        for at, number in sorted(due):
            self.workers.loads[number].advance(at)

    def step(self, what: str, number: int, now: float, chance: random.Random) -> None:
        """`what`: open, begin, fail, end or unseen; `number`: of the worker that opens."""
        loads = self.workers.loads
        if what in ("open", "unseen"):
            kind, tokens = chance.choice((WHOLE, PREFILL, DECODE)), chance.randrange(1, 30_000)
            kind = WHOLE if what == "unseen" else kind
            mine = opened(self.one, now, kind, tokens)
            theirs = opened(loads[number], now, kind, tokens)
            if what == "unseen":
                at = now + chance.random()
                self.one.begins_unseen(mine, at)
                loads[number].begins_unseen(theirs, at)
                self.decoding.append((number, mine, theirs))
            else:
                self.open.append((number, kind, mine, theirs))
        elif self.open and what in ("begin", "fail"):
            number, kind, mine, theirs = self.open.pop(chance.randrange(len(self.open)))
            begins = what == "begin"
            for load, leg in ((self.one, mine), (loads[number], theirs)):
                if leg.seconds:
                    load.computed(leg, leg.opened_at + 0.03, now if begins else 0.0, now)
                if kind != PREFILL:
                    if begins:
                        load.began(leg, now)
                    else:
                        load.never_began(leg)
            if begins and kind != PREFILL:
                self.decoding.append((number, mine, theirs))
        elif self.decoding and what == "end":
            number, mine, theirs = self.decoding.pop(chance.randrange(len(self.decoding)))
            made: int | None = chance.choice((None, 1, 100, 3000))
            for load, leg in ((self.one, mine), (loads[number], theirs)):
                load.advance(now)
                if leg.began_at is not None:
                    load.ended(leg, now, made)
                else:
                    leg.unseen = False
                    load.computed(leg, leg.opened_at + 0.03, 0.0, now)
                    load.never_began(leg)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 4))
@example(seed=12, count=1)  # a factor for steps that differs by 1 %
@example(seed=37, count=3)  # a time that differs by 3 us
def test_workers_see_what_one_process_would(seed: int, count: int) -> None:
    """Whatever comes and goes in whichever of them. Answers that come as a whole begin in the
    worker that has them.
    """
    chance, both, now = random.Random(seed), Both(count), 0.0
    for _ in range(120):
        now += chance.expovariate(5.0)
        both.begin_unseen(now)
        what = chance.choice(("open", "open", "begin", "begin", "fail", "end", "end", "unseen"))
        both.step(what, chance.randrange(count), now, chance)
        for load in both.workers.loads:
            load.read()
            wanted, found = seen(both.one, now), seen(load, now)
            for name in COUNTED_BY_STEPS:
                assert found.pop(name) == pytest.approx(wanted.pop(name), rel=2e-2, abs=5e-3)
            assert found == pytest.approx(wanted, rel=1e-9, abs=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_left_when_all_is_over(seed: int) -> None:
    """Exactly nothing: no rests of sums of floats."""
    chance, both, now = random.Random(seed), Both(3), 0.0
    for _ in range(3000):
        now += chance.expovariate(20.0)
        both.step(chance.choice(("open", "begin", "fail", "end")), chance.randrange(3), now, chance)
    while both.open or both.decoding:
        both.step(chance.choice(("fail", "end")), 0, now, chance)
    for load in both.workers.loads:
        load.read()
        left = (
            load.pending_s,
            load.expected,
            load.pulls,
            load.decoding,
            load.prompts,
            load.outputs,
            load.began_sum,
        )
        assert left == (0.0, 0, 0, 0, 0, 0.0, 0.0)
        assert load.context() == 0.0


def test_a_killed_worker_takes_its_part_along() -> None:
    """What it had counts no more; what the others have, and what is known of the engine, stays. Its
    successor knows both.
    """
    workers = Workers(3)
    opened(workers.loads[0], 0.0, WHOLE)
    leg = opened(workers.loads[1], 0.0, WHOLE, 500)
    for _ in range(40):
        done = opened(workers.loads[2], 0.1, WHOLE)
        workers.loads[2].computed(done, 0.13, 0.2, 0.2)
        workers.loads[2].began(done, 0.2)
    alone = workers.loads[1]
    alone.read()
    assert (alone.expected, alone.decoding) == (2, 40)
    factor = alone.times.prefill_factor
    assert factor != 1.0
    for number, left in ((2, (2, 0)), (0, (1, 0))):
        workers.killed(number)
        for load in workers.loads:
            load.read()
            assert (load.expected, load.decoding) == left
    assert alone.pending_s == leg.seconds
    assert {load.expected_tokens for load in workers.loads} == {500}
    assert {load.times.prefill_factor for load in workers.loads} == {factor}
    assert all(load.prefill.known for load in workers.loads)


def test_two_that_change_it_at_once_lose_no_part_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither has read what the other has written: one of the changes of the state is lost."""
    workers = Workers(3)
    legs = []
    for load in workers.loads[:2]:
        monkeypatch.setattr(WorkerLoad, "read", lambda _: None)
        legs.append(opened(load, 1.0, WHOLE))
    monkeypatch.undo()
    third = workers.loads[2]
    third.read()
    assert third.pending_s == sum(leg.seconds for leg in legs)
    assert third.expected == 2
    assert third.free_at == pytest.approx(1.03 + third.pending_s)


def test_who_is_kept_is_known_as_long_as_any_worker_is_there() -> None:
    """The leader decides. It is killed, and so is each that has heard it from the leader."""
    workers = Workers(3)
    workers.loads[0].tell_kept(kept=True)
    workers.loads[0].tell_kept(kept=True)
    for load in workers.loads[1:]:
        load.read()
        load.read()
    assert workers.told == [1, 2]
    for number in range(3):
        assert workers.killed(number).kept
    workers.loads[1].tell_kept(kept=False)
    for load in workers.loads:
        load.read()
    assert not any(load.kept for load in workers.loads)


def test_of_two_leaders_one_prevails() -> None:
    """Both decide at once: all see the same afterwards, and what the next one decides holds."""
    workers = Workers(4)
    workers.loads[0].tell_kept(kept=True)
    workers.loads[0].tell_kept(kept=False)
    workers.loads[1].tell_kept(kept=True)
    workers.loads[1].tell_kept(kept=False)
    workers.loads[1].tell_kept(kept=True)
    workers.loads[0].tell_kept(kept=True)
    for load in (*workers.loads, *workers.loads):
        load.read()
    assert len({load.kept for load in workers.loads}) == 1
    workers.loads[2].tell_kept(kept=False)
    for load in (*workers.loads, *workers.loads):
        load.read()
    assert not any(load.kept for load in workers.loads)


def test_a_load_that_has_left_writes_nothing() -> None:
    """The engine is gone while a leg runs, and comes again: it begins with nothing there."""
    workers = Workers(2)
    leg = opened(workers.loads[0], 0.0, WHOLE)
    old = workers.loads[0]
    old.leave()
    old.leave()
    new = workers.load(0)
    old.computed(leg, 0.03, 0.1, 0.1)
    old.began(leg, 0.1)
    workers.loads[1].read()
    assert (workers.loads[1].decoding, workers.loads[1].expected, workers.loads[1].pending_s) == (
        0,
        0,
        0.0,
    )
    opened(new, 0.2, WHOLE)
    workers.loads[1].read()
    assert workers.loads[1].expected == 1


def test_without_a_slot_a_worker_sees_the_others() -> None:
    """There are more engines than slots: its own part is known to itself alone."""
    memory = SharedRows(2, 1, FLOATS)
    first = WorkerLoad(
        node(), WorkTimes(H200, 2048), memory.column(0), memory.others(0), lambda _: None
    )
    column = memory.column(1)
    assert column.own(99) is not None  # the only slot
    second = WorkerLoad(node(), WorkTimes(H200, 2048), column, memory.others(1), lambda _: None)
    opened(first, 0.0, WHOLE)
    second.read()
    opened(second, 0.0, WHOLE)
    first.read()
    assert (first.expected, second.expected) == (1, 2)
    assert column.without_slot == 1


def _serve(memory: SharedRows, number: int, steps: int) -> None:
    """Be a worker that opens and ends legs as fast as it can, and ends all of them."""
    load = WorkerLoad(
        node(), WorkTimes(H200, 2048), memory.column(number), memory.others(number), lambda _: None
    )
    chance, now, waiting, running = (
        random.Random(number),
        0.0,
        list[PredictedLeg](),
        list[PredictedLeg](),
    )
    for step in range(steps):
        now += 0.01
        if step < steps // 2 and chance.random() < 0.4:
            waiting.append(opened(load, now, chance.choice((WHOLE, DECODE))))
        elif waiting:
            leg = waiting.pop()
            if leg.seconds:
                load.computed(leg, leg.opened_at + 0.03, now, now)
            load.began(leg, now)
            running.append(leg)
        elif running:
            load.ended(running.pop(), now, 50)
        assert math.isfinite(load.context())
        assert load.expected >= 0
        assert load.decoding >= 0
    assert not waiting
    assert not running


@pytest.mark.parametrize("is_killed", [False, True])
def test_processes_that_change_it_at_the_same_time_leave_nothing(is_killed: bool) -> None:
    """Whatever they have read of each other in between. One is killed: it leaves nothing either."""
    memory = SharedRows(4, 4, FLOATS)
    pids = []
    for number in range(3):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                _serve(memory, number, 1 << 30 if is_killed and not number else 10_000)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids[is_killed:]]
    if is_killed:
        os.kill(pids[0], signal.SIGKILL)
        os.waitpid(pids[0], 0)
        memory.clear(0)
    assert not any(statuses)
    load = WorkerLoad(
        node(), WorkTimes(H200, 2048), memory.column(3), memory.others(3), lambda _: None
    )
    assert (load.pending_s, load.expected, load.pulls, load.decoding, load.prompts) == (
        0.0,
        0,
        0,
        0,
        0,
    )
    assert (load.expected_tokens, load.outputs, load.context()) == (0, 0.0, 0.0)
    assert load.prefill.count > 0
