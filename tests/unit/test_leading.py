"""Which of several processes leads: the one that has served longest and is alive, whatever is
killed, stopped and started.
"""

from __future__ import annotations

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdproxy.kit.leading import ALWAYS, MEASURES, STALE, Leading
from pdproxy.kit.shared_table import SharedTable

SECOND = 1_000_000_000
BEAT = SECOND // 4


class Processes:
    """So many processes, and the time of their machine."""

    def __init__(self, count: int) -> None:
        self.table = SharedTable(count, 1, MEASURES)
        self.now = 1000 * SECOND
        self.all = [self.made(number) for number in range(count)]
        self.stopped: set[int] = set()

    def made(self, number: int) -> Leading:
        return Leading(
            number, self.table.column(number), self.table.others(number), lambda: self.now
        )

    def pass_(self, beats: int = 1) -> None:
        """Let time pass. Those that are not stopped show that they are alive."""
        for _ in range(beats):
            self.now += BEAT
            for number, one in enumerate(self.all):
                if number not in self.stopped:
                    one.beat()

    def killed(self, number: int) -> None:
        """One ends, its parent clears what it had, and another begins."""
        self.table.clear(number)
        self.all[number] = self.made(number)

    @property
    def leaders(self) -> list[int]:
        return [
            number
            for number, one in enumerate(self.all)
            if one.leads and number not in self.stopped
        ]


def test_the_first_one_leads_and_stays() -> None:
    made = Processes(3)
    assert made.leaders == []
    made.pass_(2)
    assert made.leaders == [0]
    made.pass_(100)
    assert made.leaders == [0]


def test_another_one_leads_at_its_next_beat_after_a_kill() -> None:
    """The one that began in its place is the youngest: it leads once it is the last."""
    made = Processes(3)
    made.pass_(4)
    made.killed(0)
    made.pass_(2)
    assert made.leaders == [1]
    made.killed(1)
    made.pass_(2)
    assert made.leaders == [2]
    made.killed(2)
    made.pass_(2)
    assert made.leaders == [0]


def test_a_stopped_leader_is_replaced_and_follows_when_it_goes_on() -> None:
    """Until its first beat it believes to lead; that beat comes before it reads any answer that is
    older.
    """
    made = Processes(2)
    made.pass_(4)
    made.stopped.add(0)
    made.pass_(int(STALE * SECOND / BEAT) - 1)
    assert made.leaders == []
    made.pass_(2)
    assert made.leaders == [1]
    made.stopped.clear()
    assert made.leaders == [0, 1]
    made.all[0].beat()
    assert made.leaders == [1]


def test_one_that_ends_leaves() -> None:
    made = Processes(2)
    made.pass_(2)
    made.all[0].leave()
    made.pass_()  # also if something of it still runs
    assert made.leaders == [1]


async def test_what_waits_for_its_turn_goes_on() -> None:
    made = Processes(2)
    begun: list[int] = []
    made.all[1].begins.append(lambda: begun.append(1))
    made.pass_(2)
    waits = asyncio.create_task(made.all[1].turn())
    await asyncio.sleep(0)
    assert not waits.done()
    made.killed(0)
    made.all[1].beat()
    await waits
    assert begun == [1]
    assert ALWAYS.leads
    await ALWAYS.turn()


class Course(RuleBasedStateMachine):
    """Whatever is killed and stopped: after a pause, those that run have one leader."""

    def __init__(self) -> None:
        super().__init__()
        self.made = Processes(4)

    @rule(number=st.integers(0, 3))
    def kill(self, number: int) -> None:
        self.made.stopped.discard(number)
        self.made.killed(number)

    @rule(number=st.integers(0, 3))
    def stop(self, number: int) -> None:
        self.made.stopped.add(number)

    @rule(number=st.integers(0, 3))
    def goes_on(self, number: int) -> None:
        self.made.stopped.discard(number)

    @rule(beats=st.integers(1, 20))
    def time_passes(self, beats: int) -> None:
        self.made.pass_(beats)

    @invariant()
    def one_leads(self) -> None:
        self.made.pass_(int(STALE * SECOND / BEAT) + 2)
        assert len(self.made.leaders) == (len(self.made.stopped) < 4)


TestCourse = Course.TestCase
TestCourse.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
