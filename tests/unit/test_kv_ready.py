"""Waits for notices: every rank counted, early and late ones distinguished, memory bounded."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.kit.clock import Clock
from pdproxy.observe.events import DeadlinePassed, KvNoticed, KvWaited, Observers
from pdproxy.serving.kv.notices import Telemetry
from pdproxy.serving.kv.ready import KEPT, KEPT_FOR, ReadyWaits
from pdproxy.upstream.notices import NoticeSocket
from pdproxy.wire import notices
from pdproxy.wire.lmcache_telemetry import STORED
from pdproxy.wire.notices import MAX_BYTES, Notice
from tests.fakes.recorder import Recorder


class Stage(Recorder):
    """Events, and a clock that stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.ready = ReadyWaits(Clock(), Observers([self]), lambda: self.now)

    def results(self) -> Counter[str]:
        """What became of the notices."""
        return Counter(event.result for event in self.events if isinstance(event, KvNoticed))


def notice(name: str = "leg", rank: int | None = None, world: int | None = None) -> Notice:
    """A notice that KV is ready."""
    return Notice(event=notices.NoticeEvent.READY, request_id=name, rank=rank, world=world)


async def test_every_rank_is_waited_for() -> None:
    """The wait is over with the last one; a rank that speaks twice counts once."""
    stage = Stage()
    expected = stage.ready.expect("leg", 2)
    stage.ready.receive(notice(rank=1))
    stage.ready.receive(notice(rank=1))
    assert not expected.done.done()
    assert expected.missing() == ["0"]
    stage.ready.receive(notice(rank=0))
    assert await stage.ready.wait(expected, 5, "http://p")
    assert expected.missing() == []
    assert stage.results() == {"awaited": 2, "double": 1}
    assert [event.result for event in stage.events if isinstance(event, KvWaited)] == ["ready"]


async def test_ranks_without_a_name_are_counted() -> None:
    """LMCache's notices name no rank: as many as there are ranks."""
    stage = Stage()
    expected = stage.ready.expect("leg", 3)
    for _ in range(2):
        stage.ready.receive(notice())
    assert not expected.done.done()
    assert expected.missing() == ["unnamed"]
    stage.ready.receive(notice())
    assert expected.done.done()


async def test_the_notices_say_how_many_ranks_there_are() -> None:
    """Where nobody else knows."""
    stage = Stage()
    expected = stage.ready.expect("leg", None)
    assert expected.missing() == ["0"], "one rank, as far as anybody has said"
    stage.ready.receive(notice(rank=0, world=2))
    assert not expected.done.done()
    stage.ready.receive(notice(rank=1, world=2))
    assert expected.done.done()
    alone = stage.ready.expect("other", None)
    stage.ready.receive(notice("other"))
    assert alone.done.done()


async def test_a_silent_rank_is_named_at_the_deadline() -> None:
    """The wait ends by its deadline, which is counted, and the metric gets the rank."""
    stage = Stage()
    expected = stage.ready.expect("leg", 2)
    stage.ready.receive(notice(rank=0))
    assert not await stage.ready.wait(expected, 0.05, "http://p")
    assert DeadlinePassed("kv_ready", "http://p") in stage.events
    (waited,) = [event for event in stage.events if isinstance(event, KvWaited)]
    assert (waited.node, waited.result, list(waited.missing)) == ("http://p", "timeout", ["1"])


async def test_an_early_notice_is_kept() -> None:
    """It counts once somebody waits for it."""
    stage = Stage()
    stage.ready.receive(notice(rank=0))
    assert stage.ready.kept == 1
    expected = stage.ready.expect("leg", 1)
    assert expected.done.done()
    assert stage.ready.kept == 0
    assert stage.results() == {"early": 1}


async def test_a_late_notice_is_told_from_an_unknown_one() -> None:
    """An id whose wait is over is known for a while."""
    stage = Stage()
    stage.ready.expect("leg", 2).close()
    stage.ready.receive(notice())
    assert stage.results() == {"late": 1}
    stage.now += KEPT_FOR + 1
    stage.ready.receive(notice("leg"))
    assert stage.results() == {"late": 1, "early": 1}
    stage.now += KEPT_FOR + 1
    stage.ready.receive(notice("another"))
    assert stage.results() == {"late": 1, "early": 2, "unknown": 1}
    assert stage.ready.kept == 1


async def test_a_wait_that_is_over_frees_its_id_alone() -> None:
    """Closing an old wait doesn't end a new one of the same id."""
    stage = Stage()
    old = stage.ready.expect("leg", 1)
    new = stage.ready.expect("leg", 1)
    old.close()
    old.close()
    stage.ready.receive(notice())
    assert new.done.done()
    assert not old.done.done()


@given(st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 3))), max_size=60))
async def test_any_order_of_notices_and_waits(said: list[tuple[int, int | None]]) -> None:
    """What is kept is what came early and was not taken; each notice has one fate."""
    stage = Stage()
    waits: dict[int, Any] = {}
    for name, rank in said:
        if rank is None:
            if name in waits:
                waits.pop(name).close()
            else:
                waits[name] = stage.ready.expect(str(name), 4)
        else:
            stage.ready.receive(notice(str(name), rank))
    spoken = sum(rank is not None for _, rank in said)
    assert sum(stage.results().values()) == spoken
    assert stage.ready.waiting == len(waits)
    assert 0 <= stage.ready.kept <= stage.results()["early"]


async def test_ten_thousand_unknown_ids_take_a_bounded_place() -> None:
    """The oldest go first, and are counted as unknown."""
    stage = Stage()
    for number in range(10_000):
        stage.ready.receive(notice(f"nobody-{number}"))
    assert stage.ready.kept == KEPT
    assert stage.results() == {"early": 10_000, "unknown": 10_000 - KEPT}
    assert stage.ready.expect("nobody-9999", 1).done.done()
    assert not stage.ready.expect("nobody-0", 1).done.done()


async def test_ids_whose_wait_is_over_take_a_bounded_place() -> None:
    """They are forgotten, oldest first."""
    stage = Stage()
    for number in range(KEPT + 10):
        stage.ready.expect(f"leg-{number}", 1).close()
    stage.ready.receive(notice("leg-0"))
    stage.ready.receive(notice(f"leg-{KEPT}"))
    assert stage.results() == {"early": 1, "late": 1}


# -- the socket


class Received:
    """What a socket handed on."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self.undecodable = 0
        self.failures: list[Exception] = []
        self.socket = NoticeSocket(self.notices.append, self._nonsense, self.failures.append)

    def _nonsense(self) -> None:
        self.undecodable += 1

    async def until(self, count: int) -> None:
        """Wait until so many messages have come."""
        async with asyncio.timeout(20):
            while len(self.notices) + self.undecodable < count:
                await asyncio.sleep(0.01)


def pushed(address: str, *messages: bytes) -> None:
    """Send messages as a prefill rank does."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
        sender.setsockopt(zmq.LINGER, 5000)
        sender.connect(address)
        for message in messages:
            sender.send(message)


GENERATIONS = [
    msgspec.msgpack.encode({"type": "ProxyNotif", "req_id": "leg"}),
    msgspec.msgpack.encode({"type": "NixlProxyNotif", "req_id": "leg"}),
    msgspec.msgpack.encode({"req_id": "leg"}),
]


async def test_all_generations_of_notices_are_heard() -> None:
    """Today's, the one before, and the oldest without a tag; garbage is counted and harms
    nobody.
    """
    received = Received()
    received.socket.bind("127.0.0.1", 0)
    try:
        assert received.socket.address is not None
        await asyncio.to_thread(
            pushed, received.socket.address, b"garbage", *GENERATIONS, b"", b"\xff" * 100
        )
        await received.until(6)
        assert [one.request_id for one in received.notices] == ["leg"] * 3
        assert received.undecodable == 3
    finally:
        received.socket.close()


async def test_a_burst_is_read_to_its_end() -> None:
    """More messages than one turn of the loop takes, from senders that leave at once."""
    received = Received()
    received.socket.bind("127.0.0.1", 0)
    try:
        assert received.socket.address is not None
        burst = [msgspec.msgpack.encode({"req_id": f"leg-{number}"}) for number in range(1000)]
        await asyncio.gather(
            *(asyncio.to_thread(pushed, received.socket.address, *burst) for _ in range(2))
        )
        await received.until(2000)
        assert Counter(one.request_id for one in received.notices) == {
            f"leg-{n}": 2 for n in range(1000)
        }
    finally:
        received.socket.close()


async def test_a_message_that_is_too_long_ends_its_sender_alone() -> None:
    """It is never read; others are heard."""
    received = Received()
    received.socket.bind("127.0.0.1", 0)
    try:
        assert received.socket.address is not None
        with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
            sender.setsockopt(zmq.LINGER, 0)
            sender.connect(received.socket.address)
            sender.send(b"x" * (MAX_BYTES + 1))
            await asyncio.to_thread(pushed, received.socket.address, GENERATIONS[0])
            await received.until(1)
        assert len(received.notices) == 1
        assert received.undecodable == 0
    finally:
        received.socket.close()


async def test_a_taken_port_is_told() -> None:
    """The second socket says so, and can be closed."""
    first, second = Received(), Received()
    first.socket.bind("127.0.0.1", 0)
    try:
        assert first.socket.address is not None
        port = int(first.socket.address.rpartition(":")[2])
        with pytest.raises(OSError, match="Address already in use"):
            second.socket.bind("127.0.0.1", port)
        second.socket.close()
        assert second.socket.address is None
    finally:
        first.socket.close()


def test_missing_ranks_of_a_great_world_are_not_all_named() -> None:
    """The number of ranks comes from an engine, so it is bounded."""

    async def check() -> None:
        ready = ReadyWaits(Clock(), Observers([]), lambda: 0.0)
        expected = ready.expect("leg", None)
        expected.ranks = 1 << 53
        expected.receive(Notice(event=notices.NoticeEvent.READY, request_id="leg", rank=3))
        assert len(expected.missing()) <= 64

    asyncio.run(check())


async def test_what_is_no_telemetry_is_counted() -> None:
    """Its notices are read, and one that names a leg that nobody knows has no effect but that it is
    counted.
    """
    ready = Stage().ready
    wrong: list[bytes] = []
    telemetry = Telemetry(lambda: wrong.append(b""))
    expected = ready.expect("b", 1)

    def post(*names: str) -> None:
        fields = {"event": STORED, "request_ids_set": [*names], "world_size": 1, "kv_rank": 0}
        for notice in telemetry(msgspec.json.encode(fields)) or []:
            ready.receive(notice)

    post("unknown")
    assert not expected.done.done()
    post("b")
    assert expected.done.done()
    expected.close()
    assert telemetry(b"{}") is None
    assert len(wrong) == 1
