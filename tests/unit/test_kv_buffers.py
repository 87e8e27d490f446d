"""Space in receive buffers: taken before a prompt is prefilled, released once, waited for in
turn.
"""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.deciding.buffers import ReceiveBuffers
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import OverloadedError
from pdproxy.observe.events import DeadlinePassed, Observers
from pdproxy.scheduling.ledger_engine import EngineSpec, Role
from pdproxy.settings.limits import Deadlines
from tests.fakes.recorder import Recorder
from tests.fakes.registry import registry, unused_client


def buffers(
    timeout: float = 10.0, recorder: Recorder | None = None, **capacity: int
) -> ReceiveBuffers:
    """Buffers of chunks of 256 tokens each."""
    engines, _ = registry()
    made = ReceiveBuffers(
        engines, 256, Clock(), Observers([recorder] if recorder else []), Deadlines(queue=timeout)
    )
    for url, chunks in capacity.items():
        engines.add(EngineSpec(url, Role.DECODE), unused_client(url), buffer_capacity=chunks)
    return made


def first_of(*urls: str):
    """Choose the first engine that isn't full."""
    return lambda full: next((url for url in urls if url not in full), None)


def always() -> bool:
    """There is an engine, once it has space."""
    return True


async def test_slots_are_whole_chunks() -> None:
    """A token more takes a slot more."""
    space = buffers(a=4)
    assert [space.chunks(tokens) for tokens in (1, 256, 257, 1024)] == [1, 1, 2, 4]
    assert space.fits(1024)
    assert not space.fits(1025)


async def test_engines_without_space_are_left_out() -> None:
    """Until their chunks are released, which counts once."""
    space = buffers(a=2, b=1)
    taken = space.take("a", 2)
    assert space.full(1) == ("a",)
    assert space.full(2) == ("a", "b")
    taken.release()
    taken.release()
    assert space.taken == {"a": 0, "b": 0}


async def test_an_engine_without_a_bound_is_never_full() -> None:
    """Nothing is counted for it."""
    space = buffers(a=1)
    space._engines.add(EngineSpec("b", Role.DECODE), unused_client("b"))
    space.take("b", 100).release()
    space.take("elsewhere", 100).release()
    assert (space.taken, space.full(1)) == ({"a": 0}, ())


async def test_who_finds_no_space_waits_in_turn() -> None:
    """A large prompt is not overtaken by small ones that would fit."""
    space = buffers(a=2)
    held = [space.take("a", 1), space.take("a", 1)]
    order: list[str] = []

    async def come(name: str, count: int) -> None:
        chosen = await space.wait_for_space(count, first_of("a"), always)
        assert chosen == "a"
        order.append(name)
        held.append(space.take("a", count))

    large = asyncio.create_task(come("large", 2))
    await asyncio.sleep(0)
    small = asyncio.create_task(come("small", 1))
    await asyncio.sleep(0)
    held[0].release()
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == []
    held[1].release()
    await large
    assert order == ["large"]
    held[2].release()
    await small
    assert order == ["large", "small"]


async def test_nothing_waits_where_space_would_not_help() -> None:
    """No engine at all is not a full one."""
    await asyncio.wait_for(buffers(a=2).wait_for_space(1, lambda full: None, always), 30)


async def test_the_wait_has_a_deadline() -> None:
    """It is an overload, and is counted."""
    recorder = Recorder()
    space = buffers(0.05, recorder, a=1)
    space.take("a", 1)
    with pytest.raises(OverloadedError, match="space for the prompt's KV"):
        await space.wait_for_space(1, first_of("a"), always)
    assert recorder.events == [DeadlinePassed("queue")]
    assert space.taken == {"a": 1}


async def test_who_leaves_the_queue_takes_nothing() -> None:
    """The next one gets the space."""
    space = buffers(a=1)
    held = space.take("a", 1)
    leaving = asyncio.create_task(space.wait_for_space(1, first_of("a"), always))
    await asyncio.sleep(0)
    staying = asyncio.create_task(space.wait_for_space(1, first_of("a"), always))
    await asyncio.sleep(0)
    leaving.cancel()
    held.release()
    assert await staying == "a"
    assert space.taken == {"a": 0}


async def test_an_engine_that_is_added_has_space_for_who_waits() -> None:
    """And who waits for an engine that is removed finds that there is none left."""
    engines, _ = registry()
    space = ReceiveBuffers(engines, 256, Clock(), Observers([]), Deadlines(queue=10.0))
    assert not space.bounded
    engines.add(EngineSpec("a", Role.DECODE), unused_client("a"), buffer_capacity=1)
    assert space.bounded
    held = space.take("a", 1)
    waiting = asyncio.create_task(
        space.wait_for_space(
            1, lambda full: next((u for u in engines if u not in full), None), always
        )
    )
    await asyncio.sleep(0.01)
    assert not waiting.done()
    engines.add(EngineSpec("b", Role.DECODE), unused_client("b"), buffer_capacity=1)
    assert await waiting == "b"
    space.take("b", 1)
    waiting = asyncio.create_task(
        space.wait_for_space(
            1, lambda full: next((u for u in engines if u not in full), None), lambda: bool(engines)
        )
    )
    engines.remove("b")
    await asyncio.sleep(0.01)
    assert not waiting.done()
    engines.remove("a")
    assert await asyncio.wait_for(waiting, 30) is None
    held.release()
    assert (space.taken, space.bounded) == ({}, False)


async def test_space_at_an_engine_that_was_removed() -> None:
    """It is added again with an empty buffer, whatever was taken before."""
    one = buffers(a=2)
    taken = one.take("a", 2)
    one._engines.remove("a")
    one._engines.add(EngineSpec("a", Role.DECODE), unused_client("a"), buffer_capacity=2)
    assert one.full(2) == ()
    taken.release()
    assert one.full(2) == ()
    one.take("unknown", 1).release()
