"""Sockets to which engines send: bounded reading in each turn of the event loop, failures, no more
sockets.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import zmq

from pdproxy.upstream import inbound_socket
from pdproxy.upstream.inbound_socket import AT_ONCE, InboundSocket
from pdproxy.upstream.kv_events import Subscription
from tests.sim.raw import PATIENCE, turns, until


class Inbound(InboundSocket):
    """Counts messages. It takes as many as are wanted."""

    kind, name, max_bytes, high_water = zmq.PULL, "tests", 1000, 10

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        super().__init__(self.failures.append)
        self.taken = 0
        self.wants = 1 << 60

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        self.taken += 1

    def _wanted(self) -> bool:
        return self.taken < self.wants


class Endless:
    """A socket that always has a message, and whose descriptor always reports one. `fails`: how
    many readings fail.
    """

    def __init__(self) -> None:
        self.fails = 0
        self.reads = 0
        self._ends = os.pipe()
        os.write(self._ends[1], b"x")

    def fileno(self) -> int:
        return self._ends[0]

    def recv_multipart(self, *_: Any, **__: Any) -> list[bytes]:
        self.reads += 1
        if self.fails:
            self.fails -= 1
            raise zmq.ZMQError(errno.EFAULT)
        return [b"message"]

    def close(self) -> None:
        pass

    def release(self) -> None:
        for end in self._ends:
            os.close(end)


@pytest.fixture
def endless() -> Iterator[Endless]:
    made = Endless()
    yield made
    made.release()


def begun(endless: Endless) -> Inbound:
    made = Inbound()
    made._begin(endless, "tests")  # type: ignore[arg-type]
    return made


async def test_wake_ups_while_messages_wait_add_no_more_reading(endless: Endless) -> None:
    inbound = begun(endless)
    await turns(50)
    inbound.close()
    assert 40 * AT_ONCE < inbound.taken <= 51 * AT_ONCE
    taken = inbound.taken
    await turns(5)
    assert inbound.taken == taken


async def test_what_is_not_wanted_is_not_read_until_it_is(endless: Endless) -> None:
    inbound = begun(endless)
    inbound.wants = 100
    await turns(20)
    assert (inbound.taken, endless.reads) == (100, 100)
    inbound.wants = 150
    inbound.resume()
    inbound.resume()
    await turns(20)
    assert inbound.taken == 150
    inbound.close()
    inbound.resume()
    await turns(5)
    assert inbound.taken == 150


async def test_a_socket_that_fails_is_read_again_later_and_not_in_between(
    endless: Endless, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbound_socket, "RETRY", 0.001)
    endless.fails = 3
    inbound = begun(endless)
    inbound.wants = 1
    await until(lambda: inbound.taken)
    assert len(inbound.failures) == 3
    assert endless.reads == 4
    inbound.close()


async def test_a_socket_that_can_not_be_bound_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = [zmq.Context()]
    monkeypatch.setattr(zmq, "Context", lambda: made[0])
    with pytest.raises(OSError, match="Cannot assign requested address"):
        Inbound().bind("192.0.2.1", 7)
    assert made[0].closed


async def test_that_there_can_be_no_more_sockets_is_an_os_error() -> None:
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, 1)
        with context.socket(zmq.PUSH):
            subscription = Subscription(
                lambda *_: None, lambda: None, lambda _: None, connected=lambda _: None
            )
            with pytest.raises(OSError, match="Too many open files"):
                subscription.connect(context, "tcp://127.0.0.1:1")
        assert subscription.address is None
        subscription.close()


async def test_a_lost_connection_is_reported_before_what_comes_over_the_next_one() -> None:
    """Even if the event loop was busy meanwhile, and reads messages first: the next one may be of
    another run.
    """
    seen: list[str | int] = []
    subscription = Subscription(
        lambda _topic, number, _payload: seen.append(number),
        lambda: None,
        lambda _: None,
        topic="",
        connected=lambda connected: seen.append("connected" if connected else "lost"),
    )
    with zmq.Context() as context:
        with zmq.Context() as theirs:
            publisher = theirs.socket(zmq.PUB)
            port = publisher.bind_to_random_port("tcp://127.0.0.1")
            subscription.connect(context, f"tcp://127.0.0.1:{port}")
            async with asyncio.timeout(PATIENCE):
                while 0 not in seen:  # ZMQ says nowhere when a subscription has arrived
                    publish(publisher, 0)
                    await asyncio.sleep(0.01)
            publish(publisher, 1)
            await until(lambda: 1 in seen)
            publisher.close(linger=0)
        # From here on the event loop does not run.
        with zmq.Context() as theirs:
            publisher = theirs.socket(zmq.PUB)
            publisher.bind(f"tcp://127.0.0.1:{port}")
            assert subscription._socket is not None
            end = time.monotonic() + PATIENCE
            while not subscription._socket.poll(10) and time.monotonic() < end:
                publish(publisher, 2)
            subscription._read()
            assert seen[seen.index(1) + 1 :] == ["lost", "connected", 2]
            subscription.close()
            publisher.close(linger=0)


def publish(publisher: zmq.Socket[bytes], number: int) -> None:
    publisher.send_multipart([b"", number.to_bytes(8, "big"), b"payload"])


async def test_closing_in_the_middle_of_a_burst_ends_it(endless: Endless) -> None:
    inbound = begun(endless)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    inbound.close()
    taken = inbound.taken
    await turns(5)
    assert 0 < taken == inbound.taken
