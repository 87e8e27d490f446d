"""The listener to which engines post notices. Owns its socket, its connections, and their bounds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

import uvicorn
from uvicorn.server import ServerState

from pdproxy.app.sockets import BoundBefore, BoundHere, Place
from pdproxy.kit.clock import Clock
from pdproxy.observe.events import Observers
from pdproxy.serving.access.clients import Clients
from pdproxy.web.body_budget import BodyBudget
from pdproxy.web.connection_bounds import ConnectionBounds
from pdproxy.web.connections import Connections
from pdproxy.web.notices import notice_app, notice_protocol
from pdproxy.web.slow_readers import SlowReaderPolicy
from pdproxy.web.unread_answers import UnreadAnswers
from pdproxy.wire.notices import Notice

MAX_CONNECTIONS = 1024
"""Of engines, at once: each rank has one."""
MAX_HEAD, HEAD_SECONDS, BODY_SECONDS, WRITE_SECONDS = 16_384, 10.0, 10.0, 10.0
"""Bytes and seconds of a head, seconds of a body, seconds for which an answer may stay unread."""
MAX_HELD = 32 << 20
"""Bytes of bodies that are not complete, of all connections. One has 1 MiB at most, and 100 bytes mostly."""
MAX_UNREAD = 1 << 20
"""Bytes of answers that are not read yet."""


class PostedNotices:
    """Takes what engines post. `read` returns the notices of a body, None if it is none; `take` gets each of them."""

    def __init__(
        self,
        read: Callable[[bytes], Sequence[Notice] | None],
        take: Callable[[Notice], None],
        clock: Clock,
        observers: Observers,
    ) -> None:
        clients = Clients()
        slow = SlowReaderPolicy(0, WRITE_SECONDS, clock, clients, observers, lambda _: False)
        bounds = ConnectionBounds(
            HEAD_SECONDS,
            BODY_SECONDS,
            MAX_HEAD,
            slow,
            clients,
            Connections(MAX_CONNECTIONS, observers),
            UnreadAnswers(MAX_UNREAD, observers),
        )
        self.budget = BodyBudget(MAX_HELD, observers)
        self._config = uvicorn.Config(
            notice_app(read, take),
            http=notice_protocol(bounds, observers, self.budget),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            ws="none",
            timeout_keep_alive=75,
        )
        self._state = ServerState()
        self._listener: socket.socket | None = None

    def __repr__(self) -> str:
        return f"<PostedNotices {self.budget!r}>"

    def bind(self, sockets: BoundHere | BoundBefore, place: Place) -> None:
        """Bind the socket.

        Raises:
            SettingsError: the address can't be bound.
        """
        self._listener = sockets.listener(place)

    async def run(self) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        listener = self._listener
        server = None if listener is None else await loop.create_server(self.protocol, sock=listener.dup())
        try:
            await loop.create_future()
        finally:
            if server is not None:
                server.close()
            for connection in list(self._state.connections):
                connection.transport.abort()

    def protocol(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        config = self._config
        if not config.loaded:
            config.load()
        make = config.http_protocol_class
        made = make(config=config, server_state=self._state, app_state={}, _loop=asyncio.get_running_loop())  # type: ignore[call-arg]
        assert isinstance(made, asyncio.Protocol)
        return made

    def close(self) -> None:
        """Close the socket."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
