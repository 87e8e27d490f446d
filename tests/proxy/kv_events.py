"""Readers of KV events in front of simulated engines: what the index knows is what the engines
have.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import zmq

from pdproxy.engine_model.hardware import Hardware
from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.kv_sources import KvEventSources
from pdproxy.kit.clock import Clock
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.events import NodeChanged, Observers
from pdproxy.observe.metrics import Metrics
from pdproxy.scheduling.ledger import Ledger, LedgerOptions
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.settings.kv import EngineKvEvents, KvEvents
from pdproxy.settings.limits import Deadlines
from pdproxy.upstream.admin import EngineAdmin
from pdproxy_lab.sim.facts import KvEventsConfig, SimFacts
from pdproxy_lab.sim.kv_event_log import EngineEventLog
from pdproxy_lab.sim.server import SimServer
from tests.fakes.kv_index import Hash, PlainIndex
from tests.fakes.ports import free_port
from tests.fakes.recorder import Recorder
from tests.fakes.registry import unused_client
from tests.fakes.samples import total
from tests.sim.raw import ask, completion, until

FAST = Hardware(speed=0)
LONG = 30.0
ANY = KvEventsConfig(
    enable_kv_cache_events=True, endpoint="tcp://*:0", replay_endpoint="tcp://*:0", topic="t"
)


def facts(config: KvEventsConfig | None = ANY, **more: Any) -> SimFacts:
    """An engine that publishes."""
    return SimFacts(hardware=FAST, eos_every=0, connector="none", kv_events=config, **more)


async def complete(sim: SimServer, prompt: list[int], **fields: Any) -> None:
    """Have an engine compute a prompt."""
    found = await ask(sim.port, completion(prompt=prompt, **{"max_tokens": 1, **fields}))
    assert found.answer.status == 200, found.data
    found.leave()


def prompt(number: int, tokens: int = 100) -> list[int]:
    """A prompt that begins like no other."""
    return [300 + number, *range(400, 399 + tokens)]


def truth(sim: SimServer, rank: int = 0) -> set[Hash]:
    """The hashes of the blocks that an engine has."""
    log = sim.engine._cores[rank].kv_events
    assert isinstance(log, EngineEventLog)
    return set(log._hash_of.values())


class Reader(Recorder):
    """What reads the events of a pool's engines, as the proxy has it."""

    def __init__(
        self,
        own: KvEvents,
        of_engine: dict[str, EngineKvEvents] | None = None,
        *,
        ports: range = range(0),
        deadline: float = LONG,
        clock: Clock | None = None,
    ) -> None:
        self.ledger = Ledger([], LedgerOptions(breaker_failures=3, breaker_cooldown=5))
        self.engines = EngineRegistry(self.ledger)
        self.index = PlainIndex()
        super().__init__()
        self.tasks = TaskOwner("test")
        self.admin = EngineAdmin(deadlines=Deadlines(probe=LONG))
        self.metrics = Metrics()
        engines = of_engine or {}
        self.sources = KvEventSources(
            self.engines,
            self.index,
            own,
            lambda url: engines.get(url, EngineKvEvents()),
            self.admin.kv_event_sources,
            Observers([self, self.metrics]),
            clock or Clock(),
            self.tasks,
            ports=ports,
            deadlines=Deadlines(kv_replay=deadline),
        )
        self._started = 0.0
        for port, socket in self.sources.bound.items():
            socket.bind("127.0.0.1", port)

    def add(self, url: str, ranks: int = 1) -> Engine:
        """Add an engine that is not up yet."""
        return self.engines.add(EngineSpec(url, Role.AGGREGATED), unused_client(url), ranks=ranks)

    def up(self, url: str) -> None:
        """A probe has found a new run of an engine."""
        self._started += 1
        self.ledger.mark_up(url, Evidence(frozenset({"sim"}), "", 16, (), 0, self._started))
        self.sources.notify(NodeChanged(url, "aggregated", up=True, reason=""))

    def down(self, url: str) -> None:
        """A probe has found that an engine is down."""
        self.ledger.mark_down(url, "made to be", 0)
        self.sources.notify(NodeChanged(url, "aggregated", up=False, reason=""))

    async def follow(self, sim: SimServer, ranks: int = 1) -> Engine:
        """Add an engine that is up, and wait until its events come."""
        engine = self.add(sim.url, ranks)
        self.up(sim.url)
        await until(lambda: self.connected(sim.url, ranks))
        return engine

    def connected(self, url: str, ranks: int = 1) -> bool:
        """Whether an engine's sources are connected, and have had their first replay."""
        found = [one for engine, one in self.sources._sources() if engine.url == url]
        ready = all(one.source.connected and one.source._replaying is None for one in found)
        return len(found) == ranks and ready and self.sources.counts.replays["complete"] >= ranks

    def known(self, url: str, rank: int = 0) -> set[Hash]:
        """The hashes that are known of an engine's rank."""
        place = self.sources.places.get((url, rank))
        return set(self.index.blocks[place]) if place is not None else set()

    async def agrees(self, sim: SimServer, rank: int = 0) -> None:
        """Wait until what is known of an engine is what it has."""
        await until(lambda: self.known(sim.url, rank) == truth(sim, rank))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with this name and these labels."""
        return total(self.metrics.collect(), name, labels)

    async def close(self) -> None:
        self.sources.close()
        await self.tasks.settle(0)
        await self.admin.close()


@asynccontextmanager
async def reading(*args: Any, **more: Any) -> AsyncIterator[Reader]:
    """A reader; nothing of it stays."""
    reader = Reader(*(args or (KvEvents(enabled=True),)), **more)
    try:
        yield reader
    finally:
        await reader.close()


class Publisher:
    """Somebody who publishes whatever a test wants. It answers no replays."""

    def __init__(self, address: str | None = None) -> None:
        self.context = zmq.Context()
        self._socket = self.context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        if address is None:
            self.endpoint = f"tcp://127.0.0.1:{free_port()}"
            self._socket.bind(self.endpoint)
        else:
            self._socket.connect(address)

    def send(self, *frames: bytes) -> None:
        """Send frames as they are."""
        self._socket.send_multipart(frames)

    def publish(self, number: int, payload: bytes, topic: bytes = b"") -> None:
        """Send a message."""
        self.send(topic, number.to_bytes(8, "big"), payload)

    async def until(
        self, condition: Callable[[], object], number: int, payload: bytes, topic: bytes = b""
    ) -> int:
        """Publish messages, with numbers that go on, until something has happened. Return the next
        number.
        """
        async with asyncio.timeout(LONG):
            while not condition():
                self.publish(number, payload, topic)
                number += 1
                await asyncio.sleep(0.01)
        return number

    def close(self) -> None:
        self.context.destroy(linger=0)
