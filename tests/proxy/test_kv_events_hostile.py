"""Publishers that send anything: the reader survives, stays bounded, and takes the next right
message.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from pdproxy.fleet import kv_events, kv_source
from pdproxy.settings.kv import EngineKvEvents, KvEvents
from pdproxy.wire.kv_events import MAX_BYTES
from tests.fakes.kv_index import payload, removed, stored
from tests.proxy.kv_events import Publisher, Reader, reading
from tests.sim.raw import until

URL = "http://127.0.0.1:1"


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher()
    yield made
    made.close()


@pytest.fixture
async def read(publisher: Publisher) -> AsyncIterator[Reader]:
    """A reader that is connected to the publisher, which answers no replays."""
    own = {URL: EngineKvEvents(endpoint=publisher.endpoint)}
    async with reading(KvEvents(enabled=True), own) as made:
        made.add(URL)
        made.up(URL)
        await until(lambda: made.metric("pdproxy_kv_event_sources", state="connected"))
        await publisher.until(lambda: made.known(URL), 0, payload(stored(1)))
        made.index.restart(made.sources.places[URL, 0])
        yield made


async def good(read: Reader, publisher: Publisher, at: int) -> None:
    """A right message is taken."""
    await publisher.until(lambda: 77 in read.known(URL), at, payload(stored(77)))


async def test_frames_that_are_no_message_are_counted(publisher: Publisher, read: Reader) -> None:
    number = (1 << 20).to_bytes(8, "big")
    wrong = [
        (b"",),
        (b"", b""),
        (b"", number),
        (b"", b"", b""),
        (b"", number[1:], payload()),
        (b"", number + b"0", payload()),
        (b"", b"\xff" * 8, payload()),
        (b"", b"\x80" + bytes(7), payload()),
        (b"", number, payload(), b""),
        *(
            (os.urandom(random.Random(7).randrange(50)),) * count
            for count in range(1, 6)
            if count != 3
        ),
    ]
    for frames in wrong:
        publisher.send(*frames)
    await until(
        lambda: read.metric("pdproxy_kv_events_skipped_total", reason="undecodable") >= len(wrong)
    )
    await good(read, publisher, 1 << 21)


async def test_payloads_that_are_none_are_counted(publisher: Publisher, read: Reader) -> None:
    chance = random.Random(3)
    whole = payload(stored(*range(5)), removed(3))
    wrong = [
        b"",
        b"\xc1",
        b"\x91" * 200_000,
        b"\x92\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
        msgspec.msgpack.encode([1.0, [None] * 70_000]),
        msgspec.msgpack.encode({"ts": 1}),
        *(chance.randbytes(chance.randrange(300)) for _ in range(50)),
        *(whole[: chance.randrange(len(whole))] for _ in range(50)),
    ]
    at = 1 << 20
    for number, found in enumerate(wrong):
        publisher.publish(at + number, found)
    await good(read, publisher, at + len(wrong))
    assert read.metric("pdproxy_kv_events_skipped_total", reason="undecodable") >= 50


async def test_events_with_any_byte_changed_do_no_harm(publisher: Publisher, read: Reader) -> None:
    chance = random.Random(5)
    whole = payload(
        stored(*range(20), extra_keys=[["a", ["b", 1]]] * 20),
        removed(3),
        {"type": "AllBlocksCleared"},
    )
    at = 1 << 20
    for number in range(500):
        changed = bytearray(whole)
        changed[chance.randrange(len(changed))] = chance.randrange(256)
        publisher.publish(at + number, bytes(changed))
    await good(read, publisher, at + 500)


async def test_a_message_of_100_megabytes_is_not_taken(publisher: Publisher, read: Reader) -> None:
    publisher.publish(1 << 20, bytes(100 << 20))
    await until(lambda: read.metric("pdproxy_kv_event_sources", state="not_connected"))
    await good(read, publisher, 1 << 21)
    assert read.sources._feed.bytes == 0


async def test_the_longest_message_is_taken(publisher: Publisher, read: Reader) -> None:
    blocks = 60_000
    whole = payload({**stored(*range(blocks), size=16), "token_ids": [300] * (blocks * 16)})
    assert MAX_BYTES * 0.7 < len(whole) < MAX_BYTES
    publisher.publish(1 << 20, whole)
    await until(lambda: len(read.known(URL)) == blocks)
    assert (
        max(len(call[2]) for call in read.index.calls if call[0] == "stored")
        <= kv_events.BLOCKS_AT_ONCE
    )
    await good(read, publisher, 1 << 21)


async def test_numbers_that_jump_cost_no_more_than_their_messages(
    publisher: Publisher, read: Reader
) -> None:
    chance = random.Random(11)
    for _ in range(300):
        publisher.publish(chance.randrange(1 << 63), payload(stored(chance.randrange(1000))))
    await publisher.until(lambda: 77 in read.known(URL), (1 << 63) - 100_000, payload(stored(77)))
    assert len(read.tasks) == 0  # there are no replays that could run
    gaps = read.metric("pdproxy_kv_event_gaps_total", node=URL)
    assert gaps <= 310


async def test_a_flood_waits_with_its_sender(
    publisher: Publisher, read: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "BACKLOG_BYTES", 64 << 10)
    sizes: list[int] = []

    class Watch:
        """Looks at what waits whenever the index is called."""

        def __call__(self, *call: object) -> None:
            sizes.append(read.sources._feed.bytes)

    monkeypatch.setattr(read.index, "_call", Watch())
    message = payload(*(stored(at) for at in range(200)))
    count = 800
    for number in range(1 << 20, (1 << 20) + count):
        publisher.publish(number, message)
    turns = 0
    async with asyncio.timeout(60):
        while len(sizes) < count * 200:
            turns += 1
            await asyncio.sleep(0)
    assert max(sizes) < (64 << 10) + 3 * len(message) * 2
    assert turns > count * 200 / (2 * kv_events.BLOCKS_AT_ONCE)
    await good(read, publisher, 1 << 21)


async def test_a_replay_endpoint_that_sends_garbage_ends_the_replay(publisher: Publisher) -> None:
    import zmq

    router = publisher.context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    own = {
        URL: EngineKvEvents(endpoint=publisher.endpoint, replay_endpoint=f"tcp://127.0.0.1:{port}")
    }
    async with reading(KvEvents(enabled=True), own) as read:
        read.add(URL)
        read.up(URL)
        await until(lambda: router.poll(0))
        client, *_ = router.recv_multipart()
        router.send_multipart([client, b"garbage"])
        await until(lambda: read.metric("pdproxy_kv_event_replays_total", result="failed") == 1)
        await good(read, publisher, 5)


async def test_a_replay_that_never_ends_is_ended(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zmq

    monkeypatch.setattr(kv_source, "MAX_REPLAY_S", 0.2)
    router = publisher.context.socket(zmq.ROUTER)
    router.setsockopt(zmq.SNDHWM, 10)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    own = {
        URL: EngineKvEvents(endpoint=publisher.endpoint, replay_endpoint=f"tcp://127.0.0.1:{port}")
    }
    async with reading(KvEvents(enabled=True), own) as read:
        read.add(URL)
        read.up(URL)
        await until(lambda: router.poll(0))
        client, *_ = router.recv_multipart()
        number = 0
        async with asyncio.timeout(30):
            while not read.metric("pdproxy_kv_event_replays_total", result="incomplete"):
                router.send_multipart(
                    [client, b"", b"", number.to_bytes(8, "big"), payload(stored(number))]
                )
                number += 1
                await asyncio.sleep(0.001)
        await good(read, publisher, 1 << 20)


async def test_a_stranger_at_our_port_is_no_engine(publisher: Publisher) -> None:
    async with reading(KvEvents(enabled=True, host="127.0.0.1", port=1), ports=range(0)) as empty:
        assert empty.sources.bound == {}
    from tests.fakes.ports import free_port

    port = free_port()
    async with reading(
        KvEvents(
            enabled=True,
            host="127.0.0.1",
            port=port,
            endpoint=f"tcp://127.0.0.1:{port}",
            topic="engine",
        ),
        ports=range(port, port + 1),
    ) as read:
        stranger = Publisher(f"tcp://127.0.0.1:{port}")
        try:
            read.add(URL)
            read.up(URL)
            await until(lambda: read.sources.places)
            await stranger.until(
                lambda: read.metric("pdproxy_kv_events_skipped_total", reason="unknown_topic"),
                0,
                payload(stored(1)),
                b"engine too",
            )
            assert read.known(URL) == set()
            await stranger.until(lambda: read.known(URL), 0, payload(stored(1)), b"engine")
        finally:
            stranger.close()
