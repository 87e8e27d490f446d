"""Several workers watch engines, each its own legs, with the signs of all: a stall is found as fast
as with one process.
"""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.fleet import life_signs
from pdproxy.fleet.life_signs import LifeSigns
from pdproxy.kit.shared_table import SharedTable
from pdproxy.scheduling.pace import MARGIN, REMEMBERED
from tests.unit.test_stalls import AFTER, STEP, Leg, Pool


class Lead:
    """Whether a worker leads, as a test says."""

    def __init__(self, *, leads: bool) -> None:
        self.leads = leads

    async def turn(self) -> None:
        """Not asked here."""


class Workers:
    """The same two engines, as so many workers see them. A verdict of one is passed on, as
    `workers.state_writer` does.
    """

    def __init__(self, count: int = 2) -> None:
        table = SharedTable(count, 8, life_signs.MEASURES)
        self.pools = [Pool("d1", "d2") for _ in range(count)]
        for number, pool in enumerate(self.pools):
            pool.stalls._lead = Lead(leads=number == 0)
            pool.stalls._signs = LifeSigns(table.column(number), table.others(number))

    def freeze(self, url: str) -> None:
        for pool in self.pools:
            pool.frozen.add(url)

    def thaw(self, url: str) -> None:
        for pool in self.pools:
            pool.frozen.discard(url)

    async def look(self, seconds: float) -> None:
        """Let time pass in all."""
        for _ in range(round(seconds / STEP)):
            for pool in self.pools:
                await pool.look(STEP)
            self._pass_on()

    def _pass_on(self) -> None:
        for url in ("d1", "d2"):
            states = [pool.engines[url].in_ledger.stalled for pool in self.pools]
            leader = self.pools[0]
            if len(set(states)) == 1:
                continue
            was_let_in = states[0] is None and leader.stalls._watches[url]._let_in_at == leader.now
            for pool in self.pools:
                if was_let_in:
                    pool.ledger.let_in(url, pool.now)
                else:
                    pool.ledger.mark_stalled(url, next(one for one in states if one))
                    pool.stalls.found(url)

    def stalled(self, url: str) -> list[bool]:
        return [pool.engines[url].in_ledger.stalled is not None for pool in self.pools]


async def _time_until_out(workers: Workers, legs: list[Leg]) -> float:
    pool = workers.pools[0]
    began = pool.now
    while not any(workers.stalled("d1")):
        assert pool.now < began + 10 * AFTER
        await workers.look(STEP)
    assert all(workers.stalled("d1"))
    assert all(leg.failed for leg in legs), "legs of every worker end with the first verdict"
    return pool.now - began


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("of_worker", [0, 1])
async def test_an_engine_is_taken_out_as_fast_as_with_one_process(
    of_worker: int, streams: bool
) -> None:
    """Its legs are those of one worker, of either, or of both."""
    times = []
    for count, where in ((1, [0]), (2, [of_worker]), (2, [0, 1])):
        workers = Workers(count)
        legs = [workers.pools[at].leg("d1", must_progress=True) for at in where]
        if streams:
            for pool, leg in zip([workers.pools[at] for at in where], legs, strict=True):
                await workers.look(STEP)
                leg.sign = pool.now
        workers.freeze("d1")
        times.append(await _time_until_out(workers, legs))
    assert times[1] == times[0]
    assert times[2] <= times[0] + STEP
    assert times[0] <= AFTER


async def test_a_sign_to_one_worker_is_one_for_all() -> None:
    """The only leg of a worker waits for long; another worker's stream flows. The engine is not
    asked for anything.
    """
    workers = Workers()
    quiet, flows = workers.pools[1].leg("d1"), workers.pools[0].leg("d1")
    for _ in range(20):
        flows.sign = workers.pools[0].now
        await workers.look(STEP)
    assert workers.pools[1].asked == []
    assert workers.stalled("d1") == [False, False]
    assert quiet.failed == []


async def test_only_the_leader_asks_an_engine_that_stands_still() -> None:
    """A follower has found it. The leader sees its sign, and lets it in; both count the next stall
    as one soon after.
    """
    workers = Workers()
    workers.pools[1].leg("d1")
    workers.freeze("d1")
    await _time_until_out(workers, [])
    asked = len(workers.pools[1].asked)
    await workers.look(4 * STEP)
    assert len(workers.pools[1].asked) == asked
    assert workers.pools[0].asked != []
    assert workers.pools[1].stalls._watches["d1"]._enquiry is None
    for pool in workers.pools:
        for leg in [*pool.engines["d1"].open_legs.legs]:
            pool.engines["d1"].open_legs.remove(leg)
    workers.thaw("d1")
    await workers.look(4 * STEP)
    for _ in range(20):
        await asyncio.sleep(0)
    await workers.look(2 * STEP)
    assert workers.stalled("d1") == [False, False]
    watches = [pool.stalls._watches["d1"] for pool in workers.pools]
    assert [watch.stalls for watch in watches] == [0, 1], "counted by the one that has found it"
    assert all(watch._let_in_at > 0 for watch in watches)
    workers.pools[0].leg("d1")
    workers.freeze("d1")
    await _time_until_out(workers, [])
    assert [watch._hold > 0 for watch in watches] == [True, True]


def test_a_silence_that_one_worker_has_learned_is_allowed_by_all() -> None:
    """And is forgotten by all: none hears it again of another one later."""
    workers = Workers()
    one, other = (pool.engines["d1"] for pool in workers.pools)
    signs = [pool.stalls._signs for pool in workers.pools]
    assert signs[0] is not None
    assert signs[1] is not None
    now = 10 * REMEMBERED
    one.open_legs.pace.came_back(5.0, now)
    signs[0].exchange(one, now, now)
    assert signs[1].exchange(other, 0.0, now) == now
    assert other.open_legs.pace.allowed(AFTER, 120.0, 0, now) == MARGIN * 5.0
    for later in range(1, 4):
        at = now + later * REMEMBERED
        for sign, engine in zip(signs, (one, other), strict=True):
            assert sign is not None
            sign.exchange(engine, now, at)
    assert other.open_legs.pace.allowed(AFTER, 120.0, 0, at) == AFTER
    assert one.open_legs.pace.allowed(AFTER, 120.0, 0, at) == AFTER
    signs[0].forget("d1")
    assert signs[1].exchange(other, 0.0, at) == 0.0
