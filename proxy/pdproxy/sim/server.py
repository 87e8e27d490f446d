"""One simulated engine behind HTTP, in the running event loop: the engine, its port, its faults, its life and death.

Owns the process's view: what happens when all of it is killed, stopped, terminated or restarted. Takes no signals; uvicorn's
protocol serves the application, its server class is not needed.
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

from pdproxy.kit.tasks import TaskOwner
from pdproxy.sim.admin import AdminPort
from pdproxy.sim.api.app import create_app
from pdproxy.sim.exchange import Exchanges
from pdproxy.sim.facts import Facts
from pdproxy.sim.faults import Fault, FaultBook, Situation
from pdproxy.sim.journal import Journal, Request
from pdproxy.sim.listener import Listener
from pdproxy.sim.reply import Script
from pdproxy.sim.script import Scripts
from pdproxy.sim.storage import Storage
from pdproxy.sim.transport import SimProtocol, protocol_class
from pdproxy.sim.watched import WatchedEngine

logger = logging.getLogger("pdproxy")

Life = Literal["down", "up", "frozen", "terminated"]
AppFactory = Callable[[WatchedEngine], ASGIApp]

_PATIENCE = 2.0
"""Seconds that what is under way gets to end when everything is closed."""
_THAW = -1


class Faults(FaultBook):
    """The armed faults, and scripts for those who want to write an answer themselves."""

    def __init__(self, chance: int = 0) -> None:
        super().__init__(chance)
        self.scripts = Scripts()
        self.on_change: Callable[[], None] | None = None

    def script(self, *scripts: Script) -> None:
        """Have the next generating requests answered by scripts, one after the other."""
        self.scripts.next.extend(scripts)

    def changed(self) -> None:
        """Tell the server."""
        if self.on_change is not None:
            self.on_change()


class SimServer:
    """One simulated engine on a port: `async with SimServer(facts) as sim`, or `start` and `stop`.

    `port` 0 is any free one; `admin_port` None is none. `faults` are armed from the start. `chance` seeds all that is drawn, by
    the engine (None: never the same) and by faults with a rate. `make_app` makes the application; None: vLLM's API.
    `keep_alive`: seconds that an idle connection is kept. `tls`: the context to be met with, None: plain HTTP.
    `storage`: what it shares with other engines of this process (`shared`, `lmcache-mp`); None: the facts' folder, if any.
    """

    def __init__(
        self,
        facts: Facts | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        faults: Iterable[Fault | str] = (),
        admin_port: int | None = None,
        chance: int | None = None,
        make_app: AppFactory | None = None,
        keep_alive: int = 5,
        tls: ssl.SSLContext | None = None,
        storage: Storage | None = None,
    ) -> None:
        self.facts = facts if facts is not None else Facts()
        self.engine = WatchedEngine(self.facts, chance=chance, storage=storage)
        self.engine.teller.faults = lambda rank: self.faults.due("notice", Situation(rank=rank))
        self.faults = Faults(chance or 0)
        self.scripts = self.faults.scripts
        self.journal = Journal()
        self.crashes: list[str] = []
        """Mistakes in scripts or in the simulator itself."""
        self.connections = 0
        """Connections accepted so far."""
        self.life: Life = "down"
        self._state = ServerState()
        self._connection: type[SimProtocol] = protocol_class(self)
        self._config = uvicorn.Config(
            Exchanges((make_app or create_app)(self.engine), self),
            http=self._connection,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=keep_alive,
        )
        self._config.load()
        self._listener = Listener(host, port, self._protocol, tls)
        self._admin = AdminPort(self, host, admin_port) if admin_port is not None else None
        self._tasks = TaskOwner("simulated engine")
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._changing = asyncio.Lock()
        for fault in faults:
            self.faults.add(fault)
        self.faults.on_change = self._refuse_or_not

    # -- what is known of it

    @property
    def port(self) -> int:
        """The port it listens on; 0 until it has started if any was asked for."""
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
        """Whether connections are accepted, be it by the kernel alone."""
        return self._listener.listening

    @property
    def frozen(self) -> bool:
        """Whether it is stopped."""
        return self.life == "frozen"

    @property
    def requests(self) -> deque[Request]:
        """The generating requests it has received."""
        return self.journal.requests

    @property
    def releases(self) -> deque[Request]:
        """The handles given back here."""
        return self.journal.releases

    # -- start and stop

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        await self.stop()

    async def start(self) -> None:
        """Listen, also on the admin port.

        Raises:
            OSError: a port is taken, or the address is none of this machine's.
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
        """End everything and give the ports back. Ends within some seconds whatever is under way."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        await self._tasks.settle(0)  # before the rest: one of them may be a restart
        await self.kill()
        if self._admin is not None:
            await self._admin.stop()
        self._listener.give_up()

    async def _come_up(self) -> None:
        await self.engine.start()
        self.engine.thaw()
        self.life = "up"
        self._refuse_or_not()
        await self._listener.take()

    # -- the life of the process

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
        tasks = {task for task in self._state.tasks if task is not asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_PATIENCE)

    async def restart(self, down: float = 0.0) -> None:
        """Kill it and start it anew on the same port: a new engine id, empty memory; the port refuses for `down` seconds.

        Raises:
            OSError: somebody else has the port by now.
        """
        async with self._changing:
            await self._kill()
            if down:
                await asyncio.sleep(down)
            self._listener.open()
            await self._come_up()

    async def freeze(self) -> None:
        """SIGSTOP: sockets stay open, the kernel accepts connections, nothing answers."""
        self.freeze_now(0.0)

    def freeze_now(self, seconds: float) -> None:
        """Freeze; thaw after some seconds, 0: when told to."""
        if self.life != "up":
            return
        self.life = "frozen"
        self._listener.leave()
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
            await self._listener.take()

    async def terminate(self) -> None:
        """SIGTERM: the port refuses, idle connections are closed, open answers fall silent and stay open."""
        async with self._changing:
            if self.life not in ("up", "frozen"):
                return
            self.life = "terminated"
            self._listener.close()
            for connection in self._open():
                if connection.busy:
                    connection.wire.mute()
                else:
                    connection.wire.close()
            await self.engine.stop()

    def stop_soon(self, kind: str, seconds: float) -> None:
        """Have a fault kill, restart or terminate it, from within one of its own requests."""
        match kind:
            case "kill":
                self._tasks.spawn(self.kill(), kind)
            case "restart":
                self._tasks.spawn(self.restart(seconds), kind)
            case _:
                self._tasks.spawn(self.terminate(), kind)

    # -- connections

    def _protocol(self) -> asyncio.Protocol:
        return self._connection(self._config, self._state, {})

    def _open(self) -> list[SimProtocol]:
        return [one for one in self._state.connections if isinstance(one, SimProtocol)]

    def connected(self) -> None:
        """Count a connection."""
        self.connections += 1

    def _refuse_or_not(self) -> None:
        """Close or open the port as the armed faults say."""
        if self.life != "up":
            return
        refusing = [one for one in self.faults.armed.values() if one.fault.kind == "refuse"]
        for one in refusing:
            seconds = float(one.fault.args["seconds"])
            if seconds and one.number not in self._timers:
                self._later(one.number, seconds, partial(self.faults.remove, one.number))
        if refusing and self._listener.listening:
            self._listener.close()
            for connection in self._open():
                if not connection.busy:
                    connection.drop()
        elif not refusing and not self._listener.listening:
            self._listener.open()
            self._tasks.spawn(self._listener.take(), "listen")

    def _later(self, key: int, seconds: float, what: Callable[[], object]) -> None:
        self._timers[key] = asyncio.get_running_loop().call_later(seconds, what)
