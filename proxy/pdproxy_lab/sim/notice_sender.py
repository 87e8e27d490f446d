"""Sends the notices of a simulated engine to the proxy: ZMQ PUSH with one socket per worker, or
HTTP POST.

Owns the sockets. Without an address nothing is sent; pyzmq is imported only if the address needs
it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pdproxy.kit.tasks import TaskOwner
from pdproxy_lab.sim import notifier
from pdproxy_lab.sim.connector import ProxyNotice
from pdproxy_lab.sim.faults.kind import Occurrence
from pdproxy_lab.sim.faults.targets import Delivery

logger = logging.getLogger("pdproxy")

MAX_WAITING = 1000
"""The number of notices that may wait for a proxy that doesn't read, as in both real senders."""
_POST_TIMEOUT = 5.0
"""Seconds that a POST may take, as in LMCache."""


class NoticeSender:
    """The sender of one engine."""

    def __init__(self, address: str | None, *, keeps: bool) -> None:
        """Make one; `keeps`: notices wait for a proxy that does not listen (LMCache), else they are
        dropped (the notifier).
        """
        self._address, self._keeps = address, keeps
        self._post = address is not None and address.startswith("http://")
        self._context: Any = None
        self._sockets: list[Any] = []
        self._missed: Counter[int] = Counter()
        self._timers: set[asyncio.TimerHandle] = set()
        self._posting = TaskOwner("notices")
        self.faults: Callable[[int], Iterable[Occurrence]] = lambda rank: ()
        """Called with the rank of a notice that is due; returns the faults that happen to it."""
        self.counts: Counter[str] = Counter()
        """sent, dropped."""

    def open(self, ranks: int) -> None:
        """Connect; the proxy need not listen yet."""
        if self._address is None or self._post or self._context is not None:
            return
        import zmq

        self._context = zmq.Context()
        for _ in range(ranks):
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, MAX_WAITING)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IMMEDIATE, not self._keeps)
            socket.connect(self._address)
            self._sockets.append(socket)

    def send(self, notice: ProxyNotice) -> None:
        """Send a notice, as changed by faults."""
        if self._address is None:
            return
        message = dict(notice.message)
        if message.get("type") == notifier.TYPE:
            message |= {"t": asyncio.get_running_loop().time(), "wall": time.time()}
            if missed := self._missed[notice.rank]:
                message["dropped"] = missed
        delivery = Delivery()
        for one in self.faults(notice.rank):
            one.kind.on_notice(delivery, one)
        for other in delivery.first:
            self._send(other, notice.rank)
        payload = msgspec.json.encode(message) if self._post else msgspec.msgpack.encode(message)
        for _ in range(delivery.copies):
            self._later(delivery.delay, payload, notice.rank)

    def _later(self, delay: float, payload: bytes, rank: int) -> None:
        if not delay:
            self._send(payload, rank)
            return

        def due() -> None:
            self._timers.discard(timer)
            self._send(payload, rank)

        timer = asyncio.get_running_loop().call_later(delay, due)
        self._timers.add(timer)

    def _send(self, payload: bytes, rank: int) -> None:
        assert self._address is not None
        if self._post:
            self._posting.spawn(self._posted(self._address, payload), "POST")
            return
        if self._context is None:
            return
        import zmq

        try:
            self._sockets[rank].send(payload, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            self.counts["dropped"] += 1
            self._missed[rank] += 1
            logger.debug("notice not sent to %s: %s", self._address, error)
        else:
            self.counts["sent"] += 1
            self._missed[rank] = 0

    async def _posted(self, url: str, payload: bytes) -> None:
        parts = urlsplit(url)
        head = (
            f"POST {parts.path or '/'} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: "
            f"application/json\r\n"
            f"content-length: {len(payload)}\r\nconnection: close\r\n\r\n"
        )
        try:
            async with asyncio.timeout(_POST_TIMEOUT):
                reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
                try:
                    writer.write(head.encode("ascii") + payload)
                    await reader.readline()
                    self.counts["sent"] += 1
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError) as error:
            self.counts["dropped"] += 1
            logger.debug("notice not sent to %s: %s", url, error)

    async def close(self) -> None:
        """Close, without sending what waits."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        await self._posting.settle(0)
        for socket in self._sockets:
            socket.close()
        self._sockets.clear()
        if self._context is not None:
            self._context.term()
            self._context = None
