"""One request's way through a simulated engine: noted in the journal, watched at each moment, hit by the faults that are due.

Owns the ASGI application around the API server's. Each message of an answer passes here before uvicorn makes bytes of it; at
each moment the book is asked. A fault either changes how the rest is written, acts on the engine, or takes the answer over: then
the application's own messages are dropped, and `pdproxy.sim.fault_actions` says what the client gets instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdproxy.sim import fault_actions
from pdproxy.sim.fault_kinds import Moment
from pdproxy.sim.faults import Fault, FaultBook, Situation
from pdproxy.sim.journal import Journal, Request
from pdproxy.sim.reply import Reply
from pdproxy.sim.script import Scripts
from pdproxy.sim.sse import Event, classify, events_of
from pdproxy.sim.transport import LINE, Line
from pdproxy.sim.watched import WatchedEngine, watcher
from pdproxy.sim.writing import Style, Writer

logger = logging.getLogger("pdproxy")

_PATIENCE = 1.0
"""Seconds that an application which was told to end gets for it."""


class Host(Protocol):
    """The server, as an exchange sees it."""

    engine: WatchedEngine
    scripts: Scripts
    journal: Journal
    crashes: list[str]

    @property
    def faults(self) -> FaultBook:
        """The armed faults."""

    def stop_soon(self, kind: str, seconds: float) -> None:
        """Have the whole process killed, terminated or restarted."""

    def freeze_now(self, seconds: float) -> None:
        """Have the whole process stopped; 0: until thawed."""


class Exchanges:
    """The ASGI application that uvicorn serves."""

    def __init__(self, app: ASGIApp, host: Host) -> None:
        self._app, self._host = app, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        line: Line = scope[LINE]
        body = await _read(receive)
        if body is None:
            return
        headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        request = Request(scope["method"], scope["path"], headers, body, line.number)
        self._host.journal.note(request)
        exchange = Exchange(self._app, self._host, line, request, scope, receive, send)
        line.occupy(exchange)
        try:
            await exchange.run()
        except asyncio.CancelledError:
            if not line.wire.is_closing():
                raise
        except Exception as error:
            # A mistake in the simulator or in a test's script: never hidden behind a fault.
            logger.exception("%s failed in the simulated engine", request.path)
            self._host.crashes.append(f"{request.path}: {error!r}")
            exchange.ended()
            line.wire.abort()


async def _read(receive: Receive) -> bytes | None:
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


class Exchange:
    """One request and its answer."""

    def __init__(
        self, app: ASGIApp, host: Host, line: Line, request: Request, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self.host, self.line, self.request = host, line, request
        self._app, self._scope, self._receive_more = app, scope, receive
        self._body_read = False
        self.writer = Writer(line, send)
        self.gone = asyncio.Event()
        """Set when the connection is gone, whoever ended it."""
        self._scripted: asyncio.Task[None] | None = None
        self._taken: asyncio.Future[Fault] = asyncio.get_running_loop().create_future()
        self._past: set[Moment] = set()
        self.start: Message | None = None
        """The application's status and headers."""
        self.due: Message | None = None
        """What the application is about to send."""
        self._sse = False
        self._outputs = 0

    # -- what the connection tells

    def ended(self) -> None:
        """The engine itself ends this exchange: the client has not left it."""
        self.request.over = True

    def left(self) -> None:
        """The connection is gone."""
        self.gone.set()
        if not self.request.over:
            self.request.left_at = asyncio.get_running_loop().time()
            self.request.left.set()
        if self._scripted is not None:
            self._scripted.cancel()

    # -- the way through

    async def run(self) -> None:
        """Answer."""
        script = self.host.scripts.take(self.request)
        if script is not None:
            await self._follow(script)
            return
        if not self.occurs("queued"):
            if self.writer.style.delay:
                await self._sleep(self.writer.style.delay)
            watcher.set(self.occurs)
            work = asyncio.create_task(self._serve(), name=f"{self.request.method} {self.request.path}")
            try:
                waited: set[asyncio.Future[Any]] = {work, self._taken}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if not self._taken.done():
                    work.result()
                    return
                await self.writer.idle()
                if not fault_actions.goes_on(self._taken.result()):
                    await self._cancel(work)
                await fault_actions.act(self._taken.result(), self)
            finally:
                await self._cancel(work)
        else:
            await fault_actions.act(self._taken.result(), self)

    async def _serve(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def _cancel(self, work: asyncio.Task[None]) -> None:
        if not work.done():
            work.cancel()
            await asyncio.wait({work}, timeout=_PATIENCE)
        if work.done() and not work.cancelled() and (error := work.exception()) is not None and self._taken.done():
            logger.debug("dropped with its answer: %r", error)

    async def _follow(self, script: Any) -> None:
        reply = Reply(self.host.engine, self.request, self.line, self._serve_for_script)
        self._scripted = asyncio.ensure_future(script(reply))
        try:
            await self._scripted
        except asyncio.CancelledError:
            if not self.gone.is_set():
                raise
        finally:
            self._scripted.cancel()
        self.request.over = not self.request.left.is_set()
        self.line.answered()

    async def _serve_for_script(self) -> None:
        watcher.set(None)
        await self._app(self._scope, self._receive, self.writer.send)

    async def _receive(self) -> Message:
        if not self._body_read:
            self._body_read = True
            return {"type": "http.request", "body": self.request.body, "more_body": False}
        message = await self._receive_more()
        if message["type"] == "http.disconnect" and not self.gone.is_set():
            # uvicorn says so, too, when it holds the answer for complete: the application must not be gone before the last write.
            await self.writer.idle()
        return message

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.gone.wait(), seconds)

    # -- moments

    def occurs(self, at: Moment) -> bool:
        """Take note of a moment; tell whether a fault has taken the answer over."""
        if self._taken.done() or self.gone.is_set():
            return self._taken.done()
        if at != "mid_stream":
            if at in self._past:
                return False
            self._past.add(at)
        now = Situation(
            path=self.request.path,
            generating=self.request.generating,
            release=self.request.release,
            stream=self.request.stream,
            head_out=self.writer.head_out,
            events=self._outputs,
        )
        for armed in self.host.faults.due(at, now):
            if fault_actions.passing(armed, at, self):
                continue
            self._taken.set_result(armed.fault)
            return True
        return False

    def restyle(self, style: Style) -> None:
        """Write the rest of the answer in another manner."""
        self.writer.style = style

    # -- the application's messages

    async def _send(self, message: Message) -> None:
        if self._taken.done():
            return
        if message["type"] == "http.response.start":
            self.start = message
            kind = next((value for name, value in message["headers"] if name.lower() == b"content-type"), b"")
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
            if self._good and self.request.wants_handle and self.occurs("handed_over"):
                return
            if self._good and self.occurs("last_chunk"):
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
            self.occurs("head")

    @property
    def _good(self) -> bool:
        return self.start is not None and self.start["status"] == 200

    def _stream_moments(self, kind: Event) -> bool:
        """Take note of the moments before an event; tell whether it must not go out."""
        if kind is Event.DONE:
            return self.occurs("before_done")
        if kind not in (Event.OUTPUT, Event.FINISH):
            return False
        taken = self.occurs("before_first_token") if not self._outputs else self.occurs("mid_stream")
        taken = taken or (kind is Event.FINISH and self.occurs("last_chunk"))
        if not taken:
            self._outputs += 1
        return taken

    def _finished(self) -> None:
        self.request.over = not self.request.left.is_set()
        if self._good:
            self.occurs("after")
