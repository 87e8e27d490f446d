"""Records that outlive their writer: whole or not there, whenever it is killed."""

from __future__ import annotations

import os
import random
import signal
import time
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from pdproxy.workers.records import UNIT, SharedRecords


def test_records_are_found_and_cleared() -> None:
    records = SharedRecords(2, 8)
    area = records.area(0)
    first, second = area.put(b"x"), area.put(b"y" * (2 * UNIT + 1))
    assert (first, second) == (0, 1)
    assert area.put(b"z" * (4 * UNIT + 1)) is None
    assert area.without_space == 1
    assert area.put(b"z" * (4 * UNIT)) == 4
    area.drop(0)
    assert area.put(b"new") == 0
    assert records.taken(1) == []
    assert records.taken(0) == [b"new", b"y" * (2 * UNIT + 1), b"z" * (4 * UNIT)]
    assert records.taken(0) == []
    assert records.area(0).put(b"again") == 0


@given(st.lists(st.tuples(st.booleans(), st.binary(min_size=1, max_size=3000)), max_size=60))
def test_any_course(steps: list[tuple[bool, bytes]]) -> None:
    """What was put and not dropped is there, whatever was there before."""
    records = SharedRecords(1, 24)
    area, held = records.area(0), dict[int, bytes]()
    for drops, record in steps:
        if drops and held:
            area.drop(held.popitem()[0])
        elif (at := area.put(record)) is not None:
            assert at not in held
            held[at] = record
    assert sorted(records.taken(0)) == sorted(held.values())


def test_a_writer_is_killed_at_any_moment() -> None:
    """No half record is found, and none that was dropped for long."""
    records, chance = SharedRecords(1, 64), random.Random(1)
    for _ in range(20):
        if (pid := os.fork()) == 0:
            area, held, own = records.area(0), list[int](), random.Random(os.getpid())
            while True:
                body = own.randbytes(own.randrange(1, 3000))
                if (at := area.put(crc32(body).to_bytes(4, "big") + body)) is not None:
                    held.append(at)
                if len(held) > 5 or at is None:
                    area.drop(held.pop(0))
        time.sleep(0.002 + chance.random() / 100)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = records.taken(0)
        assert len(found) <= 7
        for record in found:
            assert crc32(record[4:]).to_bytes(4, "big") == record[:4]
