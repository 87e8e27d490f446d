"""Writes one answer's bytes in its style: as uvicorn does, slowly, cut into pieces, or several
chunks at once.

Owns the bytes between uvicorn and the socket. uvicorn still makes them, so they are right in every
style.
"""

from __future__ import annotations

import random
from asyncio import Lock, sleep

from starlette.types import Message, Send

from pdproxy_lab.sim.transport import RequestConnection
from pdproxy_lab.sim.write_style import PLAIN, cut


class Writer:
    """Writes one answer."""

    def __init__(self, connection: RequestConnection, send: Send) -> None:
        self._connection, self._send = connection, send
        self.style = PLAIN
        self.head_out = False
        self._joined: list[bytes] = []
        self._writing = Lock()

    async def idle(self) -> None:
        """Wait until nothing is being written."""
        async with self._writing:
            return

    async def send(self, message: Message) -> None:
        """Write one ASGI message in the answer's style."""
        async with self._writing:
            await self._send_styled(message)

    async def _send_styled(self, message: Message) -> None:
        starts = message["type"] == "http.response.start"
        if self.style is PLAIN and not self._joined:
            await self._send(message)
        else:
            last = not starts and not message.get("more_body")
            data, closes = await self.rendered(message)
            await self._write(data, last=last or starts)
            if closes:
                self._connection.wire.close()
            self._connection.written()
        self.head_out = self.head_out or starts

    async def rendered(self, message: Message) -> tuple[bytes, bool]:
        """Return the bytes that uvicorn makes of a message, and whether it closes the connection
        after them.
        """
        with self._connection.rendering() as rendered:
            await self._send(message)
        return rendered.data, rendered.closes

    async def raw(self, data: bytes) -> None:
        """Write bytes as they are, after those that wait to be joined."""
        await self.flush()
        self._connection.wire.write(data)
        await self._connection.drain()

    async def flush(self) -> None:
        """Write what waits to be joined."""
        joined, self._joined = self._joined, []
        if joined:
            await self._put(b"".join(joined))

    async def _write(self, data: bytes, *, last: bool) -> None:
        if data:
            self._joined.append(data)
        wanted = self.style.join
        if last or wanted is None or (wanted and len(self._joined) >= wanted):
            await self.flush()

    async def _put(self, data: bytes) -> None:
        style = self.style
        pieces = (
            [data]
            if style.cuts is None
            else cut(data, style.cuts, style.chance or random.Random(0))
        )
        if style.delay:
            await sleep(style.delay)
        for number, piece in enumerate(pieces):
            if number and style.cut_delay:
                await sleep(style.cut_delay)
            elif number:  # a reader in the same event loop must get its turn
                await sleep(0)
                await sleep(0)
            self._connection.wire.write(piece)
            await self._connection.drain()
