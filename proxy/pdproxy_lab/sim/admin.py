"""The admin port of a simulated engine: arm faults, simulate signals, read the engine's state. It
is not part of vLLM's API.

It has its own listener, so an engine that is frozen or killed can be restarted through it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sized
from typing import Any, Protocol

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from pdproxy_lab.sim.engine import SimEngine
from pdproxy_lab.sim.faults.book import Armed, FaultBook, fault_of
from pdproxy_lab.sim.faults.kind import FaultError
from pdproxy_lab.sim.listener import Listener

_CANCEL_TIMEOUT = 1.0
"""Seconds that cancelled requests get to end."""


class ControlledEngine(Protocol):
    """The simulated engine that the port controls."""

    connections: int

    @property
    def life(self) -> str:
        """down, up, frozen or terminated."""

    @property
    def engine(self) -> SimEngine:
        """The engine."""

    @property
    def faults(self) -> FaultBook:
        """The armed faults."""

    @property
    def listening(self) -> bool:
        """Whether its own port accepts connections."""

    @property
    def requests(self) -> Sized:
        """The generating requests that it has received."""

    async def kill(self) -> None:
        """SIGKILL."""

    async def freeze(self) -> None:
        """SIGSTOP."""

    async def thaw(self) -> None:
        """SIGCONT."""

    async def freeze_core(self) -> None:
        """SIGSTOP of the engine core alone."""

    async def thaw_core(self) -> None:
        """SIGCONT of the engine core."""

    async def restart(self) -> None:
        """SIGKILL, and a new process."""

    async def terminate(self) -> None:
        """SIGTERM."""


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body) + b"\n", status, media_type="application/json")


def _shown(armed: Armed) -> dict[str, Any]:
    fault = {
        key: value for key, value in msgspec.to_builtins(armed.fault).items() if value is not None
    }
    return {"id": armed.number, **fault, "left": armed.left, "fired": armed.fired}


class _Admin:
    def __init__(self, sim: ControlledEngine) -> None:
        self._sim = sim
        self._actions: dict[str, Callable[[], Awaitable[None]]] = {
            "kill": sim.kill,
            "freeze": sim.freeze,
            "thaw": sim.thaw,
            "freeze_core": sim.freeze_core,
            "thaw_core": sim.thaw_core,
            "restart": sim.restart,
            "terminate": sim.terminate,
            "expire_leases": self._expire_leases,
            "kill_core": self._kill_core,
        }

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/faults", self._list, methods=["GET"]),
                Route("/faults", self._arm, methods=["POST"]),
                Route("/faults", self._disarm_all, methods=["DELETE"]),
                Route("/faults/{number:int}", self._disarm, methods=["DELETE"]),
                Route("/state", self._state, methods=["GET"]),
                *(
                    Route(f"/{name}", self._act, methods=["POST"], name=name)
                    for name in self._actions
                ),
            ],
            exception_handlers={HTTPException: self._refused},
        )

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _json(
            {"error": f"{request.method} {request.url.path}: {error.detail}"}, error.status_code
        )

    async def _list(self, request: Request) -> Response:
        book = self._sim.faults
        return _json(
            {"armed": [_shown(one) for one in book.armed.values()], "happened": dict(book.happened)}
        )

    async def _arm(self, request: Request) -> Response:
        try:
            given = msgspec.json.decode(await request.body())
        except msgspec.DecodeError as error:
            return _json({"error": f"the body is not JSON: {error}"}, 400)
        if not isinstance(given, dict):
            return _json({"error": f"the body must be an object, got {given!r}"}, 400)
        try:
            number = self._sim.faults.add(fault_of(given))
        except FaultError as error:
            return _json({"error": str(error)}, 400)
        return _json(_shown(self._sim.faults.armed[number]), 201)

    async def _disarm_all(self, request: Request) -> Response:
        self._sim.faults.clear()
        return Response(status_code=204)

    async def _disarm(self, request: Request) -> Response:
        number = request.path_params["number"]
        if not self._sim.faults.remove(number):
            return _json({"error": f"no fault {number} is armed"}, 404)
        return Response(status_code=204)

    async def _act(self, request: Request) -> Response:
        try:
            await self._actions[request.url.path.removeprefix("/")]()
        except OSError as error:
            return _json({"error": f"{request.url.path}: {error.strerror or error}"}, 500)
        return await self._state(request)

    async def _expire_leases(self) -> None:
        self._sim.engine.expire_leases()

    async def _kill_core(self) -> None:
        self._sim.engine.kill_core()

    async def _state(self, request: Request) -> Response:
        sim = self._sim
        ranks = sim.engine.rank_stats
        return _json(
            {
                "life": sim.life,
                "listening": sim.listening,
                "engine_id": sim.engine.engine_id,
                "dead": sim.engine.dead,
                "core_frozen": sim.engine.stops.any,
                "running": sum(stats.running for stats in ranks),
                "waiting": sum(stats.waiting for stats in ranks),
                "kv_cache_usage": max(stats.kv_cache_usage for stats in ranks),
                "notices": dict(sim.engine.notice_sender.counts),
                "handles": {name: round(left, 3) for name, left in sim.engine.handles.items()},
                "awaited": {name: round(past, 3) for name, past in sim.engine.awaited.items()},
                "registrations": sim.engine.registrations,
                "ec_port": sim.engine.ec_port,
                "encoder": {
                    "inputs": sum(stats.encoder_inputs for stats in ranks),
                    "loaded": sum(stats.encoder_outputs_loaded for stats in ranks),
                    "stored": sum(stats.encoder_outputs_stored for stats in ranks),
                },
                "requests": len(sim.requests),
                "connections": sim.connections,
            }
        )


class AdminPort:
    """The admin application of one engine on a port of its own."""

    def __init__(self, sim: ControlledEngine, host: str, port: int) -> None:
        self._state = ServerState()
        self._config = uvicorn.Config(
            _Admin(sim).app(),
            http=HttpToolsProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
        )
        self._config.load()
        self._listener = Listener(host, port, self._protocol)

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._listener.url

    def _protocol(self) -> asyncio.Protocol:
        return HttpToolsProtocol(self._config, self._state, {})

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is taken.
        """
        self._listener.open()
        await self._listener.accept()

    async def stop(self) -> None:
        """Close everything."""
        self._listener.release()
        for connection in list(self._state.connections):
            connection.transport.abort()
        tasks = {task for task in self._state.tasks if task is not asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_TIMEOUT)
