"""Places that several clients share: bounds, order, and nobody at the expense of others."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.kit.fair_places import FairPlaces, NoPlaceError

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave", "cancel"]), st.sampled_from("abc"), st.integers(0, 9)
    ),
    max_size=60,
)


class Requests:
    """What became of each request: it waits, it has a place, it was refused."""

    def __init__(self, shared: FairPlaces) -> None:
        self.shared = shared
        self.inside: list[str] = []
        self.waiting: list[tuple[str, asyncio.Task[None]]] = []
        self.refused = 0

    async def enter(self, client: str) -> None:
        self.waiting.append((client, asyncio.ensure_future(self.shared.enter(client))))
        await self.settle()

    async def settle(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        for client, task in [one for one in self.waiting if one[1].done()]:
            self.waiting.remove((client, task))
            if task.cancelled():
                continue
            if task.exception() is None:
                self.inside.append(client)
            else:
                assert isinstance(task.exception(), NoPlaceError)
                self.refused += 1

    async def leave(self, client: str) -> None:
        if client in self.inside:
            self.inside.remove(client)
            self.shared.leave(client)
            await self.settle()

    async def cancel(self, number: int) -> None:
        if self.waiting:
            self.waiting[number % len(self.waiting)][1].cancel()
            await self.settle()


@given(STEPS, st.integers(1, 3), st.integers(0, 4))
@settings(deadline=None, max_examples=200)
def test_whatever_happens(steps: list[tuple[str, str, int]], places: int, queue: int) -> None:
    """Never more than the bounds, no free place while somebody waits, and nothing is known of
    anybody at the end.
    """

    async def run() -> None:
        requests = Requests(FairPlaces(places, queue))
        shared = requests.shared
        for step, client, number in steps:
            match step:
                case "enter":
                    await requests.enter(client)
                case "leave":
                    await requests.leave(client)
                case _:
                    await requests.cancel(number)
            assert (shared.taken, shared.waiting) == (len(requests.inside), len(requests.waiting))
            assert shared.taken <= places
            assert shared.waiting <= queue
            assert shared.taken == places or not shared.waiting, (
                "a place is free, and somebody waits"
            )
            counts = Counter(name for name, _ in requests.waiting)
            assert {name: len(held.waiting) for name, held in shared._queue.items()} == counts
        while requests.inside or requests.waiting:
            await requests.cancel(0)
            if requests.inside:
                await requests.leave(requests.inside[0])
        assert (shared.taken, shared.waiting, shared._clients, shared._queue) == (0, 0, {}, {})

    asyncio.run(run())


@given(st.lists(st.integers(1, 6), min_size=2, max_size=4), st.integers(1, 4))
@settings(deadline=None, max_examples=50)
def test_a_free_place_goes_to_one_with_the_fewest(requests: list[int], places: int) -> None:
    """Whoever gets a place had no more of them than any other that waits, and none is served out of
    its own order.
    """

    async def run() -> None:
        shared = FairPlaces(places, 100)
        for _ in range(places):
            assert shared.take("first")
        served: list[tuple[int, int]] = []

        async def one(client: int, number: int) -> None:
            await shared.enter(client)
            served.append((client, number))

        wanted = [
            (client, number) for client, count in enumerate(requests) for number in range(count)
        ]
        tasks = [asyncio.ensure_future(one(client, number)) for client, number in wanted]
        await asyncio.sleep(0)
        holding: list[int | str] = ["first"] * places
        while len(served) < len(wanted):
            before = {client: held.places for client, held in shared._queue.items()}
            if holding[0] in before:
                before[holding[0]] -= 1
            shared.leave(holding.pop(0))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            client = served[-1][0]
            holding.append(client)
            assert before[client] == min(before.values())
        for client in range(len(requests)):
            assert [number for one, number in served if one == client] == list(
                range(requests[client])
            )
        await asyncio.gather(*tasks)

    asyncio.run(run())


async def test_the_newest_of_the_one_with_the_most_gives_way() -> None:
    """A newcomer with fewer requests that wait gets in; one with as many does not."""
    displaced: list[int] = []
    requests = Requests(FairPlaces(1, 3, lambda: displaced.append(1)))
    for client in ("a", "a", "a", "a"):
        await requests.enter(client)
    newest = requests.waiting[-1][1]
    await requests.enter("b")
    assert isinstance(newest.exception(), NoPlaceError)
    assert [name for name, _ in requests.waiting] == ["a", "a", "b"]
    with pytest.raises(NoPlaceError):
        await requests.shared.enter("b")
    assert displaced == [1]
    assert requests.shared.waiting == 3


async def test_more_than_a_share() -> None:
    """Only while others wait, and only more than an equal part of all places."""
    requests = Requests(FairPlaces(4, 10))
    for client in "aaab":
        await requests.enter(client)
    assert not requests.shared.over_share("a"), "nobody waits"
    await requests.enter("a")
    assert not requests.shared.over_share("a"), "only its own request waits"
    await requests.enter("b")
    assert requests.shared.over_share("a")
    assert not requests.shared.over_share("b")
    assert not requests.shared.over_share("nobody")


async def test_who_gave_up_just_before_its_turn_is_forgotten() -> None:
    """A place comes free in the turn in which its client was cancelled: nothing is known of it
    afterwards.
    """
    shared = FairPlaces(1, 10)
    assert shared.take("a")
    waiting = [asyncio.ensure_future(shared.enter(f"b{number}")) for number in range(3)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    shared.leave("a")
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (shared.taken, shared.waiting, shared._clients, shared._queue) == (0, 0, {}, {})


TURNS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave", "cancel", "turn"]),
        st.sampled_from("ab"),
        st.integers(0, 9),
    ),
    max_size=60,
)


@given(TURNS, st.integers(1, 3), st.integers(0, 4))
@settings(deadline=None, max_examples=300)
def test_what_happens_in_one_turn_of_the_loop(
    steps: list[tuple[str, str, int]], places: int, queue: int
) -> None:
    """Places are granted, and requests cancelled, before any of their callers has run: no place is
    lost or granted twice.
    """

    async def run() -> None:
        shared = FairPlaces(places, queue)
        tasks: list[tuple[str, asyncio.Task[None]]] = []
        inside: list[str] = []

        def collect() -> None:
            for client, task in [one for one in tasks if one[1].done()]:
                tasks.remove((client, task))
                if not task.cancelled() and task.exception() is None:
                    inside.append(client)

        for step, client, number in steps:
            match step:
                case "enter":
                    tasks.append((client, asyncio.ensure_future(shared.enter(client))))
                case "leave":
                    collect()
                    if client in inside:
                        inside.remove(client)
                        shared.leave(client)
                case "cancel" if tasks:
                    tasks[number % len(tasks)][1].cancel()
                case _:
                    await asyncio.sleep(0)
            assert shared.taken <= places
            assert shared.waiting <= queue
            assert shared.taken == places or not shared.waiting, (
                "a place is free, and somebody waits"
            )
        for _ in range(3):
            await asyncio.sleep(0)
        collect()
        assert (shared.taken, shared.waiting) == (len(inside), len(tasks))
        while inside or tasks:
            if inside:
                shared.leave(inside.pop())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            collect()
        assert (shared.taken, shared.waiting, shared._clients, shared._queue) == (0, 0, {}, {})

    asyncio.run(run())


async def test_a_place_granted_to_a_cancelled_request_goes_to_the_next() -> None:
    """The request was cancelled after the grant, and before it ran: the place is granted again, in
    the order of the queue.
    """
    shared = FairPlaces(1, 10)
    assert shared.take("a")
    first, second, third = [asyncio.ensure_future(shared.enter(name)) for name in "bcd"]
    await asyncio.sleep(0)
    shared.leave("a")
    first.cancel()
    assert (shared.taken, shared.waiting) == (1, 2), "granted to the first"
    await asyncio.wait([first])
    assert first.cancelled()
    assert (shared.taken, shared.waiting) == (1, 1), "granted to the second"
    await asyncio.sleep(0)
    assert (second.done(), third.done()) == (True, False)
    shared.leave("c")
    await third
    shared.leave("d")
    assert (shared.taken, shared.waiting, shared._clients, shared._queue) == (0, 0, {}, {})


async def test_a_place_passes_over_a_cancelled_request() -> None:
    """The request was cancelled before the grant, and has not run since: the one behind it gets the
    place at once.
    """
    shared = FairPlaces(1, 10)
    assert shared.take("a")
    cancelled, following = [asyncio.ensure_future(shared.enter(name)) for name in "bc"]
    await asyncio.sleep(0)
    cancelled.cancel()
    shared.leave("a")
    assert (shared.taken, shared.waiting) == (1, 0)
    await asyncio.wait_for(following, 30)
    assert cancelled.cancelled()
    shared.leave("c")
    assert (shared.taken, shared.waiting, shared._clients, shared._queue) == (0, 0, {}, {})


async def test_a_request_that_comes_later_does_not_overtake() -> None:
    """From the grant on the place is taken, although the request that waited has not run yet."""
    shared = FairPlaces(1, 10)
    assert shared.take("a")
    waiting = asyncio.ensure_future(shared.enter("b"))
    await asyncio.sleep(0)
    shared.leave("a")
    assert not shared.take("c")
    await waiting
    shared.leave("b")
    assert shared.take("c")


async def test_a_refused_request_gets_no_place() -> None:
    """One that is refused, and has not run since, is passed over."""
    shared = FairPlaces(1, 10)
    assert shared.take("a")
    waiting = asyncio.ensure_future(shared.enter("b"))
    await asyncio.sleep(0)
    shared.refuse(RuntimeError("closed"))
    shared.leave("a")
    with pytest.raises(RuntimeError, match="closed"):
        await waiting
    assert (shared.taken, shared.waiting, shared._clients, shared._queue) == (0, 0, {}, {})
