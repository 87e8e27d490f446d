"""Numbers that processes share: sums, keys that come and go, and processes that are killed
at any moment.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.kit.shared_table import SharedTable, key_of


def test_a_process_reads_the_sums_of_the_others() -> None:
    """Its own column is not in them."""
    table = SharedTable(3, 4, 2)
    columns = [table.column(number) for number in range(3)]
    for number, column in enumerate(columns):
        column.write(7, [1 + number, 10 * number])
    assert [table.others(number).sums(7) for number in range(3)] == [(5, 30), (4, 20), (3, 10)]
    assert table.others(0).sums(8) == (0, 0)
    assert sorted(table.others(2).each(7)) == [(1, 0), (2, 10)]


def test_without_a_free_slot_the_others_know_nothing() -> None:
    """It is counted, and a slot that is given back is used again."""
    table = SharedTable(2, 2, 1)
    column = table.column(0)
    assert [column.write(key, [1]) for key in (1, 2, 3)] == [True, True, False]
    assert column.without_slot == 1
    column.drop(1)
    assert column.write(3, [4])
    assert table.others(1).sums(3) == (4,)
    assert column.read(3) == (4,)
    assert column.read(1) == (0,)


def test_what_a_dead_process_had_is_gone_but_for_sums() -> None:
    """The next process of the column goes on with its keys."""
    table = SharedTable(2, 4, 2, kept=[1])
    others = table.others(1)
    table.column(0).write(9, [3, 100])
    assert others.sums(9) == (3, 100)
    table.clear(0)
    assert others.sums(9) == (0, 100)
    after = table.column(0)
    assert after.read(9) == (0, 100)
    after.write(9, [1, 101])
    assert others.sums(9) == (1, 101)


def test_keys_of_dead_processes_fill_no_table() -> None:
    """Engines come and go, and so do processes: the next one can't drop what it does not know."""
    table = SharedTable(2, 4, 1)
    for turn in range(100):
        column, others = table.column(0), table.others(1)
        for at in range(4):
            assert column.write(turn * 4 + at + 1, (7,))
        assert others.sums(turn * 4 + 1) == (7,)
        table.clear(0)
        assert others.sums(turn * 4 + 1) == (0,)


def test_keys_are_the_same_everywhere() -> None:
    """They don't depend on the process's hash seed, and no text is the empty slot."""
    assert key_of("http://a:1") == 7474447514010783343
    assert len({key_of(f"http://10.0.0.{number}:8000") for number in range(4096)}) == 4096


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(0, 3), st.integers(0, 99)),
        max_size=80,
    )
)
def test_sums_follow_any_course(steps: list[tuple[int, int, int, int]]) -> None:
    """Whatever is written, dropped, cleared and read."""
    table = SharedTable(3, 5, 1)
    columns = [table.column(number) for number in range(3)]
    held: list[dict[int, int]] = [{}, {}, {}]
    readers = [table.others(number) for number in range(3)]
    for number, key, what, amount in steps:
        if what == 0:
            columns[number].drop(key)
            held[number].pop(key, None)
        elif what == 1 and amount < 10:
            table.clear(number)
            columns[number] = table.column(number)
            held[number] = dict.fromkeys(held[number], 0)
        elif columns[number].write(key, [amount]):
            held[number][key] = amount
        for one in range(1, 7):
            wanted = sum(held[at].get(one, 0) for at in range(3) if at != amount % 3)
            assert readers[amount % 3].sums(one) == (wanted,)


def _forked(work: Callable[[], None]) -> int:
    if (pid := os.fork()) == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def test_a_writer_is_killed_at_any_moment() -> None:
    """The others go on, what it held is gone, and its successor's numbers are right."""
    table = SharedTable(2, 8, 2, kept=[1])
    others, chance = table.others(1), random.Random(5)

    def write() -> None:
        column, number = table.column(0), 0
        while True:
            number += 1
            key = 1 + number % 7
            if number % 5 == 0:
                column.drop(key)
            else:
                column.write(key, [number, number])

    for _ in range(20):
        pid = _forked(write)
        others.sums(1)
        time.sleep(chance.random() / 100)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        table.clear(0)
        assert [others.sums(key)[0] for key in range(1, 8)] == [0] * 7
        after = table.column(0)
        assert all(after.write(key, [key, 0]) for key in range(1, 8))
        assert [others.sums(key) for key in range(1, 8)] == [(key, 0) for key in range(1, 8)]
        for key in range(1, 8):
            after.drop(key)


def test_a_writer_that_is_stopped_holds_up_nobody() -> None:
    """Readers see what it had, and go on."""
    table = SharedTable(2, 8, 1)
    others = table.others(1)

    def write() -> None:
        table.column(0).write(3, [8])
        signal.pause()

    pid = _forked(write)
    while others.sums(3) != (8,):
        time.sleep(0.001)
    os.kill(pid, signal.SIGSTOP)
    table.column(1).write(3, [1])
    assert others.sums(3) == (8,)
    assert table.others(0).sums(3) == (1,)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
