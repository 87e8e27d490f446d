"""The listener to which engines post notices. Owns its socket, and the bounds of what is posted."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from pdproxy.app.own_listener import OwnListener, own_bounds
from pdproxy.app.sockets import AddressToBind, Sockets
from pdproxy.kit.clock import Clock
from pdproxy.observe.events import Observers
from pdproxy.web.body_budget import BodyBudget
from pdproxy.web.notices import notice_app, notice_protocol
from pdproxy.wire.notices import Notice

MAX_CONNECTIONS = 1024
"""Of engines, at once: each rank has one."""
WRITE_SECONDS, KEEP_ALIVE = 10.0, 75
"""Seconds for which an answer may stay unread, and for which an idle connection is kept."""
MAX_HELD = 32 << 20
"""Bytes of bodies that are not complete, of all connections. One has 1 MiB at most, and 100 bytes
mostly.
"""
MAX_UNREAD = 1 << 20
"""Bytes of answers that are not read yet."""


class PostedNotices:
    """Takes what engines post. `read` returns the notices of a body, None if it is none; `take`
    gets each of them.
    """

    def __init__(
        self,
        read: Callable[[bytes], Sequence[Notice] | None],
        take: Callable[[Notice], None],
        clock: Clock,
        observers: Observers,
    ) -> None:
        bounds = own_bounds(
            clock,
            observers,
            connections=MAX_CONNECTIONS,
            write_seconds=WRITE_SECONDS,
            max_unread=MAX_UNREAD,
        )
        self.budget = BodyBudget(MAX_HELD, observers)
        http = notice_protocol(bounds, observers, self.budget)
        self.listener = OwnListener(notice_app(read, take), http, keep_alive=KEEP_ALIVE)
        self._socket: socket.socket | None = None

    def __repr__(self) -> str:
        return f"<PostedNotices {self.budget!r}>"

    def bind(self, sockets: Sockets, place: AddressToBind) -> None:
        """Bind the socket.

        Raises:
            SettingsError: the address can't be bound.
        """
        self._socket = sockets.listener(place)

    async def run(self) -> None:
        """Serve until cancelled."""
        async with self.listener.serving(self._socket):
            await asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
