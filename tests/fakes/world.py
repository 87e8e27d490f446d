"""A whole small world: the real proxy in front of fake engines, all in one event loop."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from pdproxy.app.compose import Proxy
from pdproxy.app.server import uvicorn_config
from pdproxy.app.share import ALONE, Share, SoleProcess
from pdproxy.app.tokens import Library
from pdproxy.kit.clock import Clock
from pdproxy.observe.events import HandleEnded, RequestEnded
from pdproxy.observe.page import Family
from pdproxy.observe.snapshot import families, merged, page_of
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.health import Health, OutlierSettings, Probes
from pdproxy.settings.keys import Auth
from pdproxy.settings.limits import Deadlines, Limits
from pdproxy.settings.listen import Cors, Listen, OperatorRoutes
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy.web.app import create_app
from pdproxy.workers.audit import AuditorOfAll
from pdproxy_lab.sim.api.template import render
from pdproxy_lab.sim.tokenizer import BuiltInTokenizer
from tests.fakes.admitted import admission_of
from tests.fakes.books import Books
from tests.fakes.client import Answer, Client, request
from tests.fakes.engine import FakeEngine
from tests.fakes.recorder import Recorder
from tests.fakes.samples import total
from tests.fakes.several import Several, workers_for
from tests.fakes.tokenizer import Shelf
from tests.sim.engines import plain

LONG = 30.0
"""Seconds: a deadline that no test reaches, however long the machine stalls. One that is to be
reached has a manual clock.
"""
DEADLINES = Deadlines(
    connect=LONG,
    queue=LONG,
    prefill=LONG,
    first_token=LONG,
    between_tokens=LONG,
    client_write=LONG,
    client_head=LONG,
    client_body=LONG,
    abandoned_prefill=LONG,
    release=LONG,
    drain=LONG,
    total=3 * LONG,
    probe=LONG,
)
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "import os\ndef main(argv):\n    for name in os.listdir(argv[1]):\n        print(name)\n"
_E = TypeVar("_E")


def _said(prompt: str) -> str:
    """What one engine alone says to a prompt in four tokens."""
    ids = tuple(BuiltInTokenizer().encode(prompt))
    return BuiltInTokenizer().decode(plain(ids, 4, model="tiny", eos_every=0))


TEXT = _said(PROMPT)
"""The answer to `completion()`."""
CHAT_TEXT = _said(render("chatml", [{"role": "user", "content": PROMPT}]))
"""The answer to `chat()`."""


def completion(**fields: Any) -> dict[str, Any]:
    """The body of a completion with a prompt of some blocks."""
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    """The body of a chat."""
    messages = [{"role": "user", "content": PROMPT}]
    return {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0, **fields}


class World:
    """What a test sees of it."""

    def __init__(
        self, proxy: Proxy, books: Books, engines: Sequence[FakeEngine], recorder: Recorder
    ) -> None:
        self.proxy = proxy
        self.books = books
        self.engines = list(engines)
        self.encode = [engine for engine in engines if engine.role == "encode"]
        self.prefill = [engine for engine in engines if engine.role == "prefill"]
        self.decode = [engine for engine in engines if engine.role == "decode"]
        self.aggregated = [engine for engine in engines if engine.role == "aggregated"]
        self.anything = [engine for engine in engines if engine.role == "any"]
        self.others: list[Proxy] = []
        """The other workers of a proxy that has several."""
        self.port = 0
        self.tls: ssl.SSLContext | None = None
        """What clients connect with."""
        self.servers: list[uvicorn.Server] = []
        """One for each worker."""
        self._recorder = recorder
        self._clients: list[Client] = []

    @property
    def workers(self) -> list[Proxy]:
        """All proxies: one, but in runs with several workers."""
        return [self.proxy, *self.others]

    @property
    def inflight(self) -> int:
        """Requests with a place."""
        return admission_of(self.proxy).inflight

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return admission_of(self.proxy).waiting

    @property
    def body_bytes(self) -> int:
        """Bytes of bodies that are held."""
        return sum(one.body_budget.held for one in self.workers)

    @property
    def connections(self) -> list[Any]:
        """The protocols of clients' connections."""
        return [one for server in self.servers for one in server.server_state.connections]

    @property
    def open_connections(self) -> int:
        """Connections of clients that count."""
        return sum(one.connections.open for one in self.workers)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The requests of clients that are served."""
        return [task for server in self.servers for task in server.server_state.tasks]

    def look_at_files(self) -> None:
        """Have every worker look at the files of keys and certificates now, twice: what is changing
        is not read.
        """
        for one in [*self.workers, *self.workers]:
            one.credentials.look()
        for other in self.others:  # the message that tells it comes some turns later
            other.credentials.take(self.proxy.credentials.key_values())

    def mark_down(self, engine: FakeEngine, why: str, since: float = 0.0) -> None:
        """Have every worker believe that an engine is down."""
        for one in self.workers:
            one.ledger.mark_down(engine.url, why, since)

    async def drain(self) -> None:
        """Have every worker drain, as at SIGTERM."""
        pairs = zip(self.workers, self.servers, strict=True)
        await asyncio.gather(*(one.drain(server.server_state.tasks) for one, server in pairs))

    def page(self) -> bytes:
        """The page of metrics."""
        if not self.others:
            return self.proxy.metrics.page()
        return page_of(merged(one.metrics.snapshot() for one in self.workers))

    async def client(
        self, *, receive_buffer: int | None = None, address: str = "127.0.0.1"
    ) -> Client:
        """A new connection to the proxy."""
        client = await Client.connect(
            self.port, receive_buffer=receive_buffer, tls=self.tls, address=address
        )
        self._clients.append(client)
        return client

    async def ask(
        self,
        path: str,
        body: object = b"",
        headers: Sequence[tuple[str, str]] = (),
        *,
        method: str = "POST",
    ) -> Answer:
        """One request on a connection of its own, its whole answer."""
        return await self.exchange(request(method, path, body, headers), head_only=method == "HEAD")

    async def exchange(
        self, data: bytes, *, head_only: bool = False, address: str = "127.0.0.1"
    ) -> Answer:
        """Send bytes on a connection of their own, from an address of this machine; return the
        answer.
        """
        client = await self.client(address=address)
        client.send(data)
        answer = await client.answer(head_only=head_only)
        client.close()
        return answer

    async def get(self, path: str, headers: Sequence[tuple[str, str]] = ()) -> Answer:
        """A GET."""
        return await self.ask(path, b"", headers, method="GET")

    async def probe(self) -> None:
        """Have every engine probed and its counters read, now."""
        every = [
            (one, engine) for one in self.workers if leads(one) for engine in one.engines.values()
        ]
        await asyncio.gather(*(proxy.prober.probe(engine, scrape=True) for proxy, engine in every))
        for auditor in {pool.watching.auditor for one in self.workers for pool in one.pools}:
            if isinstance(auditor, AuditorOfAll) and auditor.comparing is not None:
                await auditor.comparing
        await self.told()

    async def flowing(self, engine: FakeEngine) -> None:
        """Wait until the client of an engine gets its events."""
        legs = [one.engines[engine.url].open_legs for one in self.workers]
        await until(lambda: any(one.flowing for one in legs))

    async def told(self) -> None:
        """Wait until each worker knows what the others have found."""
        for _ in range(
            12 if self.others else 0
        ):  # a message is made, sent, taken and answered in some turns of the loop each
            await asyncio.sleep(0)

    def record(self) -> None:
        """See the events of all workers from now on."""
        self.proxy.observers._observers += (self._recorder,)
        for one in self.others:
            one.observers._observers += (self._recorder.of_follower(),)

    def events(self, kind: type[_E]) -> list[_E]:
        """The events of one kind so far."""
        return self._recorder.of(kind)

    async def ended(self, count: int = 1) -> RequestEnded:
        """Wait until so many requests are over; return the report of the last of them."""
        await until(lambda: len(self.events(RequestEnded)) >= count)
        await self.told()
        return self.events(RequestEnded)[count - 1]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name with these labels on the metrics page; 0 where there
        is none.
        """
        return total(self._families(), name, labels)

    def _families(self) -> Iterable[Family]:
        """What the page of metrics is written from: to write and read it takes ten times as
        long.
        """
        if not self.others:
            return self.proxy.metrics.collect()
        return families(merged(one.metrics.snapshot() for one in self.workers))

    def busy(self) -> list[str]:
        """What is not over yet."""
        return [text for proxy in self.workers for text in self._busy(proxy)]

    @staticmethod
    def _busy(proxy: Proxy) -> list[str]:
        own = [(n.url, *n.known_load) for n in proxy.ledger.engines]
        found = [
            f"{url} has {requests} requests, {size} bytes"
            for url, requests, size in own
            if requests
        ]
        found += [f"{url} owes {size} bytes" for url, _, size in own if size]
        found += [
            f"{count} handles {state}"
            for state, (count, _) in proxy.custodian.snapshot().items()
            if count
        ]
        if proxy.custodian.orphans.count or len(proxy.custodian._tasks):
            found.append(repr(proxy.custodian))
        if proxy.admission.inflight or proxy.admission.waiting:
            found.append(repr(proxy.admission))
        return found

    async def settled(self) -> None:
        """Wait until nothing is in flight; then every handle must have ended, once, and no engine
        have crashed.
        """
        books = self.books
        await self.quiet()
        assert not books.unknown, "an engine got a handle that no engine gave out"
        assert not [crash for engine in self.engines for crash in engine.crashes]
        await self.freed()
        assert "held" not in books.endings, books.history
        assert len(self.events(HandleEnded)) == len(books.history), (
            "each handle is ended just once by the proxy"
        )

    async def freed(self) -> None:
        """Wait until no engine holds blocks for another one."""
        try:
            await until(lambda: not self.books.held())
        except TimeoutError:
            raise AssertionError(f"held: {self.books.held()}, of {self.books.history}") from None

    async def disconnect(self) -> None:
        """Have all clients leave, and let nobody come any more."""
        for server in self.servers:
            for listener in server.servers:
                listener.close()
            for connection in list(server.server_state.connections):
                connection.transport.abort()
        for client in self._clients:
            client.close()
        await asyncio.sleep(0)

    def forget_events(self) -> None:
        """Forget the events that have been seen so far."""
        self._recorder.events.clear()

    def forget(self) -> None:
        """Begin anew: forget what has been seen so far."""
        self.forget_events()
        self.books.history.clear()

    async def quiet(self) -> None:
        """Wait until nothing is in flight: no lease open, no handle alive, no task at work."""
        try:
            await until(lambda: not self.busy())
        except TimeoutError:
            raise AssertionError(f"not over: {self.busy()}") from None


def leads(proxy: Proxy) -> bool:
    """Return whether a worker does what one does for all: a proxy that is alone does."""
    return proxy.share.chooses


async def until(condition: Callable[[], object], patience: float = LONG) -> None:
    """Wait until a condition holds; TimeoutError if it does not. It is looked at less often the
    longer it takes.
    """
    begun = time.monotonic()
    while not condition():
        waited = time.monotonic() - begun
        if waited > patience:
            raise TimeoutError
        await asyncio.sleep(min(0.002 + waited / 20, 0.02))


@asynccontextmanager
async def world(
    prefill: int = 1,
    decode: int = 1,
    aggregated: int = 0,
    *,
    anything: int = 0,
    encode: int = 0,
    deadlines: dict[str, float] | None = None,
    limits: dict[str, Any] | None = None,
    auth: dict[str, Any] | None = None,
    before: Callable[[World], None] | None = None,
    probed: bool = True,
    leaves: bool = False,
    strangers: bool = False,
    engine_tls: ssl.SSLContext | None = None,
    client_tls: ssl.SSLContext | None = None,
    adjust: Callable[[Settings], Settings] = lambda settings: settings,
    lease: float = 30.0,
    facts: Mapping[str, Any] | None = None,
    facts_of: Callable[[str], Mapping[str, Any]] = lambda role: {},
    cors: Cors | None = None,
    library: Library | None = None,
    clock: Clock | None = None,
    operator_routes: OperatorRoutes = "everywhere",
) -> AsyncIterator[World]:
    """Run a proxy in front of so many engines; `anything`: of role any; `encode`: encoder engines.

    `before` is called once the engines listen and before they are probed. At the end nothing may be
    in flight, and every handle must have ended just once, unless `leaves` says that the test leaves
    some behind. Engines have exchanged KV before, unless they are `strangers`. `lease`: seconds
    that a prefill engine keeps a prompt's KV. `engine_tls` is what engines are met with,
    `client_tls` what clients connect with; `adjust` has the last word on settings. `facts`: of all
    engines, where they differ from the usual ones; `facts_of`: of those of a role. `library`: where
    tokenizers come from; None: nowhere. `clock`: the proxy's; a test that reaches deadlines passes
    a `ManualClock`. No engine is watched for standing still, unless `adjust` says so: canaries
    would use up scripts. None is compared with its peers: one that fails again and again in a test
    of over ten seconds would be excluded. `operator_routes`: tests ask the clients' port how the
    proxy is doing, also with keys.
    """
    books, recorder = Books(), Recorder()
    roles = (
        ["encode"] * encode
        + ["prefill"] * prefill
        + ["decode"] * decode
        + ["aggregated"] * aggregated
        + ["any"] * anything
    )
    engines = [
        FakeEngine(role, books, lease, tls=engine_tls, **{**(facts or {}), **facts_of(role)})
        for role in roles
    ]
    for engine in engines:
        await engine.listen()
    settings = Settings(
        listen=Listen(cors=cors or Cors(), operator_routes=operator_routes),
        auth=Auth(**(auth or {})),
        pools=(Pool(nodes=tuple(ConfiguredEngine(url=e.url, role=e.role) for e in engines)),),  # type: ignore[arg-type]
        deadlines=msgspec.structs.replace(DEADLINES, **(deadlines or {})),
        limits=Limits(**(limits or {})),
        health=Health(stalled_after=0),
        probes=Probes(interval=3600, scrape_interval=3600),
        outliers=OutlierSettings(interval=0),
    )
    settings, library = adjust(settings), library or Shelf()
    count = workers_for(settings)
    several = (
        Several(count, clock.now if clock is not None else time.monotonic) if count > 1 else None
    )
    shares: list[Share | SoleProcess] = [ALONE] if several is None else [*several.shares]
    proxy, *others = [Proxy.build(settings, library, clock=clock, share=share) for share in shares]
    made = World(proxy, books, engines, recorder)
    made.others = others
    made.record()
    made.tls = client_tls
    if before is not None:
        before(made)
    if not strangers:
        for worker in made.workers:
            worker.custodian.contacts.met = lambda prefill, decode: True  # type: ignore[method-assign]
        for engine in (*made.prefill, *made.anything):
            for other in (*made.decode, *made.aggregated, *made.anything):
                if other is not engine:
                    other.meet(engine)
    if several is not None:
        several.connect(made.workers)
    for worker, share in zip(made.workers, shares, strict=True):
        share.start(worker.tasks)
        if probed:
            worker.start()
    if probed:
        await until(
            lambda: all(node.probed for worker in made.workers for node in worker.ledger.engines)
        )
    servers = [await _serve(worker, made, made.port, together=count > 1) for worker in made.workers]
    made.servers = servers
    try:
        yield made
        if not leaves:
            await made.settled()
    finally:
        await made.disconnect()
        for worker, share in zip(made.workers, shares, strict=True):
            await worker.custodian.settle(0)
            share.stop()
            await worker.stop()
        for engine in engines:
            await engine.close()
        for server in servers:
            if server.server_state.tasks:
                await asyncio.wait(set(server.server_state.tasks), timeout=2)


class _Late:
    """The application of all routes outside the data path, made at its first request: most tests
    never send one.
    """

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            self._app = create_app(self._proxy.front.answers())
        await self._app(scope, receive, send)


async def _serve(
    proxy: Proxy, made: World, port: int = 0, *, together: bool = False
) -> uvicorn.Server:
    """Start uvicorn as the server process does, without its main loop. `together`: others listen at
    the port, too.
    """
    config = uvicorn_config(proxy, _Late(proxy))
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if together:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    made.port = listener.getsockname()[1]
    await server.startup(sockets=[listener])
    return server
