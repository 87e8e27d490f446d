"""Bodies of requests over ASGI: taken where a route reads one and the request's sender may send
one, else dropped as they come.

Nothing is kept of what is dropped. A request is answered without its body, and if that has not come
whole by then, the connection closes behind the answer: else a client without a key could go on
sending for as long as the longest body may take.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from pdproxy.web.ignored_offer import OfferIgnoringConnection


class WantedBodiesConnection(OfferIgnoringConnection):
    """A connection that takes the bodies that it wants."""

    __slots__ = ("_drops", "_keeps_alive")

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._drops = False
        """Whether the body of the last request that was read is dropped."""
        self._keeps_alive = False
        """Whether that request's connection may stay open if its body comes in time."""

    def takes_body(self) -> bool:
        """Return whether the request whose head was just read may send a body."""
        return False

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        cycle = self.cycle
        self._drops = not self.takes_body()
        if self._drops:
            cycle.waiting_for_100_continue = False  # it is not asked to go on
            self._keeps_alive, cycle.keep_alive = cycle.keep_alive, False
            cycle.transport = _Ending(self)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        if not self._drops:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._drops:
            self._drops = False
            if not self.cycle.response_started:
                self.cycle.keep_alive = self._keeps_alive and not self.bounds.leaving
                self.cycle.transport = self.transport
        super().on_message_complete()


class _Ending:
    """A connection's transport, for the answer behind which it closes while its client still
    sends.
    """

    __slots__ = ("_connection", "is_closing", "write")

    def __init__(self, connection: WantedBodiesConnection) -> None:
        transport: asyncio.Transport = connection.transport
        self._connection = connection
        self.write = transport.write
        self.is_closing = transport.is_closing

    def close(self) -> None:
        """Close, so that the client can read the answer: unread bytes would turn the close into a
        reset.
        """
        self._connection.end(all_read=False)
