"""The ASGI application in front of the API server's: it records each request and carries out the
faults that are due.

Each message of an answer passes here before uvicorn makes bytes of it. At each moment of the
request the book of faults is asked. A fault changes how the rest is written, acts on the engine, or
takes the answer over: then the application's own messages are dropped, and the fault sends
something else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdproxy_lab.sim.failed import StreamCutError
from pdproxy_lab.sim.faults.book import FaultBook, Situation
from pdproxy_lab.sim.faults.kind import Occurrence
from pdproxy_lab.sim.faults.moments import Moment
from pdproxy_lab.sim.faults.targets import ProcessControls
from pdproxy_lab.sim.journal import Journal, Request
from pdproxy_lab.sim.reply import ScriptedReply
from pdproxy_lab.sim.script import Scripts
from pdproxy_lab.sim.sse import Event, classify, events_of
from pdproxy_lab.sim.transport import SCOPE_KEY, ConnectionControls, RequestConnection
from pdproxy_lab.sim.watched import WatchedEngine, watcher
from pdproxy_lab.sim.writing import Writer

logger = logging.getLogger("pdproxy")

_CANCEL_TIMEOUT = 1.0
"""Seconds that a cancelled application gets to end."""


class Host(ProcessControls, Protocol):
    """The server, as the middleware uses it."""

    engine: WatchedEngine
    scripts: Scripts
    journal: Journal
    crashes: list[str]
    websocket: ASGIApp | None

    @property
    def faults(self) -> FaultBook:
        """The armed faults."""

    def got_defective(self, defect: str) -> None:
        """Take note of a body that can't be what its sender wanted to send."""


class FaultMiddleware:
    """The ASGI application that uvicorn serves."""

    def __init__(self, app: ASGIApp, host: Host) -> None:
        self._app, self._host = app, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or one WebSocket, which has no faults."""
        if scope["type"] == "websocket":
            self._host.journal.note(Request("GET", scope["path"], _text(scope["headers"]), b"", 0))
            await (self._host.websocket or self._app)(scope, receive, send)
            return
        connection: RequestConnection = scope[SCOPE_KEY]
        body = await _read(receive)
        if body is None:
            return
        headers = _text(scope["headers"])
        request = Request(scope["method"], scope["path"], headers, body, connection.number)
        self._host.journal.note(request)
        if request.defect is not None:
            self._host.got_defective(request.defect)
        handled = HandledRequest(self._app, self._host, connection, request, scope, receive, send)
        connection.observe(handled)
        try:
            await handled.run()
        except asyncio.CancelledError:
            if not connection.wire.is_closing():
                raise
        except StreamCutError:
            await handled.writer.flush()
            handled.ended()
            connection.wire.close()
        except Exception as error:
            # A mistake in the simulator or in a test's script: it must not look like a fault.
            logger.exception("%s failed in the simulated engine", request.path)
            self._host.crashes.append(f"{request.path}: {error!r}")
            handled.ended()
            connection.wire.abort()


def _text(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]


async def _read(receive: Receive) -> bytes | None:
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


class HandledRequest:
    """One request and its answer. It is the `Answer` that faults act on."""

    def __init__(
        self,
        app: ASGIApp,
        host: Host,
        connection: RequestConnection,
        request: Request,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self._host, self._connection, self._request = host, connection, request
        self._app, self._scope, self._receive_more = app, scope, receive
        self._body_read = False
        self.writer = Writer(connection, send)
        self._gone = asyncio.Event()
        """Set when the connection is gone, whoever ended it."""
        self._scripted: asyncio.Task[None] | None = None
        self._taken: asyncio.Future[Occurrence] = asyncio.get_running_loop().create_future()
        """The fault that has taken the answer over."""
        self._past: set[Moment] = set()
        self.start: Message | None = None
        self.due: Message | None = None
        self._sse = False
        self._outputs = 0

    # -- what faults act on

    @property
    def connection(self) -> ConnectionControls:
        """The client's connection."""
        return self._connection.controls

    @property
    def engine(self) -> WatchedEngine:
        """The engine."""
        return self._host.engine

    @property
    def process(self) -> ProcessControls:
        """The server."""
        return self._host

    @property
    def path(self) -> str:
        """The route."""
        return self._request.path

    @property
    def streamed(self) -> bool:
        """Whether the client asked for a stream."""
        return self._request.stream

    @property
    def usage_at_end(self) -> bool:
        """Whether the client asked for a usage event at the end of a stream."""
        return self._request.usage_at_end

    @property
    def _has_handle(self) -> bool:
        """Whether a good answer has a handle. Some engines give one to every request."""
        facts = self.engine.facts
        always = facts.connector == "cpu" and facts.role == "prefill"
        return self._request.wants_handle or (
            always and self._request.generating and not self._request.stream
        )

    def abort(self) -> None:
        """Have the engine end the request with the finish reason "abort"."""
        self.engine.end_aborted(self._occurs)

    def ended(self) -> None:
        """Record that the engine ends the answer: the client has not left."""
        self._request.over = True

    def left(self) -> None:
        """Take note that the connection is gone."""
        self._gone.set()
        if not self._request.over:
            self._request.left_at = asyncio.get_running_loop().time()
            self._request.left.set()
        if self._scripted is not None:
            self._scripted.cancel()

    # -- from the request to its end

    async def run(self) -> None:
        """Answer."""
        script = self._host.scripts.take(self._request)
        if script is not None:
            await self._follow(script)
            return
        if self._occurs("queued"):
            await self._take_over()
            return
        if self.writer.style.delay:
            await self._sleep(self.writer.style.delay)
        watcher.set(self._occurs)
        work = asyncio.create_task(
            self._serve(), name=f"{self._request.method} {self._request.path}"
        )
        try:
            waited: set[asyncio.Future[Any]] = {work, self._taken}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not self._taken.done():
                work.result()
                return
            await self.writer.idle()
            if not self._taken.result().kind.engine_continues:
                await self._cancel(work)
            await self._take_over()
        finally:
            await self._cancel(work)

    async def _take_over(self) -> None:
        taken = self._taken.result()
        await self.writer.flush()
        await taken.kind.take_over(self, taken)
        if not self._connection.complete:
            await self._gone.wait()

    async def _serve(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def _cancel(self, work: asyncio.Task[None]) -> None:
        if not work.done():
            work.cancel()
            await asyncio.wait({work}, timeout=_CANCEL_TIMEOUT)
        if (
            work.done()
            and not work.cancelled()
            and (error := work.exception()) is not None
            and self._taken.done()
        ):
            logger.debug("dropped with its answer: %r", error)

    async def _follow(self, script: Any) -> None:
        reply = ScriptedReply(
            self._host.engine, self._request, self._connection, self._serve_for_script
        )
        self._scripted = asyncio.ensure_future(script(reply))
        try:
            await self._scripted
        except asyncio.CancelledError:
            if not self._gone.is_set():
                raise
        finally:
            self._scripted.cancel()
        self._request.over = not self._request.left.is_set()
        self._connection.answered()

    async def _serve_for_script(self) -> None:
        watcher.set(None)
        await self._app(self._scope, self._receive, self.writer.send)

    async def _receive(self) -> Message:
        if not self._body_read:
            self._body_read = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        message = await self._receive_more()
        if message["type"] == "http.disconnect" and not self._gone.is_set():
            # uvicorn sends it also when the answer is complete: the application must not end before
            # the last write.
            await self.writer.idle()
        return message

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), seconds)

    # -- moments

    def _occurs(self, at: Moment) -> bool:
        """Carry out the faults of a moment; return whether one has taken the answer over."""
        if self._taken.done() or self._gone.is_set():
            return self._taken.done()
        if at != "mid_stream":
            if at in self._past:
                return False
            self._past.add(at)
        now = Situation(
            path=self._request.path,
            body=self._request.body,
            generating=self._request.generating,
            release=self._request.release,
            stream=self._request.stream,
            head_out=self.writer.head_out,
            events=self._outputs,
        )
        for one in self._host.faults.due(at, now):
            if at == "after" and one.kind.on_connection(self.connection, one):
                continue
            if one.kind.on_answer(self, one):
                continue
            self._taken.set_result(one)
            return True
        return False

    # -- the application's messages

    async def _send(self, message: Message) -> None:
        if self._taken.done():
            return
        if message["type"] == "http.response.start":
            self.start = message
            kind = next(
                (value for name, value in message["headers"] if name.lower() == b"content-type"),
                b"",
            )
            self._sse = kind.startswith(b"text/event-stream")
            if self._sse:
                await self._begin()
            return
        if message["type"] != "http.response.body":
            await self.writer.send(message)
            return
        self.due = message
        if not self._sse:
            await self._send_whole(message)
            return
        events = events_of(message.get("body", b""))
        for event in events:
            self.due = {"type": message["type"], "body": event, "more_body": True}
            if self._stream_moments(classify(event)):
                return
            await self.writer.send(self.due)
            if self._taken.done():
                return
        if not message.get("more_body"):
            await self.writer.send({"type": message["type"], "body": b"", "more_body": False})
            self._finished()

    async def _send_whole(self, message: Message) -> None:
        if not self.writer.head_out:
            if self._good and self._has_handle and self._occurs("handed_over"):
                return
            if self._good and self._occurs("last_chunk"):
                return
            await self._begin()
            if self._taken.done():
                return
        await self.writer.send(message)
        if not message.get("more_body"):
            self._finished()

    async def _begin(self) -> None:
        assert self.start is not None
        await self.writer.send(self.start)
        if self._good:
            self._occurs("head")

    @property
    def _good(self) -> bool:
        return self.start is not None and self.start["status"] == 200

    def _stream_moments(self, kind: Event) -> bool:
        """Pass the moments before an event; return whether the event must not be sent."""
        if kind is Event.DONE:
            return self._occurs("before_done")
        if kind is Event.ENDING:
            return self._occurs("last_chunk")
        if kind not in (Event.OUTPUT, Event.FINISH):
            return False
        taken = self._occurs("mid_stream") if self._outputs else self._occurs("before_first_token")
        taken = taken or (kind is Event.FINISH and self._occurs("last_chunk"))
        if not taken:
            self._outputs += 1
        return taken

    def _finished(self) -> None:
        self._request.over = not self._request.left.is_set()
        if self._good:
            self._occurs("after")
