"""The data path's entry: a uvicorn protocol class that takes the generating routes and WebSockets,
and leaves all others to ASGI.

Owns the client's connection while a generating request is on it. Requests of other routes get
uvicorn's own cycle and reach FastAPI. A WebSocket gets a `WebSocketCycle`, which has the connection
from the end of the head on. A generating request gets a `GenerateCycle`, which collects
the body, runs the service in a task and writes to the socket without ASGI. It uses few names of
uvicorn's class, and a test checks each of them. `web.guard` has the limits of every connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TypeVar
from urllib.parse import unquote_to_bytes

import httptools
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pdproxy.kit.errors import PdproxyError
from pdproxy.serving.access.clients import Client
from pdproxy.serving.access.routes import TABLE, RouteEntry, RouteKind
from pdproxy.web.cycle import DataPath, GenerateCycle, ResponseCycle
from pdproxy.web.guard import GuardedProtocol
from pdproxy.web.passthrough_asgi import CONNECTION, FOUND
from pdproxy.web.revocable import MakeError
from pdproxy.web.websocket import WebSocketCycle, WebSockets
from pdproxy.wire.route import Route

_ROUTES = {route.path.encode(): route for route in Route}
_PASSED = {
    entry.path: entry.path for entry in TABLE if entry.kind is RouteKind.PASSED and entry.has_body
}
_WEBSOCKETS = {entry.path.encode(): entry for entry in TABLE if entry.kind is RouteKind.WEBSOCKET}
ONE_READ = 250_000
"""Bytes that come with one read: uvloop reads 256,000 at once."""
_T = TypeVar("_T")


class DataPathProtocol(GuardedProtocol):
    """A connection whose generating requests do not use ASGI. `protocol_class` makes a subclass for
    one data path.
    """

    data_path: DataPath
    websockets: WebSockets
    of_websockets = _WEBSOCKETS
    """The routes of WebSockets by their paths."""
    routes = _ROUTES
    """The generating routes by their paths."""
    longest = 3 * max(map(len, _ROUTES))
    """Bytes of such a path if every letter in it is escaped."""
    reading = _PASSED
    """The paths of routes over ASGI that read a body, and those in the table of routes."""
    __slots__ = ()

    def takes_body(self) -> bool:
        path = self.reading.get(self.scope["path"])
        if path is None or self.scope["method"] != "POST":
            return False
        found = self.data_path.identify.find(self, self.headers, path)
        self.scope[FOUND] = found  # type: ignore[literal-required]  # for `web.passthrough_asgi`
        return found.error is None

    def more_headers(self) -> list[tuple[bytes, bytes]]:
        return self.data_path.cors(self.headers or ())

    def refuse_body(self, cycle: RequestResponseCycle, error: PdproxyError) -> None:
        if isinstance(cycle, (GenerateCycle, WebSocketCycle)):
            cycle.refuse(error)
        else:
            super().refuse_body(cycle, error)

    def on_headers_complete(self) -> None:
        self.check_host()
        route = self._found(self.routes) if self.parser.get_method() == b"POST" else None
        if route is None:
            entry = self._websocket() if self.parser.should_upgrade() else None
            if entry is not None:
                self._begin(
                    WebSocketCycle(entry, self.websockets, self.data_path, self, self.headers)
                )
                return
            self.scope[CONNECTION] = self  # type: ignore[literal-required]  # for `web.passthrough_asgi`
            super().on_headers_complete()
            self.cycle.keep_alive = self.cycle.keep_alive and not self.bounds.leaving
            return
        if self.parser.should_upgrade():
            self.note_offer()
        http_1_1 = self.parser.get_http_version() == "1.1"
        self._begin(
            GenerateCycle(
                route,
                self.data_path,
                self,
                self.headers,
                chunked=http_1_1,
                keep_alive=http_1_1 and self.parser.should_keep_alive() and not self.bounds.leaving,
                expect_100_continue=self.expect_100_continue,
            )
        )

    def _begin(self, cycle: GenerateCycle | WebSocketCycle) -> None:
        existing = self.cycle
        closing = existing is not None and existing.response_complete and not existing.keep_alive
        self.cycle = cycle
        # The cycle has what it needs of the head, and drops that early.
        self.url, self.headers, self.scope = b"", [], {}  # type: ignore[typeddict-item]
        self.begin_body()
        # the connection ends with the answer before: nobody would read this one
        cycle.disconnected = closing
        if existing is None or existing.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:  # pipelined: it waits for the one before
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def _found(self, routes: Mapping[bytes, _T]) -> _T | None:
        """Return the one of these routes that the request has, None if it has another. The path is
        read as uvicorn reads it.
        """
        found = routes.get(self.url)
        if found is None:
            # without query and fragment, also of the absolute form
            path = httptools.parse_url(self.url).path or b""
            if len(path) <= self.longest:
                found = routes.get(unquote_to_bytes(path) if b"%" in path else path)
        return found

    def _websocket(self) -> RouteEntry | None:
        """Return the route of the WebSocket that the request offers to open, None if it offers
        another protocol, or has another route.
        """
        parser = self.parser
        if parser.get_method() != b"GET" or parser.get_http_version() != "1.1":
            return None
        offers = [value.lower() for name, value in self.headers if name == b"upgrade"]
        return self._found(self.of_websockets) if offers == [b"websocket"] else None

    def ends_soon(self) -> bool:
        cycle = self.cycle
        return self._in_body and isinstance(cycle, GenerateCycle) and cycle.missing <= ONE_READ

    def switched(self, behind: bytes) -> bool:
        if isinstance(self.cycle, WebSocketCycle):
            self.cycle.switched(behind)
            return True
        return False

    def on_body(self, body: bytes) -> None:
        if isinstance(self.cycle, GenerateCycle):
            self.count_part(len(body))
            self.cycle.feed(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if isinstance(self.cycle, GenerateCycle):
            if self._offer is None:
                self.end_body()
                self.cycle.fed()
        elif not isinstance(self.cycle, WebSocketCycle):
            super().on_message_complete()

    def left(self, cycle: RequestResponseCycle) -> None:
        if isinstance(cycle, (GenerateCycle, WebSocketCycle)):
            cycle.left()
        else:
            super().left(cycle)

    def revoke(self, error: MakeError, keys: AbstractSet[bytes] | None) -> int:
        cycles = (self.active, *(queued for queued, _ in self.pipeline))
        own = [cycle for cycle in cycles if isinstance(cycle, (GenerateCycle, WebSocketCycle))]
        return super().revoke(error, keys) + sum(cycle.revoke(error, keys) for cycle in own)

    def request_client(self) -> Client:
        return (
            self.active.client
            if isinstance(self.active, ResponseCycle)
            else super().request_client()
        )

    def pause_writing(self) -> None:
        super().pause_writing()
        if isinstance(self.active, GenerateCycle):
            self.active.pressure(paused=True)

    def resume_writing(self) -> None:
        super().resume_writing()
        if isinstance(self.active, GenerateCycle):
            self.active.pressure(paused=False)


def protocol_class(
    path: DataPath, root_path: str = "", websockets: WebSockets | None = None
) -> type[DataPathProtocol]:
    """Return a protocol class for uvicorn's `http` setting that serves `path`; routes are found
    behind `root_path`, too. `websockets`: None has none.
    """
    opened = {} if websockets is None else _WEBSOCKETS
    routes = _ROUTES | {root_path.encode() + name: route for name, route in _ROUTES.items()}
    bound = {
        "routes": routes,
        "reading": _PASSED | {root_path + path: path for path in _PASSED},
        "of_websockets": opened | {root_path.encode() + at: one for at, one in opened.items()},
        "websockets": websockets,
        "longest": 3 * max(map(len, routes)),
        "data_path": path,
        "bounds": path and path.bounds,
        "observers": path and path.observers,
    }
    return type("BoundDataPathProtocol", (DataPathProtocol,), bound)
