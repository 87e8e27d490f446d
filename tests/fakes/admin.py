"""The admin API of a world's proxy, as an operator reaches it."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from pdproxy.app.admin import AdminServer, AdminSocket, prompts_of, recent_requests
from pdproxy.observe.formats import make_formatter
from pdproxy.observe.lines import LineWriter
from pdproxy.observe.logs import Log
from pdproxy.observe.recent import Recent
from pdproxy.settings.listen import AdminPlace
from pdproxy.workers.share import WorkerShare
from tests.fakes.client import Answer, exchange, request
from tests.fakes.ports import free_port
from tests.fakes.world import World, until

BASE = "/admin/v1"
JSON = ("content-type", "application/json")


class Api:
    """Asks the API at a port."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def ask(
        self, method: str, path: str, body: object = b"", headers: Sequence[tuple[str, str]] = ()
    ) -> Answer:
        """One request on a connection of its own."""
        if isinstance(body, (Mapping, list)):
            body, headers = json.dumps(body).encode(), [JSON, *headers]
        has_host = any(name.lower() == "host" for name, _ in headers)
        host = b"" if has_host else b"host: 127.0.0.1:%d\r\n" % self.port
        return await exchange(
            self.port, request(method, path, body, headers).replace(b"host: proxy\r\n", host, 1)
        )

    async def get(self, path: str) -> Any:
        """The JSON of a GET."""
        answer = await self.ask("GET", f"{BASE}{path}")
        assert answer.status == 200, answer.body
        return answer.json

    async def post(self, path: str, body: object = b"") -> Answer:
        """A POST."""
        return await self.ask("POST", f"{BASE}{path}", body)

    async def delete(self, path: str) -> Answer:
        """A DELETE."""
        return await self.ask("DELETE", f"{BASE}{path}")


class Admin(Api):
    """Asks the API of a world's proxy. `requests`: of each worker."""

    def __init__(
        self, server: AdminServer, requests: Sequence[Recent], port: int, log: Log
    ) -> None:
        super().__init__(port)
        self.server = server
        self.feed = server.feed
        self.requests = requests
        self.log = log

    @property
    def running(self) -> int:
        """How many requests run, in all workers."""
        return sum(len(one.running) for one in self.requests)


@asynccontextmanager
async def admin(w: World) -> AsyncIterator[Admin]:
    """Serve a world's admin API on a port of the loopback."""
    port = free_port()
    at = AdminSocket(AdminPlace(None, "127.0.0.1", port))
    log = Log(LineWriter(io.StringIO(), str), make_formatter("text"), shows_requests=True)
    server = AdminServer(w.proxy, at, log)
    requests = [server.recent]
    for worker in w.others:
        requests.append(recent := recent_requests(worker))
        share = worker.share
        assert isinstance(share, WorkerShare)
        share.answer_operators(recent, prompts_of(worker), worker.now)
    w.proxy.tasks.keep(server.run, "admin API")
    await until(lambda: server.serving)
    try:
        yield Admin(server, requests, port, log)
    finally:
        at.close()
        log.close()
