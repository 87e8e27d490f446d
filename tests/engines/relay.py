"""A TCP relay before one engine's HTTP port: for a proxy behind it, the engine's API restarts where
a test says so.

The real API server needs a minute for that. The relay ends the connections as the server's end
does, and shows the server's absence: it passes nothing on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import statistics
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio

from pdproxy.wire.notices import NoticeEvent, decode

READ_TIMEOUT = 30.0
"""Seconds for an engine to read KV, and for the holder to free it."""
RESET = struct.pack("ii", 1, 0)
"""The value of SO_LINGER with which closing sends a reset."""


@dataclass
class Notices:
    """Takes the place of a proxy's socket for notices: sees each notice, and passes it on to the
    proxy if that wants notices.

    A handle is known here by the id in it (`remote_request_id`). `late`: the handle whose notices
    wait until `let_go`: they come over another connection than the answers.
    """

    late: str | None = None
    _seen: set[tuple[NoticeEvent, str | None, str | None]] = field(default_factory=set)
    _kept: dict[str, str] = field(default_factory=dict)
    """Ids of handles of turns that decode engines keep, and by which id their notices name them."""
    _waiting: list[bytes] = field(default_factory=list)
    _more: asyncio.Event = field(default_factory=asyncio.Event)
    _onward: zmq.asyncio.Socket | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def at(cls, address: str, onward: str | None = None) -> AsyncIterator[Notices]:
        """Bind the `address` that the engines send to. `onward`: the proxy's, None if it has
        none.
        """
        context: zmq.asyncio.Context = zmq.asyncio.Context()
        notices, inward = cls(), context.socket(zmq.PULL)
        inward.bind(address)
        if onward is not None:
            notices._onward = context.socket(zmq.PUSH)
            notices._onward.connect(onward)
        task = asyncio.create_task(notices._listen(inward))
        try:
            yield notices
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            context.destroy(0)

    async def read(self, handle: str) -> None:
        """Return once a handle's KV was read. Of a kept turn, the one that reads reports nothing,
        and the one that keeps does.
        """
        await self._until(
            lambda: (NoticeEvent.LOADED, handle, "D") in self._seen or self._is_freed(handle)
        )

    async def freed(self, handle: str) -> None:
        """Return once the blocks of a handle are free."""
        await self._until(lambda: self._is_freed(handle))

    async def let_go(self) -> None:
        """Pass on the notices that have waited."""
        self.late, waiting = None, self._waiting[:]
        self._waiting.clear()
        for data in waiting:
            await self._pass_on(data)

    def _is_freed(self, handle: str) -> bool:
        named = self._kept.get(handle)
        return (
            NoticeEvent.RELEASED,
            *((handle, "P") if named is None else (named, "D")),
        ) in self._seen

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(READ_TIMEOUT):
            while not condition():
                self._more.clear()
                await self._more.wait()

    async def _listen(self, inward: zmq.asyncio.Socket) -> None:
        while True:
            data = await inward.recv()
            notice = decode(data)
            assert notice is not None, data
            named = notice.remote_request_id
            if notice.event is NoticeEvent.KEPT:
                assert notice.params is not None
                assert named is not None
                self._kept[json.loads(notice.params)["remote_request_id"]] = named
            self._seen.add((notice.event, named, notice.role))
            self._more.set()
            if self.late is not None and named in {self.late, self._kept.get(self.late)}:
                self._waiting.append(data)
            else:
                await self._pass_on(data)

    async def _pass_on(self, data: bytes) -> None:
        if self._onward is not None:
            await self._onward.send(data)


@dataclass(frozen=True)
class Request:
    """One request of a connection, as it was read, and the id of the KV handle in it. `releases`:
    it only gives the KV back.
    """

    data: bytes
    handle: str | None = None
    releases: bool = False

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> Request | None:
        """Return the next one, None at the connection's end."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = (line.partition(b":") for line in head.lower().split(b"\r\n"))
            length = next((int(value) for name, _, value in lines if name == b"content-length"), 0)
            body = await reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        asked: Any = json.loads(body) if body else None
        params = asked.get("kv_transfer_params") if isinstance(asked, dict) else None
        handle = (params or {}).get("remote_request_id")
        return cls(head + body, handle, handle is not None and asked.get("max_tokens") == 0)


@dataclass(frozen=True)
class Restart:
    """One restart: the seconds from the request that it ended to the connection's end, and whether
    that was a kept one.
    """

    after: float
    kept: bool


class Relay:
    """Listens on `port` for the proxy. Each of its connections has one to the engine.

    `others` is called while the engine's API is away, once the holder of the KV has freed its
    blocks: it has other prompts take them.
    """

    def __init__(
        self, engine_port: int, notices: Notices, others: Callable[[], Awaitable[None]]
    ) -> None:
        self.port = 0
        self.restarts: list[Restart] = []
        self.read: Counter[str] = Counter()
        """How often each handle came to be read."""
        self.released: Counter[str] = Counter()
        """How often each came to be released."""
        self.next: str | None = None
        """How the connections end that the next restart closes: "fin" or "reset"; None: no
        restart.
        """
        self.late = False
        """Whether the proxy gets the notices of the next restart's handle only behind the
        restart.
        """
        self._engine_port, self._notices, self._others = engine_port, notices, others
        self._serves = asyncio.Event()
        self._serves.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Relay]:
        """Listen on the loopback."""
        server = await asyncio.start_server(self._accepted, "127.0.0.1", limit=1 << 20)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def summary(self) -> str:
        """Return what has happened, in a line."""
        after = [restart.after for restart in self.restarts] or [0.0]
        kept = sum(restart.kept for restart in self.restarts)
        return (
            f"{len(self.restarts)} restarts, {kept} on kept connections, "
            f"{statistics.median(after):.3f} s behind the "
            f"request (median; {min(after):.3f} to {max(after):.3f}); {self.sent_twice} handles "
            f"sent twice, "
            f"{self.released.total()} releases"
        )

    @property
    def sent_twice(self) -> int:
        """The number of handles that came to be read more than once."""
        return sum(times > 1 for times in self.read.values())

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passing: asyncio.Task[None] | None = None
        engine: asyncio.StreamWriter | None = None
        self._open.add(writer)
        try:
            while (request := await Request.read(reader)) is not None:
                arrived = time.monotonic()
                if request.handle is not None:
                    (self.released if request.releases else self.read)[request.handle] += 1
                    await self._serves.wait()
                kept = engine is not None
                if engine is None:
                    answers, engine = await asyncio.open_connection("127.0.0.1", self._engine_port)
                    passing = asyncio.create_task(self._pass(answers, writer))
                if self._may_end(request):
                    assert passing is not None
                    passing.cancel()  # nothing of the answer reaches the proxy
                    await self._restart(request, engine, arrived, kept=kept)
                    return
                engine.write(request.data)
                await engine.drain()
        except ConnectionError:
            pass
        finally:
            self._open.discard(writer)
            if passing is not None:
                passing.cancel()
            for one in (writer, engine):
                if one is not None:
                    one.close()

    async def _pass(self, answers: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await answers.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    def _may_end(self, request: Request) -> bool:
        """Return whether a request is the one that the next restart ends."""
        handle = request.handle
        return (
            self.next is not None
            and handle is not None
            and not request.releases
            and self.read[handle] == 1
        )

    async def _restart(
        self, request: Request, engine: asyncio.StreamWriter, arrived: float, *, kept: bool
    ) -> None:
        """Let the engine read the KV, then end all connections of the proxy, and have others take
        the holder's freed blocks.
        """
        how, self.next, handle = self.next, None, request.handle
        assert handle is not None
        self._serves.clear()
        try:
            self._notices.late = handle if self.late else None
            engine.write(request.data)
            await self._notices.read(handle)
            for one in self._open:
                if how == "reset":
                    connection: socket.socket = one.get_extra_info("socket")
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                one.close()
            self.restarts.append(Restart(time.monotonic() - arrived, kept))
            await self._notices.freed(handle)
            engine.close()
            await self._others()
            await self._notices.let_go()
        finally:
            self._serves.set()
