"""Places that come free at once while others wait: granted one after another, never kept back for
long.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from pdproxy.deciding.spaced_places import FASTER, LEAST, SpacedPlaces
from pdproxy.kit.fair_queue import FairQueue, TenantRequest
from tests.fakes.engine_model import Model, Pool, in_virtual_time

TOGETHER = Pool(step=0.0055, prefill_tokens_per_s=14_000.0, together=True)


def entries(count: int) -> list[TenantRequest[int]]:
    """Return requests with places."""
    queue: FairQueue[int] = FairQueue(count, 0, 0, lambda _: True, lambda _: None)
    found = [queue.take("a", 1.0, number, 1.0, 1) for number in range(count)]
    return [entry for entry in found if entry is not None]


class Spaced:
    """What came free, and when. Make it in a virtual loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.free: list[tuple[float, int, float | None]] = []
        self.places = SpacedPlaces[int](self._came_free)

    def _came_free(self, entry: TenantRequest[int], cost: float | None) -> None:
        self.free.append((self.loop.time(), entry.ticket, cost))

    def leave(self, entry: TenantRequest[int], cost: float | None = None) -> None:
        """Release the place of one of ten, which are taken for 2 s on average."""
        self.places.leave(self.loop.time(), entry, cost, 2.0, 10)


def test_many_at_once_come_free_one_after_another() -> None:
    """Twice as fast as requests end on average; with their costs, in order; the last after half of
    the mean time.
    """

    async def run() -> None:
        spaced, begin = Spaced(), asyncio.get_running_loop().time()
        for number, entry in enumerate(entries(10)):
            spaced.leave(entry, float(number))
        assert [ticket for _, ticket, _ in spaced.free] == [0]
        assert "9 kept back" in repr(spaced.places)
        await asyncio.sleep(2.0)
        assert [(ticket, cost) for _, ticket, cost in spaced.free] == [
            (one, float(one)) for one in range(10)
        ]
        assert [at - begin for at, _, _ in spaced.free] == pytest.approx(
            [one * 0.2 / FASTER for one in range(10)]
        )
        assert not spaced.places.kept

    in_virtual_time(run)


def test_those_that_end_one_by_one_are_not_kept_back() -> None:
    """Nor for less than what a timer costs."""

    async def run() -> None:
        spaced = Spaced()
        first, *others, last = entries(10)
        for entry in (first, *others):
            spaced.leave(entry)
            assert not spaced.places.kept
            await asyncio.sleep(0.2 / FASTER - 0.9 * LEAST / 9)
        spaced.leave(last)
        assert len(spaced.free) == 10
        assert not spaced.places.kept

    in_virtual_time(run)


def test_all_are_released_at_once() -> None:
    """Once, and their timers do nothing any more."""

    async def run() -> None:
        spaced = Spaced()
        for entry in entries(10):
            spaced.leave(entry)
        spaced.places.release()
        spaced.places.release()
        assert sorted(ticket for _, ticket, _ in spaced.free) == list(range(10))
        await asyncio.sleep(5.0)
        assert len(spaced.free) == 10

    in_virtual_time(run)


def test_who_comes_when_nobody_waits_any_more_gets_a_place_at_once() -> None:
    """Ten times the load, which ends: the next request begins when it comes, though places were
    kept back a moment ago.
    """

    async def run() -> None:
        model = Model(TOGETHER, 1)
        await model.load(10.0, 5.0)
        admission = model.admission
        for place in range(TOGETHER.places):
            assert await asyncio.wait_for(_entered(model, f"c{place}"), 0.001)
        assert admission.inflight == TOGETHER.places

    in_virtual_time(run)


async def _entered(model: Model, name: str) -> bool:
    await model.enter(name)
    return True


def test_a_shutdown_waits_for_none_that_is_kept_back() -> None:
    """`close` returns as soon as the last request has ended."""

    async def run() -> tuple[float, Counter[str]]:
        model = Model(TOGETHER, 1)
        task = asyncio.create_task(model.load(10.0, 5.0))
        await asyncio.sleep(3.0)
        begin = asyncio.get_running_loop().time()
        await model.admission.close()
        took = asyncio.get_running_loop().time() - begin
        return took, await task

    took, found = in_virtual_time(run)
    assert took <= 2 * TOGETHER.unloaded(TOGETHER.shapes[0])
    assert found["draining"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_requests_that_are_prefilled_together_do_not_end_together_for_ever(seed: int) -> None:
    """All of them begin at once: within seconds they are spread, and hardly any is late."""

    async def run() -> Counter[str]:
        model = Model(replace(TOGETHER, noise=0.05), seed)
        model.engines.slower = 3.0  # all that run now are late, and leave at the same moment
        await model.load(10.0, 2.0)
        model.engines.slower = 1.0
        await model.load(10.0, 3.0)
        return await model.load(10.0, 20.0)

    found = in_virtual_time(run)
    assert found["late"] + found["504"] <= 0.02 * found["good"], found
