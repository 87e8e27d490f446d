"""Room in receive buffers: taken before a prompt is prefilled, given back once, waited for in turn."""

from __future__ import annotations

import asyncio

import pytest

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import OverloadedError
from pdproxy.observe.events import DeadlinePassed, Event, Observers
from pdproxy.serving.kv.buffers import ReceiveBuffers


class _Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def notify(self, event: Event) -> None:
        self.events.append(event)


def buffers(patience: float = 10.0, recorder: _Recorder | None = None, **capacity: int) -> ReceiveBuffers:
    """Buffers with slots for 256 tokens each."""
    return ReceiveBuffers(capacity, 256, Clock(), Observers([recorder] if recorder else []), patience)


def first_of(*urls: str):
    """Choose the first engine that isn't full."""
    return lambda full: next((url for url in urls if url not in full), None)


def always() -> bool:
    """There is an engine, if only it had room."""
    return True


async def test_slots_are_whole_chunks() -> None:
    """A token more takes a slot more."""
    room = buffers(a=4)
    assert [room.slots(tokens) for tokens in (1, 256, 257, 1024)] == [1, 1, 2, 4]
    assert room.fits(1024)
    assert not room.fits(1025)


async def test_engines_without_room_are_left_out() -> None:
    """Until their slots are given back, which counts once."""
    room = buffers(a=2, b=1)
    taken = room.take("a", 2)
    assert room.full(1) == ("a",)
    assert room.full(2) == ("a", "b")
    taken.give_back()
    taken.give_back()
    assert room.taken == {"a": 0, "b": 0}


async def test_an_engine_without_a_bound_is_never_full() -> None:
    """Nothing is counted for it."""
    room = buffers(a=1)
    room.take("elsewhere", 100).give_back()
    assert room.taken == {"a": 0}


async def test_who_finds_no_room_waits_in_turn() -> None:
    """A large prompt is not overtaken by small ones that would fit."""
    room = buffers(a=2)
    held = [room.take("a", 1), room.take("a", 1)]
    order: list[str] = []

    async def come(name: str, count: int) -> None:
        chosen = await room.when_room(count, first_of("a"), always)
        assert chosen == "a"
        order.append(name)
        held.append(room.take("a", count))

    large = asyncio.create_task(come("large", 2))
    await asyncio.sleep(0)
    small = asyncio.create_task(come("small", 1))
    await asyncio.sleep(0)
    held[0].give_back()
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == []
    held[1].give_back()
    await large
    assert order == ["large"]
    held[2].give_back()
    await small
    assert order == ["large", "small"]


async def test_nothing_waits_where_room_would_not_help() -> None:
    """No engine at all is not a full one."""
    await asyncio.wait_for(buffers(a=2).when_room(1, lambda full: None, always), 30)


async def test_the_wait_has_a_deadline() -> None:
    """It is an overload, and is counted."""
    recorder = _Recorder()
    room = buffers(0.05, recorder, a=1)
    room.take("a", 1)
    with pytest.raises(OverloadedError, match="room for the prompt's KV"):
        await room.when_room(1, first_of("a"), always)
    assert recorder.events == [DeadlinePassed("queue")]
    assert room.taken == {"a": 1}


async def test_who_leaves_the_line_takes_nothing() -> None:
    """The next one gets the room."""
    room = buffers(a=1)
    held = room.take("a", 1)
    leaving = asyncio.create_task(room.when_room(1, first_of("a"), always))
    await asyncio.sleep(0)
    staying = asyncio.create_task(room.when_room(1, first_of("a"), always))
    await asyncio.sleep(0)
    leaving.cancel()
    held.give_back()
    assert await staying == "a"
    assert room.taken == {"a": 0}
