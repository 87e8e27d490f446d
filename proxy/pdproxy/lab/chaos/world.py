"""The proxy and its engines in one virtual network: how they begin, and how they end.

Owns all of them. The proxy is the one that serves, made from settings by `app.compose`, but for sockets, clock and chance.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine
from contextvars import Context, copy_context
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from pdproxy.app.compose import Proxy
from pdproxy.app.server import uvicorn_config
from pdproxy.app.watch import Watch
from pdproxy.engine_model.hardware import Hardware
from pdproxy.kit.ordered_set import OrderedSet
from pdproxy.lab.chaos.options import Options
from pdproxy.lab.chaos.virtual.connector import VirtualConnector
from pdproxy.lab.chaos.virtual.network import HOST, VirtualNetwork
from pdproxy.lab.chaos.virtual.ports import VirtualPorts
from pdproxy.observe.events import Event, Observer
from pdproxy.settings.limits import Deadlines, Limits
from pdproxy.settings.probes import Probes
from pdproxy.settings.schema import Listen, Node, Pool, Settings
from pdproxy.sim.facts import ConnectorName, Facts, Role
from pdproxy.sim.server import SimServer
from pdproxy.web.app import create_app

PROXY = "10.0.1.1"
CLIENTS = "10.0.2.1"
JUDGE = "10.0.3.1"
"""The host of the engine that is asked what is right. The proxy does not know it."""
PORT = 8000
_SIDE_PORT = 5600
MODEL = "tiny"
LEASE = 10.0
"""Seconds for which a prefill engine keeps KV that nobody fetches."""
# Each wait of a stream ends long before `total`: a deadline that is missing shows.
DEADLINES = Deadlines(
    connect=1.0,
    client_head=5.0,
    client_body=5.0,
    queue=5.0,
    prefill=5.0,
    first_token=5.0,
    between_tokens=3.0,
    client_write=3.0,
    abandoned_prefill=3.0,
    release=3.0,
    drain=10.0,
    total=120.0,
    probe=1.0,
)
LIMITS = Limits(max_inflight=12, max_queue=24, min_read_rate=256, breaker_cooldown=3.0)
"""So few that requests wait for places once some engines stand still."""
HARDWARE = Hardware(prefill_tokens_per_s=4000.0, decode_step_s=0.02, request_overhead_s=0.001)
"""Slow enough that many requests are under way at once."""


CONNECTOR: ConnectorName = "nixl"
"""How KV gets from prefill to decode engines."""


class ChaosEngine:
    """One simulated engine on a host of its own."""

    def __init__(
        self, name: str, role: Role, host: str, ports: VirtualPorts, chance: int, connector: ConnectorName
    ) -> None:
        self.name = name
        self.role: Role = role
        self.host = host
        facts = Facts(
            role=role,
            model=MODEL,
            connector=connector,
            hardware=HARDWARE,
            eos_every=0,
            kv_lease_duration=LEASE,
            heartbeat_interval=2.0,
            handshake_timeout=2.0,
            side_channel_host=host,
            side_channel_port=_SIDE_PORT,
        )
        self.sim = SimServer(facts, host=host, port=PORT, chance=chance, network=ports)
        self._context = _context_of(host)

    def __repr__(self) -> str:
        return f"<ChaosEngine {self.name} {self.sim.life}>"

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.sim.url

    def run(self, what: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something on the engine's host."""
        return asyncio.get_running_loop().create_task(what, name=f"chaos:{self.name}", context=self._context)


class World:
    """What there is. `begin` and `end` it inside the virtual loop."""

    def __init__(self, options: Options, network: VirtualNetwork, observer: Observer) -> None:
        self.options = options
        self.network = network
        ports = VirtualPorts(network)
        roles: list[tuple[str, Role, str]] = [
            *((f"P{number}", "prefill", f"10.0.0.{10 + number}") for number in range(options.prefill)),
            *((f"D{number}", "decode", f"10.0.0.{50 + number}") for number in range(options.decode)),
        ]
        self.engines = [
            ChaosEngine(name, role, host, ports, options.seed * 100 + number, CONNECTOR)
            for number, (name, role, host) in enumerate(roles)
        ]
        self.judge = ChaosEngine("judge", "aggregated", JUDGE, ports, options.seed * 100 + 99, "none")
        self.nodes = {engine.name: Node(url=engine.url, role=engine.role) for engine in self.engines}
        self._observer = observer
        self.proxy: Proxy
        self.errors: list[str] = []
        """What the proxy logged as an error, and what the loop could not deliver to anybody."""
        self.state = ServerState()
        self._context = _context_of(PROXY)
        self._lines = _Errors(self.errors)

    async def begin(self) -> None:
        """Start engines and proxy, and wait until the proxy has probed all engines."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.errors.append(_unhandled(context)))
        logger = logging.getLogger("pdproxy")
        logger.propagate = False
        logger.addHandler(self._lines)
        for engine in (*self.engines, self.judge):
            await engine.run(engine.sim.start())
        await self.in_proxy(self._begin_proxy())
        while not all(node.probed for node in self.proxy.ledger.nodes):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.05)

    async def _begin_proxy(self) -> None:
        settings = Settings(
            listen=Listen(host=PROXY, port=PORT),
            pools=(Pool(nodes=tuple(self.nodes.values())),),
            deadlines=DEADLINES,
            limits=LIMITS,
            probes=Probes(interval=1.0, scrape_interval=4.0),
        )
        chance = random.Random(f"{self.options.seed}/proxy")
        self.proxy = begin_proxy(settings, self.network, self.state, chance, self._observer)

    def in_proxy(self, what: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something on the proxy's host."""
        return asyncio.get_running_loop().create_task(what, name="chaos:proxy", context=self._context)

    async def heal(self) -> None:
        """End all that is wrong with engines and network."""
        loop = asyncio.get_running_loop()
        for link in self.network.links:
            link.up(loop)
        for engine in self.engines:
            sim = engine.sim
            sim.faults.clear()
            if sim.life == "frozen":
                await engine.run(sim.thaw())
            if sim.life != "up" or sim.engine.dead:
                await engine.run(sim.restart())

    async def end(self) -> None:
        """Stop everything."""
        self.network.unlisten(PROXY, PORT)
        await self.in_proxy(self.proxy.drain(self.state.tasks))
        for connection in list(self.state.connections):
            connection.transport.abort()
        await self.in_proxy(self.proxy.stop())
        for engine in (*self.engines, self.judge):
            await engine.run(engine.sim.stop())
        logging.getLogger("pdproxy").removeHandler(self._lines)


def begin_proxy(
    settings: Settings, network: VirtualNetwork, state: ServerState, chance: random.Random, *observers: Observer
) -> Proxy:
    """Start a proxy where its settings say, in the running virtual loop. `state`: gets its connections and tasks."""
    loop = asyncio.get_running_loop()
    watch = Watch(observers=observers, connector=VirtualConnector, now=loop.time, chance=chance.random)
    proxy = Proxy.build(settings, watch=watch)
    config = uvicorn_config(proxy, _Late(proxy))
    config.load()
    state.connections, state.tasks = OrderedSet(), OrderedSet()  # type: ignore[assignment]
    make = config.http_protocol_class
    listening = network.listen(settings.listen.host, settings.listen.port)
    listening.accept(lambda: make(config=config, server_state=state, app_state={}))  # type: ignore[call-arg]
    proxy.start()
    return proxy


class _Late:
    """The application of all routes outside the data path, made at its first request."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            self._app = create_app(self._proxy.front.answers())
        await self._app(scope, receive, send)


class _Errors(logging.Handler):
    """Keeps the messages of errors."""

    def __init__(self, kept: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self._kept.append(record.getMessage())


def _unhandled(context: dict[str, Any]) -> str:
    return f"{context.get('message')}: {context.get('exception')!r}"


def _context_of(host: str) -> Context:
    context = copy_context()
    context.run(HOST.set, host)
    return context


class Events:
    """Keeps the proxy's events, but for beats of its loop."""

    def __init__(self) -> None:
        self.all: list[Event] = []

    def notify(self, event: Event) -> None:
        """Keep one."""
        if type(event).__name__ != "LoopBeat":
            self.all.append(event)
