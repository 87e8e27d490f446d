"""Engines' windows with several workers: what one has learned holds for all, whoever of them
ends.
"""

from __future__ import annotations

import random

import pytest

from pdproxy.kit.shared_table import SharedTable, key_of
from pdproxy.scheduling.capacity import Load, Windows
from pdproxy.scheduling.worker_windows import MEASURES, WorkerWindows

A, B = "http://a:1", "http://b:1"
COUNT = 3


class Workers:
    """The windows of several workers."""

    def __init__(self, count: int = COUNT) -> None:
        self.table = SharedTable(count, 8, MEASURES)
        self.all = [self.made(number) for number in range(count)]

    def made(self, number: int) -> WorkerWindows:
        made = WorkerWindows(self.table.column(number), self.table.others(number), number)
        for url in (A, B):
            made.add(url)
        return made

    def restart(self, number: int) -> None:
        """A worker is killed, and started again."""
        self.table.clear(number)
        self.all[number] = self.made(number)


def full(windows: Windows, load: Load) -> None:
    """An engine reports twice that many requests wait in it."""
    for _ in range(2):
        windows.seen(load, load.requests / 2, 0.5)


@pytest.mark.parametrize("seed", range(20))
def test_all_have_the_windows_of_one_process(seed: int) -> None:
    """One learns from reports at a time, any of them from refusals, and forgets; any but one at a
    time is killed.
    """
    chance, workers, one = random.Random(seed), Workers(), Windows()
    leader = 0
    for _ in range(400):
        load = Load(chance.choice((A, B)), chance.randrange(1, 60))
        step = chance.random()
        if step < 0.6:
            report = chance.choice((0.0, 0.0, load.requests * 0.4)), chance.choice((0.1, 0.5, 0.95))
            one.seen(load, *report)
            workers.all[leader].seen(load, *report)
        elif step < 0.8:
            one.refused(load)
            chance.choice(workers.all).refused(load)
        elif step < 0.85:
            one.forget(load.url)
            chance.choice(workers.all).forget(load.url)
        elif step < 0.95:
            chance.choice(workers.all).look()
        else:
            killed = chance.randrange(COUNT)
            for worker in workers.all:
                worker.look()
            workers.restart(killed)
            if killed == leader:
                leader = (leader + 1) % COUNT
                # how often an engine was full in a row is known to the leader alone
                one._full.clear()
                workers.all[leader]._full.clear()
    for worker in workers.all:
        worker.look()
        assert worker._windows == one._windows


def test_a_window_is_known_to_all_at_their_next_look() -> None:
    workers = Workers()
    full(workers.all[0], Load(A, 20))
    window = workers.all[0].of(Load(A, 0))
    assert window is not None
    for worker in workers.all[1:]:
        assert worker.of(Load(A, 0)) is None
        assert worker.look()
        assert worker.of(Load(A, 0)) == window
        assert not worker.look(), "there is nothing new"
    workers.all[1].forget(A)
    assert workers.all[2].look()
    assert workers.all[2].of(Load(A, 0)) is None


def test_a_change_is_one_of_the_newest_window() -> None:
    """A worker that has not looked for long does not bring an old one back."""
    workers = Workers()
    full(workers.all[0], Load(A, 20))
    workers.all[1].look()
    full(workers.all[0], Load(A, 12))
    smaller = workers.all[0].of(Load(A, 0))
    workers.all[1].refused(Load(A, 40))
    assert workers.all[1].of(Load(A, 0)) == 40.0, "it has so many, and refuses one more"
    assert workers.all[0].look()
    assert smaller is not None
    assert workers.all[0].of(Load(A, 0)) == 40.0


def test_what_is_known_outlives_all_but_one() -> None:
    """Those that have learned it are killed one after the other; their successors begin with it."""
    workers = Workers()
    full(workers.all[0], Load(A, 20))
    window = workers.all[0].of(Load(A, 0))
    workers.all[2].look()
    workers.restart(0)
    workers.restart(1)
    workers.restart(2)
    assert [worker.of(Load(A, 0)) for worker in workers.all] == [window] * COUNT


def test_a_row_that_is_half_written_is_no_window() -> None:
    """Its worker is killed just then: nobody takes it, and the next change holds."""
    workers = Workers(2)
    full(workers.all[0], Load(A, 20))
    row = workers.all[0]._column.row(key_of(A))
    assert row is not None
    row[0] += 1 << 10
    assert not workers.all[1].look()
    assert workers.all[1].of(Load(A, 0)) is None
    workers.restart(0)
    full(workers.all[1], Load(A, 10))
    assert workers.all[0].look()
    assert workers.all[0].of(Load(A, 0)) == workers.all[1].of(Load(A, 0))


def test_an_engine_that_is_removed_leaves_its_slot() -> None:
    """It comes back with nothing known, once all have removed it."""
    workers = Workers(2)
    full(workers.all[0], Load(A, 20))
    workers.all[1].look()
    for worker in workers.all:
        worker.remove(A)
        assert len(worker._column.keys()) <= 1
        full(worker, Load(A, 20))
        worker.remove(A)
        assert not worker._column.keys(), "an engine that is gone takes none"
    for worker in workers.all:
        worker.add(A)
        assert worker.of(Load(A, 0)) is None
        assert not worker.look()


def test_more_engines_than_slots() -> None:
    """What is learned of one that has no slot is known to its worker alone."""
    table = SharedTable(2, 1, MEASURES)
    first, second = (WorkerWindows(table.column(at), table.others(at), at) for at in (0, 1))
    for url in (A, B):
        first.add(url)
        second.add(url)
        full(first, Load(url, 20))
    second.look()
    assert second.of(Load(A, 0)) == first.of(Load(A, 0))
    assert second.of(Load(B, 0)) is None
    assert first.of(Load(B, 0)) is not None
