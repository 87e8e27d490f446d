"""The bootstrap server of a simulated prefill engine with Mooncake: which workers it has, over
HTTP.

Owns the registrations and the port. As in vLLM 0.32.0 (`mooncake/mooncake_utils.py`), `/query`
answers with what is registered by now: nothing or a part while the engine starts. A worker that
registers twice must name the same address.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, HTTPException, Response
from pydantic import BaseModel
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from pdproxy_lab.sim.frame_port import LinkError
from pdproxy_lab.sim.network import Network

_CANCEL_TIMEOUT = 1.0
"""Seconds that cancelled requests get to end."""
_MAX_ANSWER = 1 << 20
_ATTEMPTS = 3
_PAUSE = 0.1
"""Seconds between two attempts of a decode engine to reach a bootstrap server."""


class Registration(BaseModel):
    """A worker of a prefill engine."""

    engine_id: str
    dp_rank: int
    tp_rank: int
    pp_rank: int
    addr: str


Workers = dict[int, dict[str, Any]]
"""By data-parallel rank: `engine_id`, and `worker_addr` by tensor-parallel and pipeline-parallel
rank.
"""


class Bootstrap:
    """One bootstrap server. `answer`: bytes that `/query` answers with instead of the truth."""

    def __init__(self, host: str, port: int, network: Network) -> None:
        self.workers: Workers = {}
        self.answer: bytes | None = None
        self._state = ServerState()
        self._awake = asyncio.Event()
        self._awake.set()
        app = FastAPI()
        app.post("/register")(self._register)
        app.get("/query")(self._query)
        self._config = uvicorn.Config(
            app,
            http=HttpToolsProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
        )
        self._config.load()
        self._listener = network.listener(
            host, port, lambda: HttpToolsProtocol(self._config, self._state, {})
        )

    @property
    def url(self) -> str:
        """Where it listens: what `remote_bootstrap_addr` must be."""
        return self._listener.url

    async def open(self) -> None:
        """Listen, with no registrations; on the same port as before.

        Raises:
            OSError: the port is taken.
        """
        self.workers = {}
        self._awake.set()
        self._listener.open()
        await self._listener.accept()

    async def close(self) -> None:
        """Refuse connections and drop those that are open. The port stays reserved."""
        self._listener.close()
        for connection in list(self._state.connections):
            connection.transport.abort()
        tasks = {task for task in self._state.tasks if task is not asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_TIMEOUT)

    def release(self) -> None:
        """Release the port, after `close`."""
        self._listener.release()

    def freeze(self) -> None:
        """Accept connections and questions, answer none."""
        self._awake.clear()

    def thaw(self) -> None:
        """Answer again, also what was asked while frozen."""
        self._awake.set()

    def register(self, one: Registration) -> None:
        """Take note of a worker.

        Raises:
            HTTPException: it is registered at another address, or its rank has another engine id.
        """
        rank = self.workers.setdefault(one.dp_rank, {"engine_id": one.engine_id, "worker_addr": {}})
        if rank["engine_id"] != one.engine_id:
            text = (
                f"Engine ID mismatch for dp_rank={one.dp_rank}: expected {rank['engine_id']}, "
                f"got {one.engine_id}"
            )
            raise HTTPException(400, text)
        known = rank["worker_addr"].setdefault(one.tp_rank, {})
        if known.setdefault(one.pp_rank, one.addr) != one.addr:
            raise HTTPException(
                400,
                f"Worker with dp_rank={one.dp_rank}, tp_rank={one.tp_rank}, "
                f"pp_rank={one.pp_rank} is already registered at "
                f"{known[one.pp_rank]}, but still want to register at {one.addr}",
            )

    async def _register(self, payload: Registration) -> dict[str, str]:
        await self._awake.wait()
        self.register(payload)
        return {"status": "ok"}

    async def _query(self) -> Response:
        await self._awake.wait()
        body = msgspec.json.encode(self.workers) if self.answer is None else self.answer
        return Response(body, media_type="application/json")


async def query(address: str, deadline: float) -> dict[str, str]:
    """Return the address of a worker by engine id, as a decode engine learns it. `deadline`:
    seconds for each of three attempts.

    Raises:
        LinkError: the server is not there, or its answer can't be read.
    """
    host, _, port = address.removeprefix("http://").rpartition(":")
    for attempt in range(_ATTEMPTS):
        try:
            async with asyncio.timeout(deadline):
                body = await _get(host, int(port))
            break
        except (OSError, EOFError, TimeoutError) as error:
            if attempt == _ATTEMPTS - 1:
                raise LinkError(str(error)) from error
            await asyncio.sleep(_PAUSE)
        except (ValueError, OverflowError) as error:
            raise LinkError(str(error)) from error
    try:
        ranks: Workers = msgspec.json.decode(body, type=dict[int, dict[str, Any]])
        return {
            one["engine_id"]: next(iter(next(iter(one["worker_addr"].values())).values()))
            for one in ranks.values()
        }
    except (msgspec.MsgspecError, LookupError, StopIteration, AttributeError, TypeError) as error:
        raise LinkError(f"not what a bootstrap server answers: {error}") from error


async def _get(host: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(host.strip("[]"), port)
    try:
        writer.write(b"GET /query HTTP/1.1\r\nhost: bootstrap\r\nconnection: close\r\n\r\n")
        answer = await reader.read(_MAX_ANSWER)
        while more := await reader.read(_MAX_ANSWER):
            answer += more
        head, _, body = answer.partition(b"\r\n\r\n")
        if b" 200 " not in head[:20]:
            raise EOFError(head[:20].decode("latin-1"))
        return body
    finally:
        writer.close()
