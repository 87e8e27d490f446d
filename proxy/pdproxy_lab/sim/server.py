"""One simulated engine behind HTTP, in the running event loop: the engine, its port, its faults,
its states.

Owns the state of the simulated process: what happens when it is killed, stopped, terminated or
restarted. It takes no signals. uvicorn's protocol serves the application; uvicorn's server class is
not used.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Literal, Self

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from pdproxy.kit.ordered_set import OrderedSet
from pdproxy.kit.tasks import TaskOwner
from pdproxy_lab.sim.admin import AdminPort
from pdproxy_lab.sim.api.app import create_app
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.fault_middleware import FaultMiddleware
from pdproxy_lab.sim.faults.book import FaultBook, PlannedFault, Situation
from pdproxy_lab.sim.journal import Journal, Request
from pdproxy_lab.sim.network import Network, Sockets
from pdproxy_lab.sim.reply import Script
from pdproxy_lab.sim.script import Scripts
from pdproxy_lab.sim.storage import Storage
from pdproxy_lab.sim.transport import SimProtocol, protocol_class
from pdproxy_lab.sim.watched import WatchedEngine
from pdproxy_lab.sim.websocket import SimWebSocket

logger = logging.getLogger("pdproxy")

Life = Literal["down", "up", "frozen", "terminated"]
AppFactory = Callable[[WatchedEngine], ASGIApp]

_CANCEL_TIMEOUT = 2.0
"""Seconds that cancelled requests get to end when the process is killed."""
_DEFECTIVE = 100
_THAW, _THAW_CORE = -1, -2
"""The keys of the timers that thaw; those of faults have the fault's number."""


class Faults(FaultBook):
    """The armed faults, and scripts that write answers in place of the engine."""

    def __init__(self, chance: int = 0) -> None:
        super().__init__(chance)
        self.scripts = Scripts()
        self.on_change: Callable[[], None] | None = None

    def script(self, *scripts: Script) -> None:
        """Let scripts answer the next generating requests, one each."""
        self.scripts.next.extend(scripts)

    def changed(self) -> None:
        """Call the server."""
        if self.on_change is not None:
            self.on_change()


class SimServer:
    """One simulated engine on a port: `async with SimServer(facts) as sim`, or `start` and `stop`.

    `port` 0 is any free one; `admin_port` None is none. `faults` are armed from the start. `chance`
    seeds all draws, those of the engine (None: different in each run) and those of faults.
    `make_app` makes the application; None: vLLM's API. `keep_alive`: seconds that an idle
    connection is kept. `tls`: the context of its connections, None: plain HTTP. `storage`: what it
    shares with other engines of this process (`shared`, `lmcache-mp`); None: the facts' folder, if
    any. `network`: where its ports are; None: on this machine, as the admin port always is.
    """

    def __init__(
        self,
        facts: SimFacts | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        faults: Iterable[PlannedFault | str] = (),
        admin_port: int | None = None,
        chance: int | None = None,
        make_app: AppFactory | None = None,
        keep_alive: int = 5,
        tls: ssl.SSLContext | None = None,
        storage: Storage | None = None,
        network: Network | None = None,
    ) -> None:
        self.facts = facts if facts is not None else SimFacts()
        self.engine = WatchedEngine(self.facts, chance=chance, storage=storage, network=network)
        self.engine.notice_sender.faults = lambda rank: self.faults.due(
            "notice", Situation(rank=rank)
        )
        self.engine.kv_events.faults = lambda moment, rank: self.faults.due(
            moment, Situation(rank=rank)
        )
        self.faults = Faults(chance or 0)
        self.scripts = self.faults.scripts
        self.journal = Journal()
        self.crashes: list[str] = []
        """Mistakes in scripts or in the simulator itself."""
        self.defective: deque[str] = deque(maxlen=_DEFECTIVE)
        """The last bodies that it got and that no sender can have meant: as of `Request.defect`."""
        self.websocket: ASGIApp | None = None
        """What serves WebSockets in place of the application, None: nothing."""
        self.connections = 0
        """Connections accepted so far."""
        self.life: Life = "down"
        self._state = ServerState()
        self._state.connections, self._state.tasks = OrderedSet(), OrderedSet()  # type: ignore[assignment]
        self._connection: type[SimProtocol] = protocol_class(self)
        self._config = uvicorn.Config(
            FaultMiddleware((make_app or create_app)(self.engine), self),
            http=self._connection,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws=SimWebSocket,
            proxy_headers=False,
            timeout_keep_alive=keep_alive,
        )
        self._config.load()
        self._listener = (network or Sockets()).listener(host, port, self._protocol, tls)
        self._admin = AdminPort(self, host, admin_port) if admin_port is not None else None
        self._tasks = TaskOwner("simulated engine")
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._changing = asyncio.Lock()
        for fault in faults:
            self.faults.add(fault)
        self.faults.on_change = self._open_or_close_port

    # -- what it is

    @property
    def port(self) -> int:
        """The port it listens on; if any free one was asked for: 0 until it has started."""
        return self._listener.port

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._listener.url

    @property
    def admin_url(self) -> str | None:
        """Where the admin port listens."""
        return self._admin.url if self._admin is not None else None

    @property
    def listening(self) -> bool:
        """Whether connections are accepted, also when only the kernel does."""
        return self._listener.listening

    @property
    def frozen(self) -> bool:
        """Whether it is stopped."""
        return self.life == "frozen"

    @property
    def requests(self) -> deque[Request]:
        """The generating requests that it has received."""
        return self.journal.requests

    @property
    def releases(self) -> deque[Request]:
        """The requests that released a handle here."""
        return self.journal.releases

    # -- start and stop

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop."""
        await self.stop()

    async def start(self) -> None:
        """Listen, also on the admin port.

        Raises:
            OSError: a port is taken, or the address does not belong to this machine.
        """
        try:
            self._listener.open()
            if self._admin is not None:
                await self._admin.start()
            await self._come_up()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End everything and release the ports. Returns within some seconds in every case."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        await self._tasks.settle(0)  # first: one of them may be a restart
        await self.kill()
        if self._admin is not None:
            await self._admin.stop()
        self.engine.release()
        self._listener.release()

    async def _come_up(self) -> None:
        self.engine.http_address = f"{self._listener.host}:{self._listener.port}"
        await self.engine.start()
        self.engine.thaw()
        self.life = "up"
        self._open_or_close_port()
        await self._listener.accept()

    # -- the state of the process

    async def kill(self) -> None:
        """SIGKILL: the kernel closes all sockets at once, the port refuses, the memory is gone."""
        async with self._changing:
            await self._kill()

    async def _kill(self) -> None:
        self.life = "down"
        self._listener.close()
        for connection in self._open():
            connection.drop()
        await self.engine.stop()
        tasks = [task for task in self._state.tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_TIMEOUT)

    async def restart(self, down: float = 0.0) -> None:
        """Kill it and start it again on the same port: a new engine id, empty memory; the port
        refuses for `down` seconds.

        Raises:
            OSError: another process has the port by now.
        """
        async with self._changing:
            await self._kill()
            if down:
                await asyncio.sleep(down)
            self._listener.open()
            await self._come_up()

    async def restart_api(self, down: float = 0.0) -> None:
        """Kill the API server alone and start it again after `down` seconds: all connections end,
        the port refuses meanwhile.

        The engine core lives on, and goes on with KV that it has begun to read.
        """
        async with self._changing:
            if self.life != "up":
                return
            self._listener.close()
            for connection in self._open():
                connection.drop()
            if down:
                await asyncio.sleep(down)
            self._open_or_close_port()

    async def freeze(self) -> None:
        """SIGSTOP: sockets stay open, the kernel accepts connections, nothing answers."""
        self.freeze_now(0.0)

    def freeze_now(self, seconds: float) -> None:
        """Freeze; thaw after some seconds, 0: only by `thaw`."""
        if self.life != "up":
            return
        self.life = "frozen"
        self._listener.stop_accepting()
        self.engine.freeze()
        for connection in self._open():
            connection.wire.hold()
        if seconds:
            self._later(_THAW, seconds, self._spawn_thaw)

    def _spawn_thaw(self) -> None:
        self._tasks.spawn(self.thaw(), "thaw")

    async def thaw(self) -> None:
        """SIGCONT: go on after `freeze`."""
        async with self._changing:
            if self.life != "frozen":
                return
            self.life = "up"
            if (timer := self._timers.pop(_THAW, None)) is not None:
                timer.cancel()
            self.engine.thaw()
            for connection in self._open():
                connection.wire.release()
            await self._listener.accept()

    async def freeze_core(self) -> None:
        """SIGSTOP of the engine core alone: the API server answers what it can answer without
        it.
        """
        self.freeze_core_now(0.0, None)

    def freeze_core_now(self, seconds: float, rank: int | None) -> None:
        """Freeze the engine core, or that of one rank; thaw after some seconds, 0: only by
        `thaw_core`. A rank that is not there is not stopped.
        """
        if self.life != "up" or (rank is not None and rank >= self.facts.data_parallel_size):
            return
        self.engine.freeze(rank)
        if seconds:
            self._later(_THAW_CORE, seconds, self.engine.thaw)

    async def thaw_core(self) -> None:
        """SIGCONT of the engine core."""
        if (timer := self._timers.pop(_THAW_CORE, None)) is not None:
            timer.cancel()
        if self.life == "up":
            self.engine.thaw()

    async def terminate(self) -> None:
        """SIGTERM: the port refuses, idle connections are closed, open answers send nothing more
        and stay open.
        """
        async with self._changing:
            if self.life not in ("up", "frozen"):
                return
            self.life = "terminated"
            self._listener.close()
            for connection in self._open():
                if connection.busy:
                    connection.wire.hold_output()
                else:
                    connection.wire.close()
            await self.engine.stop()

    def kill_soon(self) -> None:
        """Kill it from within one of its own requests."""
        self._tasks.spawn(self.kill(), "kill")

    def terminate_soon(self) -> None:
        """Terminate it from within one of its own requests."""
        self._tasks.spawn(self.terminate(), "terminate")

    def restart_soon(self, down: float) -> None:
        """Restart it from within one of its own requests."""
        self._tasks.spawn(self.restart(down), "restart")

    # -- requests and connections

    def got_defective(self, defect: str) -> None:
        """Keep what is wrong with a body."""
        self.defective.append(defect)

    def _protocol(self) -> asyncio.Protocol:
        return self._connection(self._config, self._state, {})

    def _open(self) -> list[SimProtocol | SimWebSocket]:
        kinds = SimProtocol, SimWebSocket
        return [one for one in self._state.connections if isinstance(one, kinds)]

    def connected(self) -> None:
        """Count a connection."""
        self.connections += 1

    def _open_or_close_port(self) -> None:
        """Close the port while a fault is armed that closes it, else open it."""
        if self.life != "up":
            return
        closing = self.faults.closing_port()
        for one in closing:
            seconds = float(one.fault.args["seconds"])
            if seconds and one.number not in self._timers:
                self._later(one.number, seconds, partial(self.faults.remove, one.number))
        if closing and self._listener.listening:
            self._listener.close()
            for connection in self._open():
                if not connection.busy:
                    connection.drop()
        elif not closing and not self._listener.listening:
            self._listener.open()
            self._tasks.spawn(self._listener.accept(), "listen")

    def _later(self, key: int, seconds: float, what: Callable[[], object]) -> None:
        self._timers[key] = asyncio.get_running_loop().call_later(seconds, what)
