"""Rows of floats that processes share: each is read as it was written, whoever is killed while it
writes.
"""

from __future__ import annotations

import os
import random
import signal
import time

from pdproxy.kit.shared_rows import SharedRows
from pdproxy.kit.shared_table import RING


def test_a_process_takes_the_rows_that_are_new() -> None:
    """Those of each other process, once; of a row that is gone zeros."""
    table = SharedRows(3, 4, 2)
    others, seen = table.others(0), [0, 0]
    rows = [table.column(number).own(7) for number in (1, 2)]
    assert others.newer(7, seen) == []  # nothing was written yet
    for number, row in enumerate(rows, 1):
        assert row is not None
        row.write(1.0, [0.5 * number, -1.0])
    assert others.newer(7, seen) == [(0, (1.0, 0.5, -1.0, 1.0)), (1, (1.0, 1.0, -1.0, 1.0))]
    assert others.newer(7, seen) == []
    assert others.newer(8, [0, 0]) == []
    table.clear(2)
    assert others.newer(7, seen) == [(1, others.no_row)]
    assert others.newer(7, seen) == []


def test_a_row_that_is_dropped_and_made_again_is_new() -> None:
    table = SharedRows(2, 4, 1)
    column, others, seen = table.column(1), table.others(0), [0]
    for number in (1.0, 2.0):
        row = column.own(7)
        assert row is not None
        row.write(number, [number])
        assert others.newer(7, seen) == [(0, (number, number, number))]
        column.drop(7)
        assert others.newer(7, seen) == [(0, others.no_row)]


def test_what_was_written_is_named_once() -> None:
    """With the place of its column, and its beginning. One that comes or goes may be any; those of
    a writer far ahead, too.
    """
    table = SharedRows(3, 4, 1)
    columns, others = [table.column(number) for number in (1, 2)], table.others(0)
    rows = [column.own(7) for column in columns]
    assert others.written() is None
    assert others.written() == []
    for row in rows:
        assert row is not None
        for version in (1.0, 2.0):
            row.write(version, [3.0])
    assert others.written() == [(0, 7, (2.0, 3.0, 2.0)), (1, 7, (2.0, 3.0, 2.0))]
    assert others.written() == []
    seen = [0, 0]
    assert others.newer_in(1, 7, seen) == (2.0, 3.0, 2.0)
    assert others.newer_in(1, 7, seen) is None
    assert others.newer(7, seen) == [(0, (2.0, 3.0, 2.0))]
    columns[0].drop(7)
    assert others.written() is None
    assert others.newer_in(0, 7, seen) == others.no_row
    assert rows[1] is not None
    for version in range(RING):
        rows[1].write(3.0 + version, [3.0])
    assert others.written() is None
    table.clear(2)
    assert others.written() is None
    assert others.newer_in(1, 7, seen) == others.no_row


def test_there_may_be_no_slot() -> None:
    column = SharedRows(2, 1, 1).column(0)
    assert column.own(1) is not None
    assert column.own(2) is None
    assert column.without_slot == 1


def test_a_half_written_row_is_left_for_the_next_look() -> None:
    """Whichever of its numbers were written: what was taken before stays."""
    for written in range(1, 4):
        table = SharedRows(2, 4, 3)
        row, others, seen = table.column(1).own(7), table.others(0), [0]
        assert row is not None
        row.write(1.0, [1.0, 1.0, 1.0])
        assert others.newer(7, seen) == [(0, (1.0,) * 5)]
        cells = row._floats
        cells[4] = 2.0
        for at in range(1, written + 1):
            cells[at] = 2.0
        assert others.newer(7, seen) == []
        assert others.newer_in(0, 7, seen) is None
        assert others.newer(7, [0]) == []  # nor by one that begins
        assert others.newer_in(0, 7, [0]) is None
        row.write(2.0, [2.0, 2.0, 2.0])
        assert others.newer(7, seen) == [(0, (2.0,) * 5)]


def test_no_reader_sees_a_mixture_while_a_process_writes_and_is_killed() -> None:
    """All numbers of a row are its version; after the kill and the clearing nothing is left."""
    table, chance, patience = SharedRows(2, 8, 12), random.Random(5), time.monotonic() + 60
    others, seen = table.others(1), {key: [0] for key in range(1, 6)}

    def write() -> None:
        column, version = table.column(0), 0.0
        rows = [column.own(key) for key in range(1, 6)]
        while True:
            version += 1.0
            for row in rows:
                assert row is not None
                row.write(version, [version] * 12)

    taken = 0
    for _ in range(10):
        wanted = taken + chance.randrange(20, 400)
        if (pid := os.fork()) == 0:
            write()
        try:
            while taken < wanted:
                assert time.monotonic() < patience
                for key in range(1, 6):
                    for _, row in others.newer(key, seen[key]):
                        taken += 1
                        assert len(set(row)) == 1
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        table.clear(0)
        for key in range(1, 6):
            assert all(row == others.no_row for _, row in others.newer(key, seen[key]))
