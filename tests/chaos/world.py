"""The proxy and its engines in one virtual network: how they begin, and how they end.

Owns all of them. The proxy is the one that serves, made from settings by `app.compose`, but for
sockets, clock and chance.
"""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from collections.abc import Coroutine, Sequence
from contextvars import Context, copy_context
from itertools import cycle
from pathlib import Path
from typing import Any

from uvicorn.server import ServerState

from pdproxy.app.compose import Proxy
from pdproxy.app.server import uvicorn_config
from pdproxy.app.share import ALONE, SoleProcess
from pdproxy.app.watch import Watch
from pdproxy.kit.ordered_set import OrderedSet
from pdproxy.observe.events import Observer
from pdproxy.settings.health import Health, OutlierSettings, Probes
from pdproxy.settings.keys import Auth
from pdproxy.settings.kv import KvReady
from pdproxy.settings.limits import Deadlines, Limits, Overload
from pdproxy.settings.listen import Listen
from pdproxy.settings.schema import Settings
from pdproxy.workers.share import WorkerShare
from pdproxy_lab.sim.facts import ConnectorName
from pdproxy_lab.sim.notice_sender import NoticeSender
from pdproxy_lab.sim.server import SimServer
from pdproxy_lab.sim.storage import MemoryStorage, Storage
from tests.chaos.access import LINES, TENANT_HEADER, WEIGHTS
from tests.chaos.kv_books import KvBooks
from tests.chaos.options import Options
from tests.chaos.setup import JUDGE, PORT, PROXY, STORED, Place, facts, nodes, places, pool
from tests.chaos.virtual.connector import VirtualConnector
from tests.chaos.virtual.loop import VirtualLoop
from tests.chaos.virtual.network import HOST, VirtualNetwork
from tests.chaos.virtual.notices import VirtualNotices
from tests.chaos.virtual.pairs import VirtualPairs
from tests.chaos.virtual.ports import VirtualPorts
from tests.fakes.several import Built, Several
from tests.fakes.world import _Late

CLIENTS = "10.0.2.1"
# Each wait of a stream ends long before `total`: a deadline that is missing shows.
DEADLINES = Deadlines(
    connect=1.0,
    tokenize=2.0,
    client_head=5.0,
    client_body=5.0,
    queue=5.0,
    encode=3.0,
    prefill=5.0,
    kv_ready=2.0,
    first_token=5.0,
    between_tokens=3.0,
    continuation=5.0,
    client_write=3.0,
    abandoned_prefill=3.0,
    release=3.0,
    retry=2.0,
    drain=10.0,
    total=120.0,
    probe=1.0,
)
LIMITS = Limits(max_inflight=12, max_queue=24, min_read_rate=256, breaker_cooldown=3.0)
"""So few that requests wait for places once some engines stand still."""
HEALTH = Health(stalled_after=2.0, canary_timeout=1.0, canary_interval=0.5, slow_start=2.0)
OUTLIERS = OutlierSettings(interval=5.0, min_requests=5, exclude_for=5.0)


class ChaosEngine:
    """One simulated engine on a host of its own."""

    def __init__(
        self,
        place: Place,
        ports: VirtualPorts,
        chance: int,
        connector: ConnectorName,
        storage: Storage | None = None,
        notices: NoticeSender | None = None,
        outputs: str = "",
    ) -> None:
        self.name, self.role, self.host = place.name, place.role, place.host
        self.sim = SimServer(
            facts(place, connector, notifies=notices is not None, outputs=outputs),
            host=place.host,
            port=PORT,
            chance=chance,
            network=ports,
            storage=storage,
        )
        if notices is not None:
            notices.faults = self.sim.engine.notice_sender.faults
            self.sim.engine.notice_sender = notices
        self._context = _context_of(place.host)

    def __repr__(self) -> str:
        return f"<ChaosEngine {self.name} {self.sim.life}>"

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.sim.url

    def run(self, what: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something on the engine's host."""
        return asyncio.get_running_loop().create_task(
            what, name=f"chaos:{self.name}", context=self._context
        )


class World:
    """What there is. `begin` and `end` it inside the virtual loop."""

    def __init__(self, options: Options, network: VirtualNetwork, observer: Observer) -> None:
        self.options = options
        self.network = network
        ports = VirtualPorts(network)
        storage = MemoryStorage() if options.connector in STORED else None
        self._context = _context_of(PROXY)
        self._outputs = tempfile.TemporaryDirectory(prefix="pdproxy-chaos-")
        outputs = self._outputs.name if options.encode else ""
        self.engines = [
            ChaosEngine(
                place,
                ports,
                options.seed * 100 + number,
                options.connector,
                storage,
                self._notices(place),
                outputs,
            )
            for number, place in enumerate(places(options))
        ]
        self.judge = ChaosEngine(
            Place("judge", "aggregated", JUDGE),
            ports,
            options.seed * 100 + 99,
            "none",
            outputs=outputs,
        )
        self.nodes = nodes(options)
        self._observer = observer
        self.proxy: Proxy
        """The one that chooses engines, and knows who is a member."""
        self.proxies: list[Proxy]
        """With it, the workers that serve clients, if these are others."""
        self._several: Built | None = None
        self.errors: list[str] = []
        """What the proxy logged as an error, and what the loop could not deliver to anybody."""
        self.state = ServerState()
        self._has_stopped = False
        self._lines = _Errors(self.errors)
        self._keys = Path(tempfile.mkstemp(prefix="pdproxy-chaos-")[1])

    def _notices(self, place: Place) -> NoticeSender | None:
        if self.options.notices == "none" or place.role == "encode":
            return None
        return VirtualNotices(self.network.link(place.host, PROXY), self._noticed, self._context)

    def _noticed(self, payload: bytes) -> None:
        if not self._has_stopped:  # its socket is closed then
            self.proxy.notices.socket.take(payload)

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
        # nothing announces it
        while not all(one.probed for proxy in self.proxies for one in proxy.ledger.engines):
            await asyncio.sleep(0.05)

    async def _begin_proxy(self) -> None:
        self._keys.write_text(LINES)
        settings = Settings(
            listen=Listen(host=PROXY, port=PORT),
            auth=Auth(api_keys_file=str(self._keys)),
            overload=Overload(tenant_header=TENANT_HEADER, weights=dict(WEIGHTS)),
            pools=(pool(self.options, self.nodes),),
            kv_ready=KvReady(
                notifier=self.options.notices != "none", early=self.options.notices == "early"
            ),
            deadlines=DEADLINES,
            limits=LIMITS,
            health=HEALTH,
            outliers=OUTLIERS,
            probes=Probes(interval=1.0, scrape_interval=4.0),
        )
        chance = random.Random(f"{self.options.seed}/proxy")
        given = settings, self.network, self.state, chance, self._observer
        if self.options.workers > 1:
            self._several = begin_workers(self.options.workers, *given)
            self.proxies = self._several.proxies
        else:
            self.proxies = [begin_proxy(*given)]
        self.proxy = self.proxies[0]
        self.books = [KvBooks(one.custodian) for one in self.proxies]

    @property
    def answering(self) -> list[str]:
        """The names of the engines that answer clients."""
        others = ("encode", "prefill")
        return [engine.name for engine in self.engines if engine.role not in others]

    def is_blind(self, engine: ChaosEngine) -> bool:
        """Return whether an engine was found to stand still, and may not be asked whether it works
        again.

        It gets no request until its metrics move or half a minute is over, also where only one
        answer of it was lost.
        """
        ledger_engine = next(
            (
                ledger_engine
                for ledger_engine in self.proxy.ledger.engines
                if ledger_engine.url == engine.url
            ),
            None,
        )
        can_ask = self.proxy.transfer.contract.capabilities.canary_on
        return (
            ledger_engine is not None
            and ledger_engine.stalled is not None
            and engine.role not in can_ask
        )

    def in_proxy(self, what: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something on the proxy's host."""
        return asyncio.get_running_loop().create_task(
            what, name="chaos:proxy", context=self._context
        )

    async def heal(self) -> None:
        """End all that is wrong with engines and network.

        With connector `cpu` a prefill engine knows its decode engine's run from the first transfer
        on, so it is started again, as its operator has to do.
        """
        loop = asyncio.get_running_loop()
        for link in self.network.links:
            link.up(loop)
        for engine in self.engines:
            sim = engine.sim
            sim.faults.clear()
            if sim.life == "frozen":
                await engine.run(sim.thaw())
            await engine.run(sim.thaw_core())
            pushes = self.options.connector == "cpu" and engine.role == "prefill"
            if sim.life != "up" or sim.engine.dead or pushes:
                await engine.run(sim.restart())

    async def drain(self) -> None:
        """Have the proxy do what it does at SIGTERM, but for the end of its parts: it refuses new
        requests meanwhile.
        """
        first, *others = self.proxies
        await asyncio.gather(
            *[self.in_proxy(one.drain(self.state.tasks)) for one in others or [first]]
        )
        if others:  # the scheduler process ends last
            await self.in_proxy(first.drain(self.state.tasks))
        self.network.unlisten(PROXY, PORT)
        for connection in list(self.state.connections):
            connection.shutdown()

    async def end(self) -> None:
        """Stop everything, after `drain`."""
        for connection in list(self.state.connections):
            connection.transport.abort()
        stopped = self.proxy.stop() if self._several is None else self._several.stop()
        await self.in_proxy(stopped)
        self._has_stopped = True
        for engine in (*self.engines, self.judge):
            await engine.run(engine.sim.stop())
        logging.getLogger("pdproxy").removeHandler(self._lines)
        self._keys.unlink()
        self._outputs.cleanup()


def begin_proxy(
    settings: Settings,
    network: VirtualNetwork,
    state: ServerState,
    chance: random.Random,
    *observers: Observer,
) -> Proxy:
    """Start a proxy where its settings say, in the running virtual loop. `state`: gets its
    connections and tasks.
    """
    proxy = _built(settings, chance, observers, ALONE)
    _notices(settings, network, proxy)
    _listen(settings, network, state, [proxy])
    proxy.start()
    return proxy


def begin_workers(
    count: int,
    settings: Settings,
    network: VirtualNetwork,
    state: ServerState,
    chance: random.Random,
    *observers: Observer,
) -> Built:
    """Start so many workers and a scheduler process, the first of all, as `begin_proxy` does.
    Connections go to the workers in turns.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    several = Several(count + 1, loop.time, VirtualPairs(loop, loop.ends, chance).pair)
    proxies = [_built(settings, chance, observers, share) for share in several.shares]
    made = Built(proxies, [*several.shares], several)
    _notices(settings, network, proxies[0])
    _listen(settings, network, state, proxies[1:])
    made.start()
    return made


def _built(
    settings: Settings,
    chance: random.Random,
    observers: Sequence[Observer],
    share: WorkerShare | SoleProcess,
) -> Proxy:
    now = asyncio.get_running_loop().time
    watch = Watch(observers=observers, connector=VirtualConnector, now=now, chance=chance.random)
    proxy = Proxy.build(settings, watch=watch, share=share)
    proxy.notices.socket.bind = lambda *place: None  # type: ignore[method-assign] # notices come through the network
    return proxy


def _notices(settings: Settings, network: VirtualNetwork, proxy: Proxy) -> None:
    if (posted := proxy.notices.posted) is not None:
        posted.bind = lambda *place: None  # type: ignore[method-assign]
        network.listen(settings.listen.host, settings.kv_ready.port).accept(
            posted.listener.protocol
        )


def _listen(
    settings: Settings, network: VirtualNetwork, state: ServerState, proxies: Sequence[Proxy]
) -> None:
    configs = [uvicorn_config(proxy, _Late(proxy)) for proxy in proxies]
    for config in configs:
        config.load()
    state.connections, state.tasks = OrderedSet(), OrderedSet()  # type: ignore[assignment]
    turns = cycle(configs)

    def make() -> asyncio.BaseProtocol:
        config = next(turns)
        return config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]

    network.listen(settings.listen.host, settings.listen.port).accept(make)


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
