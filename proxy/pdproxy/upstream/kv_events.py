"""Sockets for engines' KV events: ZMQ SUB for what they publish, and DEALER for a replay of what
they have published.

Owns the ZMQ context of all that connect: it has one thread, however many engines there are. Nothing
on these wires proves who the other side is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import zmq
from zmq.utils.monitor import parse_monitor_message

from pdproxy.upstream.inbound_socket import InboundSocket
from pdproxy.wire.kv_events import MAX_BYTES, read_sequence, replayed

logger = logging.getLogger("pdproxy.kv")

HIGH_WATER = 64
"""Messages that ZMQ keeps of each engine. More of them wait at the engine, in its own queue (`hwm`,
100,000 messages).
"""
PING_MS = 2000
"""How often ZMQ asks whether a silent connection is alive: an engine whose machine has vanished
must not look idle.
"""
RECONNECT_MS, RECONNECT_MAX_MS = 200, 5000
MAX_SOCKETS = 16384
"""ZMQ's own default of 1023 would be enough for 340 engines: each has a subscription, its monitor,
and at times a replay.
"""
_STATES = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

Received = Callable[[bytes, int, bytes], None]
"""Takes a message: its topic, its sequence number, its payload."""


class Subscription(InboundSocket):
    """Passes each message to `received`; calls `unreadable` for what is none, and `failed` as the
    base does.

    `wanted` returns whether more can be taken now; None: always. `connected` is called with True
    when a connection to the publisher is there (again), and with False when it is lost, both before
    messages that come over the next connection. Only what connects reports this.
    """

    kind = zmq.SUB
    name = "KV events"
    max_bytes = MAX_BYTES
    high_water = HIGH_WATER

    def __init__(
        self,
        received: Received,
        unreadable: Callable[[], None],
        failed: Callable[[Exception], None],
        *,
        topic: str | None = None,
        wanted: Callable[[], bool] | None = None,
        connected: Callable[[bool], None] | None = None,
    ) -> None:
        super().__init__(failed)
        self._received = received
        self._unreadable = unreadable
        self._topics = {topic} if topic is not None else set()
        self._more = wanted
        self._connected = connected
        self._monitor: zmq.Socket[bytes] | None = None

    def connect(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        """See the base."""
        super().connect(context, address)
        if self._monitor is not None:
            asyncio.get_running_loop().add_reader(self._monitor.fileno(), self._state_changed)
            asyncio.get_running_loop().call_soon(self._state_changed)

    def close(self) -> None:
        """See the base."""
        if self._monitor is not None and self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor = None
        super().close()

    def subscribe(self, topic: str) -> None:
        """Take messages of one more topic: all whose topic begins so."""
        if topic not in self._topics:
            self._topics.add(topic)
            if self._socket is not None:
                self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())

    def unsubscribe(self, topic: str) -> None:
        """Take no more messages of a topic."""
        if topic in self._topics:
            self._topics.remove(topic)
            if self._socket is not None:
                self._socket.setsockopt(zmq.UNSUBSCRIBE, topic.encode())

    def _prepare(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * PING_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 2 * PING_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        for topic in self._topics:
            socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        if self._connected is not None:
            self._monitor = socket.get_monitor_socket(_STATES)

    def _wanted(self) -> bool:
        return self._more is None or self._more()

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        # a message of a new connection must not come before the news of that connection
        self._state_changed()
        sequence = read_sequence(frames[1].bytes) if len(frames) == 3 else None
        if sequence is None:
            self._unreadable()
        else:
            self._received(frames[0].bytes, sequence, frames[2].bytes)

    def _state_changed(self) -> None:
        while self._monitor is not None and self._connected is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            connected = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if not connected:
                self._connect_again()
            self._connected(connected)

    def _connect_again(self) -> None:
        """Make a lost connection again. ZMQ does not if the other side broke its rules, as by a
        message that is too long.
        """
        socket, address = self._socket, self.address
        if socket is None or address is None:
            return

        def again() -> None:
            if self._socket is socket:
                socket.connect(address)

        with contextlib.suppress(zmq.ZMQError):
            socket.disconnect(address)
        asyncio.get_running_loop().call_later(RECONNECT_MS / 1000, again)


class Replay:
    """One subscriber's questions for what an engine has published before. Use it as a context: it
    connects, and closes. `opened`: has it while it is open.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, opened: set[Replay]
    ) -> None:
        self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._address = address
        self._readable = asyncio.Event()
        self._watched: int | None = None
        """The descriptor that the event loop watches now."""
        self._opened = opened
        opened.add(self)

    async def __aenter__(self) -> Self:
        """Connect. Raises OSError if ZMQ can't use the address."""
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 2 * PING_MS)
        if "[" in self._address:
            self._socket.setsockopt(zmq.IPV6, 1)
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, error.strerror) from None
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close: answers that still come are dropped."""
        self.close()

    def close(self) -> None:
        """Close, also while somebody waits for an answer. Closing twice changes nothing."""
        self._opened.discard(self)
        # uvloop ends the process where it begins to watch a descriptor that is closed meanwhile
        self._unwatch()
        self._socket.close()

    def ask(self, start: int) -> None:
        """Ask for all messages from a sequence number on."""
        self._socket.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)

    async def next(self) -> tuple[int, bytes] | None:
        """Wait for the next answer: a sequence number and its payload; None: there are no more. The
        caller sets the deadline.

        Raises:
            ValueError: what came is no answer.
        """
        return replayed(await self._frames())

    async def _frames(self) -> list[bytes]:
        while True:
            try:
                return self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._readable.clear()
            self._watched = self._socket.fileno()
            asyncio.get_running_loop().add_reader(self._watched, self._readable.set)
            try:
                await self._readable.wait()
            finally:
                self._unwatch()

    def _unwatch(self) -> None:
        if self._watched is not None:
            asyncio.get_running_loop().remove_reader(self._watched)
            self._watched = None


class KvEventSockets:
    """Makes the sockets that connect to engines."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._replays: set[Replay] = set()

    def __repr__(self) -> str:
        return f"<KvEventSockets {'open' if self._context is not None else 'not used'}>"

    def connect(self, subscription: Subscription, address: str) -> None:
        """Connect a subscription. Raises OSError if ZMQ can't use the address."""
        subscription.connect(self._open(), address)

    def replay(self, address: str) -> Replay:
        """Return where an engine's messages can be asked for again."""
        return Replay(self._open(), address, self._replays)

    def _open(self) -> zmq.Context[zmq.Socket[bytes]]:
        if self._context is None:
            self._context = zmq.Context()
            self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        return self._context

    def close(self) -> None:
        """Close all sockets that are still open. A subscription has to be closed before."""
        for replay in list(self._replays):
            replay.close()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
