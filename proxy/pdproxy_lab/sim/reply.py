"""What a script can do with one request's answer: write to the raw connection, and have the engine
answer.

A script is an async function of a `ScriptedReply`. It is cancelled when the client leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from pdproxy_lab.sim.engine import SimEngine
from pdproxy_lab.sim.journal import Request
from pdproxy_lab.sim.transport import RequestConnection

Script = Callable[["ScriptedReply"], Awaitable[None]]


class ScriptedReply:
    """One answer. Nothing is checked: what a script writes is what the client gets."""

    def __init__(
        self,
        engine: SimEngine,
        request: Request,
        connection: RequestConnection,
        serve: Callable[[], Awaitable[None]],
    ) -> None:
        self.engine = engine
        self.request = request
        self._connection = connection
        self._serve = serve

    async def serve(self) -> None:
        """Let the engine answer as if there were no script. Nothing must have been written
        before.
        """
        await self._serve()

    async def raw(self, data: bytes) -> None:
        """Write bytes as they are, and wait until the socket takes more."""
        self._connection.wire.write(data)
        await self._connection.drain()

    async def whole(
        self, body: bytes, status: int = 200, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Write a complete answer with a length; JSON unless `headers` has another type."""
        named = list(headers)
        if not any(name.lower() == "content-type" for name, _ in named):
            named.insert(0, ("content-type", "application/json"))
        lines = "".join(f"{name}: {value}\r\n" for name, value in named)
        head = (
            f"HTTP/1.1 {status} X\r\nserver: uvicorn\r\n{lines}content-length: {len(body)}\r\n\r\n"
        )
        await self.raw(head.encode("latin-1") + body)

    async def start(self, kind: str = "text/event-stream; charset=utf-8") -> None:
        """Write the head of a stream."""
        head = (
            f"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: {kind}\r\ntransfer-encoding: "
            f"chunked\r\n\r\n"
        )
        await self.raw(head.encode("latin-1"))

    async def piece(self, data: bytes) -> None:
        """Write one HTTP chunk."""
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def pieces(self, *data: bytes) -> None:
        """Write several chunks, one write each."""
        for one in data:
            await self.piece(one)

    async def finish(self) -> None:
        """Write the end of a chunked body."""
        await self.raw(b"0\r\n\r\n")

    def eof(self) -> None:
        """Close the connection with a FIN, whatever was sent."""
        self.request.over = True
        self._connection.wire.close()

    def reset(self) -> None:
        """Close it with an RST."""
        self.request.over = True
        self._connection.wire.reset()

    async def stall(self) -> None:
        """Send nothing more until the client leaves."""
        await asyncio.get_running_loop().create_future()
