"""What a simulated engine publishes of its KV blocks: ZMQ PUB for the events, ROUTER for replays,
as vLLM's `ZmqEventPublisher`.

Owns the sockets of all data-parallel ranks, their sequence numbers, from 0 at each start, and the
messages that a replay can have again. Unlike vLLM, a replay is answered at once, not between two
messages. pyzmq is imported only if events are published.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from pdproxy_lab.sim.facts import KvEventsConfig, SimFacts
from pdproxy_lab.sim.faults.kind import Occurrence
from pdproxy_lab.sim.faults.moments import Moment
from pdproxy_lab.sim.faults.targets import Delivery

END = (-1).to_bytes(8, "big", signed=True)
_ANY_PORT = "tcp://*:0"
_encode = msgspec.msgpack.Encoder().encode
Faults = Callable[[Moment, int], Iterable[Occurrence]]
"""Called with a moment (`kv_events`, `kv_replay`) and the rank; returns the faults that happen
then.
"""


class Publisher:
    """One rank's. `host`: the address that `tcp://*:0` binds."""

    def __init__(self, config: KvEventsConfig, rank: int, host: str, faults: Faults) -> None:
        """Bind or connect.

        Raises:
            OSError: an address can't be used. `filename` is the address.
        """
        import zmq

        self._zmq: Any = zmq
        self._rank, self._faults = rank, faults
        self._topic = config.topic.encode()
        self._next = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context: Any = zmq.Context()
        self._router: Any = None
        self._loop = asyncio.get_running_loop()
        self.counts: Counter[str] = Counter()
        """sent, lost (by faults), replays, replayed."""
        try:
            self._publisher = self._socket(zmq.PUB)
            self._publisher.set_hwm(config.hwm)
            endpoint = _offset(config.endpoint, rank)
            if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
                endpoint = self._bound(self._publisher, endpoint, host)
            else:
                self._publisher.connect(endpoint)
            replay = None
            if config.replay_endpoint is not None:
                self._router = self._socket(zmq.ROUTER)
                replay = self._bound(self._router, _offset(config.replay_endpoint, rank), host)
        except BaseException:
            self.close()
            raise
        self.config = msgspec.structs.replace(config, endpoint=endpoint, replay_endpoint=replay)
        """As resolved: with the rank's ports."""
        self.thaw()

    def _socket(self, kind: int) -> Any:
        made = self._context.socket(kind)
        made.setsockopt(self._zmq.LINGER, 0)
        return made

    def _bound(self, socket: Any, endpoint: str, host: str) -> str:
        any_port = endpoint == _ANY_PORT
        try:
            socket.bind(f"tcp://{host}:0" if any_port else endpoint)
        except self._zmq.ZMQError as error:
            raise OSError(error.errno, self._zmq.strerror(error.errno), endpoint) from None
        return socket.getsockopt_string(self._zmq.LAST_ENDPOINT) if any_port else endpoint

    def publish(self, events: Sequence[dict[str, Any]]) -> None:
        """Publish the events of a step. A subscriber whose queue is full (`hwm`) does not get
        them.
        """
        payload = _encode([time.time(), events, self._rank])
        delivery = self._delivery("kv_events")
        if delivery.copies:
            self._publisher.send_multipart((self._topic, self._next.to_bytes(8, "big"), payload))
        self.counts["sent" if delivery.copies else "lost"] += 1
        self._buffer.append((self._next, payload))
        self._next += 1

    def _delivery(self, moment: Moment) -> Delivery:
        delivery = Delivery()
        for one in self._faults(moment, self._rank):
            one.kind.on_notice(delivery, one)
        return delivery

    def _asked(self) -> None:
        while self._router is not None:
            try:
                frames = self._router.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.ZMQError:
                return
            if len(frames) != 3:
                continue
            self.counts["replays"] += 1
            if not self._delivery("kv_replay").copies:
                continue
            client, start = frames[0], int.from_bytes(frames[2], "big")
            for number, payload in self._buffer:
                if number >= start:
                    self._router.send_multipart(
                        (client, b"", self._topic, number.to_bytes(8, "big"), payload)
                    )
                    self.counts["replayed"] += 1
            self._router.send_multipart((client, b"", b"", END, b""))

    def freeze(self) -> None:
        """Answer no replays."""
        if self._router is not None:
            self._loop.remove_reader(self._router.fileno())

    def thaw(self) -> None:
        """Answer replays."""
        if self._router is not None:
            self._loop.add_reader(self._router.fileno(), self._asked)
            self._loop.call_soon(self._asked)

    def close(self) -> None:
        """Close. The addresses are free afterwards."""
        if self._router is not None:
            self.freeze()
            self._router = None
        self._context.destroy(linger=0)


class KvEventPublishers:
    """Those of all ranks. Without `--kv-events-config` there are none."""

    def __init__(self, facts: SimFacts) -> None:
        self._config = facts.kv_events
        self._host, self._ranks = facts.side_channel_host, facts.data_parallel_size
        self.ranks: list[Publisher] = []
        self.faults: Faults = lambda moment, rank: ()

    def open(self) -> None:
        """Begin to publish, with the number 0. Raises OSError if an address can't be used."""
        if self._config is None or not self._config.publishes:
            return
        for rank in range(self._ranks):
            self.ranks.append(
                Publisher(self._config, rank, self._host, lambda *now: self.faults(*now))
            )

    @property
    def sources(self) -> dict[int, KvEventsConfig]:
        """What `GET /kv_event_sources` answers."""
        return {rank: publisher.config for rank, publisher in enumerate(self.ranks)}

    def publish(self, rank: int, events: Sequence[dict[str, Any]]) -> None:
        """Publish the events of a rank's step, if there are any."""
        if events and self.ranks:
            self.ranks[rank].publish(events)

    def freeze(self) -> None:
        """Answer no replays."""
        for one in self.ranks:
            one.freeze()

    def thaw(self) -> None:
        """Go on after `freeze`."""
        for one in self.ranks:
            one.thaw()

    async def close(self) -> None:
        """Publish no more."""
        for one in self.ranks:
            one.close()
        self.ranks.clear()

    def release(self) -> None:
        """Do nothing: no port is kept between two runs."""


def _offset(endpoint: str, rank: int) -> str:
    """Return the endpoint of a rank, as vLLM does: its port is as far behind the first one's."""
    place, _, port = endpoint.rpartition(":")
    return (
        endpoint
        if not rank or not endpoint.startswith("tcp") or port == "0"
        else f"{place}:{int(port) + rank}"
    )
