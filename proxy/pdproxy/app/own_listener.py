"""A listener besides that of clients, in the same event loop: for operators, or for engines that
post. Owns its connections.

Their peers share nothing fairly and send little: so most bounds are constants.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from pdproxy.kit.clock import Clock
from pdproxy.observe.events import Observers
from pdproxy.serving.access.clients import Clients
from pdproxy.web.connection_bounds import ConnectionBounds
from pdproxy.web.connections import Connections
from pdproxy.web.slow_readers import SlowReaderPolicy
from pdproxy.web.unread_answers import UnreadAnswers

MAX_HEAD, HEAD_SECONDS, BODY_SECONDS = 16_384, 10.0, 10.0
"""Bytes and seconds of a request's head, seconds of its body."""


def own_bounds(
    clock: Clock, observers: Observers, *, connections: int, write_seconds: float, max_unread: int
) -> ConnectionBounds:
    """Return the bounds of such a listener's connections, of which so many may be open.

    `write_seconds`: for which an answer may stay unread; `max_unread`: bytes of all answers that
    are not read yet.
    """
    clients = Clients()
    return ConnectionBounds(
        HEAD_SECONDS,
        BODY_SECONDS,
        MAX_HEAD,
        SlowReaderPolicy(0, write_seconds, clock, clients, observers, lambda _: False),
        clients,
        Connections(connections, observers),
        UnreadAnswers(max_unread, observers),
    )


class OwnListener:
    """Serves an application. `http`: makes its connections, for uvicorn; `keep_alive`: seconds for
    which an idle one is kept.
    """

    def __init__(self, app: ASGIApp, http: type[asyncio.Protocol], *, keep_alive: int) -> None:
        self._config = uvicorn.Config(
            app,
            http=http,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            ws="none",
            timeout_keep_alive=keep_alive,
        )
        self._state = ServerState()

    def __repr__(self) -> str:
        return f"<OwnListener {len(self._state.connections)} connections>"

    def protocol(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        config = self._config
        if not config.loaded:
            config.load()
        make = config.http_protocol_class
        made = make(
            config=config, server_state=self._state, app_state={}, _loop=asyncio.get_running_loop()
        )  # type: ignore[call-arg]
        assert isinstance(made, asyncio.Protocol)
        return made

    @asynccontextmanager
    async def serving(self, listening: socket.socket | None) -> AsyncIterator[None]:
        """Take connections from a listening socket, which stays open; None: others bring them. At
        the end they are aborted.
        """
        loop = asyncio.get_running_loop()
        server: asyncio.Server | None = None
        if listening is not None:
            make = (
                loop.create_unix_server
                if listening.family == socket.AF_UNIX
                else loop.create_server
            )
            server = await make(self.protocol, sock=listening.dup())  # the server closes its own
        try:
            yield
        finally:
            if server is not None:
                server.close()
            for connection in list(self._state.connections):
                connection.transport.abort()
