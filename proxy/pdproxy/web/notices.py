"""Where engines post notices that KV is ready: LMCache's telemetry over HTTP, at a listener of its
own, without FastAPI.

Nothing proves who posts: whoever reaches the port can. So everything is bounded: connections, the
time of heads and bodies, the bytes of one body and of all, and how long the event loop is held up.
A notice has an effect only for a prompt that waits for it, by an id that pdproxy has made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from pdproxy.kit.errors import BadRequestError, BodyTooLargeError, NotStoredError, PdproxyError
from pdproxy.kit.frames import drop_traceback
from pdproxy.observe.events import Observers
from pdproxy.web.body_budget import BodyBudget
from pdproxy.web.connection_bounds import ConnectionBounds
from pdproxy.web.guard import GuardedProtocol
from pdproxy.wire import lmcache_telemetry
from pdproxy.wire.errors import error_body, retry_headers
from pdproxy.wire.notices import Notice

AT_ONCE = 64
"""Notices that are passed on in one turn of the event loop: about a millisecond."""
BODY = "pdproxy.body"
"""The key of an ASGI scope under which the whole body is found."""


class NoticeProtocol(GuardedProtocol):
    """An engine's connection. `notice_protocol` makes a subclass with bounds."""

    budget: BodyBudget
    __slots__ = ("_held",)

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._held = bytearray()

    def takes_body(self) -> bool:
        return self.scope["method"] == "POST" and self.scope["path"] == lmcache_telemetry.PATH

    def on_body(self, body: bytes) -> None:
        self.count_part(len(body))
        if (
            self._drops
            or self._discarding
            or self.cycle.response_complete
            or self.cycle.disconnected
        ):
            return
        try:
            if len(self._held) + len(body) > lmcache_telemetry.MAX_BYTES:
                raise BodyTooLargeError(f"telemetry is over {lmcache_telemetry.MAX_BYTES} bytes")
            self.budget.take(self.peer, len(body))
        except PdproxyError as error:
            drop_traceback(error)
            self._forget()
            self.refuse_body(self.cycle, error)
            return
        self._held += body
        self.peer.bodies[self] = None

    def on_message_complete(self) -> None:
        if self._offer is None and not self._drops:
            self.scope[BODY] = bytes(self._held)  # type: ignore[literal-required]
            self._forget()
        super().on_message_complete()

    def evict(self, error: PdproxyError) -> None:
        self._forget()
        super().evict(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _forget(self) -> None:
        self.peer.bodies.pop(self, None)
        self.budget.release(self.peer, len(self._held))
        self._held = bytearray()


def notice_protocol(
    bounds: ConnectionBounds, observers: Observers, budget: BodyBudget
) -> type[NoticeProtocol]:
    """Return a protocol class for uvicorn's `http` setting. `budget`: of all bodies that are not
    complete.
    """
    bound = {"bounds": bounds, "observers": observers, "budget": budget}
    return type("BoundNoticeProtocol", (NoticeProtocol,), bound)


def notice_app(
    read: Callable[[bytes], Sequence[Notice] | None], take: Callable[[Notice], None]
) -> ASGIApp:
    """Return the application. `read` returns the notices of a body, None if it is no telemetry;
    `take` gets each of them.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer: Response = JSONResponse(await _taken(scope, receive, read, take))
        except PdproxyError as error:
            drop_traceback(error)
            answer = Response(error_body(error), error.status, media_type="application/json")
            answer.raw_headers += retry_headers(error)
        await answer(scope, receive, send)

    return app


async def _taken(
    scope: Scope,
    receive: Receive,
    read: Callable[[bytes], Sequence[Notice] | None],
    take: Callable[[Notice], None],
) -> dict[str, str]:
    if scope["path"] != lmcache_telemetry.PATH or scope["method"] != "POST":
        raise NotStoredError(
            f"Engines post to {lmcache_telemetry.PATH}: there is nothing else here"
        )
    while BODY not in scope:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            break
    found = read(scope.pop(BODY, b""))
    if found is None:
        raise BadRequestError(
            "expected LMCache's telemetry: event, request_ids_set, world_size, kv_rank"
        )
    for at, notice in enumerate(found, 1):
        take(notice)
        if at % AT_ONCE == 0:
            await asyncio.sleep(0)
    return {"status": "ok"}
