"""The data path's entry: a uvicorn protocol class that takes the generating routes and leaves all
others to ASGI.

Owns the client's connection while a generating request is on it. Requests of other routes get
uvicorn's own cycle and reach FastAPI. A generating request gets a `GenerateCycle`, which collects
the body, runs the service in a task and writes to the socket without ASGI. It uses few names of
uvicorn's class, and a test checks each of them. `web.guard` has the limits of every connection.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from urllib.parse import unquote_to_bytes

import httptools
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pdproxy.kit.errors import PdproxyError
from pdproxy.serving.access.clients import Client
from pdproxy.serving.access.routes import TABLE, RouteKind
from pdproxy.web.cycle import DataPath, GenerateCycle
from pdproxy.web.guard import GuardedProtocol
from pdproxy.web.passthrough_asgi import CONNECTION, FOUND
from pdproxy.web.revocable import MakeError
from pdproxy.wire.route import Route

_ROUTES = {route.path.encode(): route for route in Route}
_PASSED = {
    entry.path: entry.path for entry in TABLE if entry.kind is RouteKind.PASSED and entry.has_body
}


class DataPathProtocol(GuardedProtocol):
    """A connection whose generating requests do not use ASGI. `protocol_class` makes a subclass for
    one data path.
    """

    data_path: DataPath
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
        if isinstance(cycle, GenerateCycle):
            cycle.refuse(error)
        else:
            super().refuse_body(cycle, error)

    def on_headers_complete(self) -> None:
        self.check_host()
        route = self._route() if self.parser.get_method() == b"POST" else None
        if route is None:
            self.scope[CONNECTION] = self  # type: ignore[literal-required]  # for `web.passthrough_asgi`
            super().on_headers_complete()
            self.cycle.keep_alive = self.cycle.keep_alive and not self.bounds.leaving
            return
        if self.parser.should_upgrade():
            self.note_offer()
        http_1_1 = self.parser.get_http_version() == "1.1"
        existing = self.cycle
        closing = existing is not None and existing.response_complete and not existing.keep_alive
        self.cycle = cycle = GenerateCycle(
            route,
            self.data_path,
            self,
            self.headers,
            chunked=http_1_1,
            keep_alive=http_1_1 and self.parser.should_keep_alive() and not self.bounds.leaving,
            expect_100_continue=self.expect_100_continue,
        )
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

    def _route(self) -> Route | None:
        """Return the generating route of the request, None if it has another. The path is read as
        uvicorn reads it.
        """
        found = self.routes.get(self.url)
        if found is None:
            # without query and fragment, also of the absolute form
            path = httptools.parse_url(self.url).path or b""
            if len(path) <= self.longest:
                found = self.routes.get(unquote_to_bytes(path) if b"%" in path else path)
        return found

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
        else:
            super().on_message_complete()

    def left(self, cycle: RequestResponseCycle) -> None:
        if isinstance(cycle, GenerateCycle):
            cycle.left()
        else:
            super().left(cycle)

    def revoke(self, error: MakeError, keys: AbstractSet[bytes] | None) -> int:
        cycles = (self.active, *(queued for queued, _ in self.pipeline))
        own = [cycle for cycle in cycles if isinstance(cycle, GenerateCycle)]
        return super().revoke(error, keys) + sum(cycle.revoke(error, keys) for cycle in own)

    def request_client(self) -> Client:
        return (
            self.active.client
            if isinstance(self.active, GenerateCycle)
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


def protocol_class(path: DataPath, root_path: str = "") -> type[DataPathProtocol]:
    """Return a protocol class for uvicorn's `http` setting that serves `path`; routes are found
    behind `root_path`, too.
    """
    routes = _ROUTES | {root_path.encode() + name: route for name, route in _ROUTES.items()}
    bound = {
        "routes": routes,
        "reading": _PASSED | {root_path + path: path for path in _PASSED},
        "longest": 3 * max(map(len, routes)),
        "data_path": path,
        "bounds": path and path.bounds,
        "observers": path and path.observers,
    }
    return type("BoundDataPathProtocol", (DataPathProtocol,), bound)
