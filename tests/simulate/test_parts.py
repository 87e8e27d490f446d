"""Memory, gaps, loads."""

from __future__ import annotations

import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy_lab.bench.arrivals import Arrivals
from pdproxy_lab.bench.trace import TraceEntry
from pdproxy_lab.bench.workload import Lengths
from pdproxy_lab.simulate.gaps import Histogram, WorstGaps
from pdproxy_lab.simulate.load import Synthetic, TraceReplay
from pdproxy_lab.simulate.memory import KVMemory
from pdproxy_lab.simulate.shape import Fleet, Shape

SECONDS = st.floats(1e-4, 10.0)


@given(st.lists(SECONDS, min_size=1, max_size=60), st.data())
def test_the_worst_gap_is_the_longest_step_since(
    durations: list[float], data: st.DataObject
) -> None:
    gaps = WorstGaps()
    for step, seconds in enumerate(durations, 1):
        gaps.add(step, seconds)
    since = data.draw(st.integers(0, len(durations)))
    assert gaps.worst_after(since) == max(durations[since:], default=0.0)


def test_gaps_that_nobody_asks_for_are_forgotten() -> None:
    gaps = WorstGaps()
    for step in range(5000):
        gaps.add(step, 1.0 - step / 10_000)
        gaps.forget(step - 10)
    assert len(gaps) < 1100
    assert gaps.worst_after(4990) == 1.0 - 4991 / 10_000


@given(SECONDS, st.floats(0.0, 0.01), st.integers(1, 300), st.integers(1, 9))
def test_rising_steps_are_counted_as_one_by_one(
    first: float, increment: float, steps: int, count: int
) -> None:
    together, single = Histogram(), Histogram()
    together.add_rising(first, increment, steps, count)
    for place in range(steps):
        single.add(first + increment * place, count)
    assert together.total == single.total == steps * count
    # a step on the edge of a class may be in either one
    for percent in (50, 90):
        ours, theirs = together.spread(), single.spread()
        assert ours is not None
        assert theirs is not None
        assert (ours.percentiles[percent] or 0) == pytest.approx(
            theirs.percentiles[percent] or 0, rel=0.021
        )


def test_percentiles_are_right_within_one_percent() -> None:
    histogram = Histogram()
    for number in range(1, 1001):
        histogram.add(number / 1000)
    found = histogram.spread()
    assert found is not None
    assert found.percentiles[50] == pytest.approx(0.5, rel=0.011)
    assert found.percentiles[99] == pytest.approx(0.99, rel=0.011)
    assert found.mean == pytest.approx(0.5005, rel=0.011)
    assert Histogram().spread() is None


@given(st.integers(0, 2**32))
def test_the_memory_loses_no_block(seed: int) -> None:
    chance, memory = random.Random(seed), KVMemory(64, 4)
    users: list[tuple[int, list[int]]] = []
    for _ in range(200):
        if users and chance.random() < 0.5:
            blocks, held = users.pop(chance.randrange(len(users)))
            memory.release(blocks, held)
            continue
        keys = [chance.randrange(6) for _ in range(chance.randint(0, 3))]
        keys = list(dict.fromkeys(keys))
        found, unused = memory.find(keys, len(keys))
        need = 4 * (len(keys) - found) + chance.randint(0, 5)
        if need + unused > memory.available:
            continue
        memory.hold(keys[:found])
        memory.take(need)
        held = keys[:found] + [key for key in keys[found:] if memory.remember(key)]
        users.append((4 * found + need, held))
        shared = {key for _, held in users for key in held}
        in_use = 4 * len(shared) + sum(blocks - 4 * len(held) for blocks, held in users)
        assert memory.available == 64 - in_use
    for blocks, held in users:
        memory.release(blocks, held)
    assert memory.available == 64
    memory.take(64)
    assert memory.find([0, 1, 2, 3, 4, 5], 6) == (0, 0)


def test_a_trace_is_repeated_with_other_prompts_of_the_same_structure() -> None:
    entries = [TraceEntry(0.0, 1100, 5, (3, 4, 5)), TraceEntry(2.0, 600, 7, (3, 9))]
    calls = list(TraceReplay(entries=entries, requests=5, scale=2.0).calls(0))
    assert [call.due for call in calls] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [list(call.keys) for call in calls] == [[3, 4], [3], [13, 14], [13], [23, 24]]
    assert [call.number for call in calls] == [0, 1, 2, 3, 4]


def test_a_trace_is_cut_at_the_duration() -> None:
    entries = [TraceEntry(float(second), 10, 1) for second in range(10)]
    assert len(list(TraceReplay(entries=entries, duration=4.5).calls(0))) == 5
    assert len(list(TraceReplay(entries=entries).calls(0))) == 10
    assert len(list(TraceReplay(entries=entries, duration=25.0).calls(0))) == 25


def test_a_trace_at_one_moment_is_repeated_each_second() -> None:
    entries = [TraceEntry(5.0, 10, 1), TraceEntry(5.0, 10, 1)]
    assert [call.due for call in TraceReplay(entries=entries, requests=4).calls(0)] == [
        0.0,
        0.0,
        1.0,
        1.0,
    ]


def test_rates_replace_the_times_of_a_trace() -> None:
    entries = [TraceEntry(0.0, 10, 1), TraceEntry(0.0, 20, 1)]
    replay = TraceReplay(entries=entries, arrivals=Arrivals(kind="constant", rate=4.0), requests=4)
    assert [(call.due, call.prompt) for call in replay.calls(0)] == [
        (0.0, 10),
        (0.25, 20),
        (0.5, 10),
        (0.75, 20),
    ]


def test_too_many_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="more than"):
        Synthetic(
            arrivals=Arrivals(rate=1000.0),
            inputs=Lengths(1, 1),
            outputs=Lengths(1, 1),
            duration=86_400.0,
        ).calls(0)


def test_lengths_come_from_the_seed() -> None:
    load = Synthetic(
        arrivals=Arrivals(rate=5.0), inputs=Lengths(1, 900), outputs=Lengths(1, 90), duration=20.0
    )
    first, again, other = (
        [(call.due, call.prompt, call.output) for call in islice(load.calls(seed), 50)]
        for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fleet(), "1 to 4096 engines, got 0"),
        (lambda: Fleet(prefill=1, aggregated=1), "need decode engines"),
        (lambda: Fleet(decode=-1), "must not be negative"),
        (lambda: Shape(max_num_batched_tokens=0), "max_num_batched_tokens"),
        (lambda: Shape(block_size=24), "block_size must divide 512"),
        (lambda: Shape(kv_tokens=100), "kv_tokens must be at least 512"),
    ],
)
def test_wrong_engines_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
