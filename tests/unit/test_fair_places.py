"""Places that several askers share: bounds, order, and nobody at the expense of others."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.kit.fair_places import FairPlaces, NoPlaceError

STEPS = st.lists(
    st.tuples(st.sampled_from(["enter", "leave", "cancel"]), st.sampled_from("abc"), st.integers(0, 9)), max_size=60
)


class Askers:
    """What became of each request: it waits, it has a place, it was refused."""

    def __init__(self, turns: FairPlaces) -> None:
        self.turns = turns
        self.inside: list[str] = []
        self.waiting: list[tuple[str, asyncio.Task[None]]] = []
        self.refused = 0

    async def enter(self, asker: str) -> None:
        self.waiting.append((asker, asyncio.ensure_future(self.turns.enter(asker))))
        await self.settle()

    async def settle(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        for asker, task in [one for one in self.waiting if one[1].done()]:
            self.waiting.remove((asker, task))
            if task.cancelled():
                continue
            if task.exception() is None:
                self.inside.append(asker)
            else:
                assert isinstance(task.exception(), NoPlaceError)
                self.refused += 1

    async def leave(self, asker: str) -> None:
        if asker in self.inside:
            self.inside.remove(asker)
            self.turns.leave(asker)
            await self.settle()

    async def cancel(self, number: int) -> None:
        if self.waiting:
            self.waiting[number % len(self.waiting)][1].cancel()
            await self.settle()


@given(STEPS, st.integers(1, 3), st.integers(0, 4))
@settings(deadline=None, max_examples=200)
def test_whatever_happens(steps: list[tuple[str, str, int]], places: int, queue: int) -> None:
    """Never more than the bounds, no free place while somebody waits, and nothing is known of anybody at the end."""

    async def run() -> None:
        askers = Askers(FairPlaces(places, queue))
        turns = askers.turns
        for step, asker, number in steps:
            match step:
                case "enter":
                    await askers.enter(asker)
                case "leave":
                    await askers.leave(asker)
                case _:
                    await askers.cancel(number)
            assert (turns.taken, turns.waiting) == (len(askers.inside), len(askers.waiting))
            assert turns.taken <= places
            assert turns.waiting <= queue
            assert turns.taken == places or not turns.waiting, "a place is free, and somebody waits"
            counts = Counter(name for name, _ in askers.waiting)
            assert {name: len(line.waiting) for name, line in turns._lines.items()} == counts
        while askers.inside or askers.waiting:
            await askers.cancel(0)
            if askers.inside:
                await askers.leave(askers.inside[0])
        assert (turns.taken, turns.waiting, turns._askers, turns._lines) == (0, 0, {}, {})

    asyncio.run(run())


@given(st.lists(st.integers(1, 6), min_size=2, max_size=4), st.integers(1, 4))
@settings(deadline=None, max_examples=50)
def test_a_free_place_goes_to_one_with_the_fewest(requests: list[int], places: int) -> None:
    """Whoever gets a place had no more of them than any other that waits, and none is served out of its own order."""

    async def run() -> None:
        turns = FairPlaces(places, 100)
        for _ in range(places):
            assert turns.take("first")
        served: list[tuple[int, int]] = []

        async def one(asker: int, number: int) -> None:
            await turns.enter(asker)
            served.append((asker, number))

        wanted = [(asker, number) for asker, count in enumerate(requests) for number in range(count)]
        tasks = [asyncio.ensure_future(one(asker, number)) for asker, number in wanted]
        await asyncio.sleep(0)
        holding: list[int | str] = ["first"] * places
        while len(served) < len(wanted):
            before = {asker: line.places for asker, line in turns._lines.items()}
            if holding[0] in before:
                before[holding[0]] -= 1
            turns.leave(holding.pop(0))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            asker = served[-1][0]
            holding.append(asker)
            assert before[asker] == min(before.values())
        for asker in range(len(requests)):
            assert [number for one, number in served if one == asker] == list(range(requests[asker]))
        await asyncio.gather(*tasks)

    asyncio.run(run())


async def test_the_newest_of_the_one_with_the_most_gives_way() -> None:
    """A newcomer with fewer requests that wait gets in; one with as many does not."""
    told: list[int] = []
    askers = Askers(FairPlaces(1, 3, lambda: told.append(1)))
    for asker in ("a", "a", "a", "a"):
        await askers.enter(asker)
    newest = askers.waiting[-1][1]
    await askers.enter("b")
    assert isinstance(newest.exception(), NoPlaceError)
    assert [name for name, _ in askers.waiting] == ["a", "a", "b"]
    with pytest.raises(NoPlaceError):
        await askers.turns.enter("b")
    assert told == [1]
    assert askers.turns.waiting == 3


async def test_more_than_a_share() -> None:
    """Only while others wait, and only more than an equal part of all places."""
    askers = Askers(FairPlaces(4, 10))
    for asker in "aaab":
        await askers.enter(asker)
    assert not askers.turns.over_share("a"), "nobody waits"
    await askers.enter("a")
    assert not askers.turns.over_share("a"), "only its own request waits"
    await askers.enter("b")
    assert askers.turns.over_share("a")
    assert not askers.turns.over_share("b")
    assert not askers.turns.over_share("nobody")


async def test_who_gave_up_just_before_its_turn_is_forgotten() -> None:
    """A place comes free in the turn in which its asker was cancelled: nothing is known of it afterwards."""
    turns = FairPlaces(1, 10)
    assert turns.take("a")
    waiting = [asyncio.ensure_future(turns.enter(f"b{number}")) for number in range(3)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    turns.leave("a")
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (turns.taken, turns.waiting, turns._askers, turns._lines) == (0, 0, {}, {})
