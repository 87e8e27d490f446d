"""Lists of items between two processes: whole, in order, bounded, whatever the other end sends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import msgspec
import pytest
import uvloop

from pdproxy.workers import item_link, links
from pdproxy.workers.item_link import ItemLink
from pdproxy.workers.links import EndedError, LinkError, TooLongError

encode = msgspec.msgpack.encode


class End:
    """One end, with what has come there."""

    def __init__(self, end: socket.socket, most: int = 1 << 30) -> None:
        self.lists: list[list[bytes]] = []
        self.lost: list[LinkError] = []
        decode = msgspec.msgpack.Decoder(list[bytes]).decode
        self.link = ItemLink(end, decode, self.received, self.lost.append, most)

    def received(self, items: list[bytes]) -> None:
        self.lists.append(items)

    @property
    def items(self) -> list[bytes]:
        return [one for each in self.lists for one in each]


@pytest.fixture
async def ends():
    one, other = links.pair()
    both = End(one), End(other)
    yield both
    for end in both:
        end.link.close()


async def until(found: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not found():
            await asyncio.sleep(0)


async def test_items_of_one_turn_are_one_message(ends) -> None:
    one, other = ends
    for item in (b"a", b"b"):
        one.link.say(encode(item))
    await until(lambda: other.items)
    one.link.say(encode(b"c"))
    await until(lambda: len(other.items) == 3)
    assert other.lists == [[b"a", b"b"], [b"c"]]


async def test_what_is_said_while_items_are_taken_is_sent_at_once(ends) -> None:
    one, other = ends
    other.received = lambda items: other.link.say(encode(items[0]))
    other.link._received = other.received
    one.link.say(encode(b"a"))
    one.link.flush()
    other.link.read()
    one.link.read()
    assert one.items == [b"a"]


async def test_items_come_whole_and_in_order(ends) -> None:
    """Also where the other process reads late, and what it reads begins or ends anywhere."""
    one, other = ends
    sent = [bytes([at % 251]) * (at * 7919 % 90_000) for at in range(100)]
    other.link.pause()
    for at, item in enumerate(sent):
        one.link.say(encode(item))
        if at % 3:
            one.link.flush()
        if at == 50:
            await until(lambda: one.link.unsent)
            other.link.resume()
    await until(lambda: len(other.items) >= len(sent))
    assert other.items == sent
    assert (one.link.unsent, one.lost, other.lost) == (0, [], [])


async def test_who_does_not_read_is_lost(ends) -> None:
    one, other = ends
    one.link._most = 1000
    other.link.pause()
    for _ in range(10_000):  # more than a socket takes
        one.link.say(encode(bytes(1000)))
        one.link.flush()
        if one.lost:
            break
    assert "are not read" in str(one.lost[0])
    assert one.link.unsent < 5000


async def test_an_item_that_is_too_long_keeps_back_no_other(ends, monkeypatch) -> None:
    monkeypatch.setattr(item_link, "MAX_ITEM", 1000)
    monkeypatch.setattr(item_link, "AT_ONCE", 500)
    one, other = ends
    one.link.say(encode(b"a"))
    with pytest.raises(TooLongError):
        one.link.say(encode(bytes(1000)))
    one.link.say(encode(b"b"))
    await until(lambda: len(other.items) == 2)
    assert other.items == [b"a", b"b"]


@pytest.mark.parametrize(
    "data", [b"\x00\x00\x00\x00", b"\x00\x00\x00\x02\x91\xc1", b"\xff\xff\xff\xff\x91", b"\x7f" * 9]
)
async def test_who_sends_what_is_no_message_is_lost(ends, data: bytes) -> None:
    one, other = ends
    one.link._socket.send(data)
    await until(lambda: other.lost)
    assert not other.items


@pytest.mark.parametrize("begun", [b"", b"\x00", b"\x00\x00\x00\x09\x91"])
async def test_the_end_of_the_other_process_is_seen(ends, begun: bytes) -> None:
    one, other = ends
    if begun:
        one.link._socket.send(begun)
    await asyncio.sleep(0)
    one.link._socket.shutdown(socket.SHUT_WR)
    await until(lambda: other.lost)
    assert isinstance(other.lost[0], EndedError)


@pytest.mark.parametrize("waits", [False, True])
async def test_what_a_process_has_sent_that_has_ended_is_read_first(ends, waits: bool) -> None:
    """Nothing can be sent to it, whether it waits to be sent or not."""
    one, other = ends
    if waits:
        one.link.pause()
        one.link.say(encode(bytes(4 << 20)))
        one.link.flush()
        assert one.link.unsent
    other.link.say(encode(b"last"))
    other.link.flush()
    other.link._socket.shutdown(socket.SHUT_RDWR)
    one.link.say(encode(b"a"))
    one.link.flush()
    if waits:
        await until(lambda: not one.link.unsent)
        one.link.resume()
    assert not one.lost
    await until(lambda: one.lost)
    assert isinstance(one.lost[0], EndedError)
    assert one.items == [b"last"]


def test_the_end_of_a_process_that_has_not_read_everything_is_found() -> None:
    """The socket has an error behind what that process has sent last. libuv watches it no more."""

    async def found() -> None:
        mine, its = links.pair()
        one, other = End(mine), End(its)
        other.link.pause()
        one.link.say(encode(b"not read"))
        one.link.flush()
        other.link.say(encode(b"last"))
        other.link.flush()
        other.link.close()
        await until(lambda: one.items)
        await asyncio.sleep(0.01)
        one.link.look()
        assert one.items == [b"last"]
        assert isinstance(one.lost[0], EndedError)
        one.link.close()

    uvloop.run(found())


async def test_who_takes_no_more_items_takes_none_of_them(ends) -> None:
    one, other = ends
    one.link.pause()
    other.link.say(encode(b"a"))
    other.link.flush()
    one.link.look()
    assert not one.items
    one.link.resume()
    await until(lambda: one.items)
